"""Write demo_choice.jsonl beside this file: multiple-choice questions in the style of the demo, the same bytes every time.

Each row is {"question", "choices", "label"}; `demo_choice.yaml` tells lm-evaluation-harness how to ask them.
"""

import json
import random
from pathlib import Path

SEED = 11
QUESTIONS_PER_KIND = 30
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def questions(kind: str, generator: random.Random) -> tuple[str, str, list[str]]:
    """A question, its right answer, and three wrong ones."""
    if kind == "largest":
        # The demo's lists have three numbers; the fourth choice is none of them.
        other, *shown = generator.sample(range(1, 10), 4)
        right = max(shown)
        wrong = [n for n in (*shown, other) if n != right]
        return f"Of {' '.join(map(str, shown))} which is the largest?", str(right), [str(n) for n in wrong]
    if kind == "words":
        right, *wrong = generator.sample(range(10), 4)
        return f"Write {right} in words.", DIGITS[right], [DIGITS[n] for n in wrong]
    a, b = generator.randint(1, 5), generator.randint(1, 5)
    wrong = generator.sample([n for n in range(1, 12) if n != a + b], 3)
    return f"Work out {a} + {b} for me.", str(a + b), [str(n) for n in wrong]


def rows() -> list[dict]:
    """All questions, the right answer at a random place."""
    generator = random.Random(SEED)
    made = []
    for kind in ("largest", "words", "sum"):
        for _ in range(QUESTIONS_PER_KIND):
            question, right, wrong = questions(kind, generator)
            choices = generator.sample([right, *wrong], 4)
            made.append(
                {
                    "question": question,
                    "choices": [f"Answer: {choice}" for choice in choices],
                    "label": choices.index(right),
                }
            )
    return made


if __name__ == "__main__":
    lines = [json.dumps(row) + "\n" for row in rows()]
    (Path(__file__).parent / "demo_choice.jsonl").write_text("".join(lines), encoding="utf-8")
