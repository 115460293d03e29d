"""Two answers and who liked which better, one judge or several, as a preference pair.

response1, response2, annotator1 … annotator3     0 for a tie, 1, 2          the answer with most votes is chosen
response_a, response_b, winner                    model_a, model_b, tie
output_1, output_2, preference                    1, 2, or 1.5 for a tie
"""

import re
from collections import Counter
from typing import Any

from snaketune.corpus.parts import kind_of
from snaketune.corpus.rows import Malformed

ANSWER_COLUMNS = tuple(
    (f"{name}{first}", f"{name}{second}")
    for name in ("response", "output", "answer", "completion", "conversation")
    for first, second in (("_a", "_b"), ("_1", "_2"), ("1", "2"))
)
VERDICT_COLUMNS = ("preference", "winner", "label", "choice")
VOTER = re.compile(r"annotator_?\d+")
VERDICTS = {"1": 1, "2": 2, "a": 1, "b": 2, "0": 0, "1.5": 0, "tie": 0, "draw": 0, "equal": 0, "both": 0, "neither": 0}
VERDICTS |= {f"{name}_{side}": VERDICTS[side] for name in ("model", "response", "output", "answer") for side in "ab12"}
VERDICTS["tie (bothbad)"] = 0


def answer_columns(columns: Any) -> tuple[str, str] | None:
    """The two columns that hold the answers, where there is also somebody's verdict."""
    judged = any(column in VERDICT_COLUMNS or VOTER.fullmatch(column) for column in columns)
    return next((pair for pair in ANSWER_COLUMNS if judged and set(pair) <= set(columns)), None)


def winner(raw: dict[str, Any]) -> int:
    """1 or 2, or 0 for a tie: no verdict has more votes than each of the others, or a tie has.

    >>> winner({"annotator1": 2, "annotator2": 0, "annotator3": 2}), winner({"winner": "model_a"})
    (2, 1)

    Raises:
        Malformed: nobody voted, or a vote is none of the known ones.
    """
    ballots = {column: value for column, value in raw.items() if VOTER.fullmatch(column)}
    if not ballots:
        ballots = {column: raw[column] for column in VERDICT_COLUMNS if column in raw}
    if not ballots:
        raise Malformed("missing_column", f"nobody voted: none of {', '.join(VERDICT_COLUMNS)}, annotator1, …")
    votes = Counter(_vote(value, column) for column, value in ballots.items())
    (first, most), *others = votes.most_common(2)
    return 0 if others and others[0][1] == most else first


def _vote(value: Any, column: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        verdict = VERDICTS.get(str(value).strip().lower())
        if verdict is not None:
            return verdict
    found = f"{value!r:.40}" if isinstance(value, (str, int, float)) else kind_of(value)
    raise Malformed("unknown_vote", f"{column} holds {found}, expected 1, 2, A, B or 0 for a tie")
