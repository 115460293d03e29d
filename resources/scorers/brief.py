"""A scorer for `score.NAME.by.python`: 1 for the right answer, less a fiftieth for each token of the response."""

import re

ANSWER = re.compile(r"Answer: ([^\n]*)")


def score(prompt, response, row):
    found = ANSWER.search(response)
    right = found is not None and found[1].strip() == row["answer"]
    return float(right) - 0.02 * len(row["tokens"])
