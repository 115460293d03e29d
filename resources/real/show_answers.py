"""Print the answers of evaluations' models to the same held-out prompts: python resources/real/show_answers.py EVALUATION ...

Reads results/eval/EVALUATION/*/scores/responses.jsonl, as evaluations write it.
"""

import json
import sys
from pathlib import Path
from textwrap import indent

PROMPTS_PER_CORPUS = 2


def main(evaluation: str) -> None:
    folder = Path("results/eval") / evaluation
    files = sorted(folder.glob("*/scores/responses.jsonl"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise SystemExit(f"{folder} has no responses; run the workflow first")
    answers = {path.parts[-3]: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in files}
    first = next(iter(answers.values()))
    for corpus in dict.fromkeys(row["corpus"] for row in first):
        for row in [row for row in first if row["corpus"] == corpus][:PROMPTS_PER_CORPUS]:
            print(f"\n{corpus}: {row['prompt']}")
            for model, rows in answers.items():
                said = next(other["response"] for other in rows if other["id"] == row["id"])
                print(f"  {model}", indent(said.strip() or "(nothing)", "    "), sep="\n")


if __name__ == "__main__":
    for evaluation in sys.argv[1:]:
        main(evaluation)
