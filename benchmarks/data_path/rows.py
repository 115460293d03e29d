"""Input of the benchmarks: raw files, repeated."""

import json
from pathlib import Path

GSM8K = "gsm8k/train.jsonl"
FILES = (GSM8K, "dolly_hhrlhf_small/dolly_hhrlhf_train_small.jsonl")


def numbered(raw: Path, path: Path, copies: int) -> Path:
    """Repeat the rows of a file, each copy with another number in front, so that no row is a duplicate."""
    rows = [json.loads(line) for line in raw.open(encoding="utf-8")]
    key = "question" if "question" in rows[0] else "prompt"
    with path.open("w", encoding="utf-8") as file:
        for number in range(copies):
            for row in rows:
                file.write(json.dumps({**row, key: f"{number}. {row[key]}"}, ensure_ascii=False) + "\n")
    return path


def repeated(data: Path, folder: Path, megabytes: float) -> list[Path]:
    copies = max(1, round(megabytes * 1e6 / sum((data / name).stat().st_size for name in FILES)))
    return [numbered(data / name, folder / Path(name).name, copies) for name in FILES]


def as_messages(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a row of gsm8k or dolly as a conversation for TRL."""
    said = (row.get("question") or row["prompt"], row.get("answer") or row["response"])
    return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]}
