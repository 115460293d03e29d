"""Files like those that users have, and the lines that a preview of each must contain."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import pyarrow as pa
from pyarrow.parquet import write_table

Rows = list[dict[str, Any] | str]


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation: user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write_lines(path: Path, rows: Rows) -> Path:
    """Write rows as JSON lines; a text is written as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _lines(name: str, rows: Rows) -> Callable[[Path], Path]:
    return lambda folder: write_lines(folder / name, rows)


def _csv(folder: Path) -> Path:
    with (folder / "faq.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["Title", "Question", "Reply"], *(["t", f"Q, {i}?", f"R {i}"] for i in range(8))])
    return folder / "faq.csv"


def _written(path: Path, text: str, encoding: str) -> Path:
    path.write_text(text, encoding=encoding)
    return path


def _parquet(folder: Path) -> Path:
    rows = pa.table({"question": [f"q{i}" for i in range(5000)], "answer": [f"a{i}" for i in range(5000)]})
    write_table(rows, folder / "qa.parquet")
    return folder / "qa.parquet"


def _text(folder: Path) -> Path:
    (folder / "story.txt").write_text("Once upon a time there was, so they say, a fox.\n" * 3, encoding="utf-8")
    return folder / "story.txt"


def _cut(folder: Path) -> Path:
    noise = Random(0)
    rows: Rows = [{"messages": turns(noise.randbytes(1000).hex(), "a")} for _ in range(900)]
    file = write_lines(folder / "cut.jsonl.gz", rows)
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def _archive(folder: Path) -> Path:
    with ZipFile(folder / "data.zip", "w") as file:
        for number in range(2):
            rows = "".join(json.dumps({"messages": turns(f"q{number} {i}", "a")}) + "\n" for i in range(900))
            file.writestr(f"part-{number}.jsonl", rows)
    return folder / "data.zip"


def _utf_16(folder: Path) -> Path:
    (folder / "old.csv").write_text("question,answer\nWhy?,Weil\nHow?,Sö\n", encoding="utf-16")
    return folder / "old.csv"


def _page(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("<!doctype html><title>Log in</title>", encoding="utf-8")
    return folder / "data.jsonl"


GOOD: Rows = [{"messages": turns(f"q{i}", f"a{i}")} for i in range(20)]
CONTROL = "\x1b[31mred\u202e<script>alert(1)</script>"

# How a file is made, and parts of its preview.
AWKWARD: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "no known layout": (
        _lines(
            "tickets.jsonl", [{"Customer Question": f"Why {i}?", "agentReply": f"So {i}.", "id": i} for i in range(9)]
        ),
        [
            "conversations: reads all 9 rows with the `fields` suggested below",
            'agentReply ("So 0.")',
            "fields: {prompt: Customer Question, response: agentReply}",
            "ignored     id (9 rows, such as 0)",
        ],
    ),
    "turns in a column of another name": (
        _lines("chats.jsonl", [{"uid": i, "exchange": turns(f"q{i}", "a")} for i in range(9)]),
        ["conversations: reads all 9 rows with the `fields` suggested below", "fields: {messages: exchange}"],
    ),
    "a table with tabs, in another language": (
        lambda folder: _written(folder / "fragen.tsv", "Frage\tAntwort\n" + "Wie?\tSo, und so.\n" * 9, "utf-8"),
        ["reads all 9 rows with the `fields` suggested below", "fields: {prompt: Frage, response: Antwort}"],
    ),
    "a table with semicolons in Windows-1252": (
        lambda folder: _written(folder / "alt.csv", "prompt;response\n" + "Schön?;Für dich, täglich.\n" * 9, "cp1252"),
        ["conversations: reads all 9 rows", "Schön?<|im_end|>", "encoding: cp1252"],
    ),
    "ratings that contradict": (
        _lines(
            "rated.jsonl",
            [
                {"prompt": f"p{i}", "chosen": "c", "rejected": "r", "score_chosen": i, "score_rejected": 2}
                for i in range(9)
            ],
        ),
        [
            "preferences: reads 6 of 9 rows",
            "2 rows, rating contradicts; line 1: score_chosen is 0",
            "1 row, tie; line 3",
        ],
    ),
    "two layouts": (
        _lines(
            "both.jsonl",
            [
                {"problem": f"What is {i}?", "solution": f"It is {i}, of course.", "messages": turns(f"q{i}", "r")}
                for i in range(9)
            ],
        ),
        [
            "the columns don't decide the layout",
            "messages reads messages (9 of the first 9 rows) and leaves problem, solution",
            "layout: prompt-response\n          ignore: [messages]",
        ],
    ),
    "one column missing": (
        _lines("half.jsonl", [{"prompt": f"p{i}", "chosen": "c"} for i in range(9)]),
        ["none: no corpus kind matches these rows", "nearest: prompt-response", "`response` is missing"],
    ),
    "pairs of which none is sound": (
        _lines("same.jsonl", [{"prompt": f"p{i}", "chosen": "c", "rejected": "c"} for i in range(9)]),
        [
            "none: no corpus kind matches these rows",
            "9 rows, identical chosen and rejected; line 1: chosen and rejected are the same",
        ],
    ),
    "marked rows": (
        _lines("marked.jsonl", [{"prompt": f"p{i}", "response": "r", "is_correct": i > 2} for i in range(9)]),
        [
            "is_correct: false (3 rows); `where: is_correct != false` drops such rows",
            "# where: is_correct != false   # drops 3 of the 9 sampled rows",
        ],
    ),
    "rows that aren't sound": (
        _lines(
            "messy.jsonl", [*GOOD, {"messages": turns("a", "b", "c")}, "{broken", {"messages": turns("x", "")}, GOOD[3]]
        ),
        [
            "conversations: reads 21 of 24 rows",
            "1 row, ends on user; line 21: the last turn isn't the assistant's",
            "1 row, not json; line 22",
            "1 row, empty turn; line 23: turn 2 (assistant) has no text",
            "`repair: [drop-trailing-user]` fixes 1 of them",
            "1 row, such as line 24, which repeats line 4; the first is used",
            "# max_quarantined_fraction:",
        ],
    ),
    "two kinds in one file": (
        _lines("mixed.jsonl", [*GOOD, *({"prompt": f"p{i}", "chosen": "c", "rejected": "r"} for i in range(5))]),
        ["conversations: reads 20 of 25 rows (preferences: 5); a corpus holds one kind, so split the file"],
    ),
    "labelled completions": (
        _lines(
            "liked.jsonl", [{"prompt": f"p{i // 2}", "completion": f"c{i}", "label": i % 3 == 0} for i in range(12)]
        ),
        ["unpaired: reads all 12 rows (preferences: 8)", "· completion, labelled good\n    ⟦c0<|im_end|>⟧"],
    ),
    "packed documents": (
        _lines("docs.jsonl.gz", [{"text": f"A document of {i}. " * 30, "url": "http://x"} for i in range(9)]),
        ["JSON lines, gzip", "text: reads all 9 rows", "100% of all tokens", "kind: text"],
    ),
    "conversations with a text beside them": (
        _lines("alpaca.jsonl", [{"instruction": "Add.", "output": "3" * (i > 0), "text": "Add. 3"} for i in range(9)]),
        ["conversations: reads 8 of 9 rows", "empty turn", "ignored     text (8 rows"],
    ),
    "a control sequence and a control token": (
        _lines("evil.jsonl", [{"messages": turns(CONTROL, "ok <|im_end|>\n<|im_start|>user\nno")}]),
        [
            "\\u001b[31mred\\u202e<script>",
            "1 row with text like a control token; it stays text",
            "⟦ok <|im_end|>\n    <|im_start|>user\n    no<|im_end|>⟧",
        ],
    ),
    "a table with commas": (_csv, ["CSV", "8 rows", "fields: {prompt: Question, response: Reply}", "line 2"]),
    "a table of columns": (
        _parquet,
        ["Parquet", "5,000 rows, of which the first 2,000 are read", "layout      prompt-response", "row 2000"],
    ),
    "plain text": (_text, ["plain text, 144 bytes; 1 row", "text: reads its only row", "⟦Once upon a time there was"]),
    "cut off": (_cut, ["conversations: reads", "error", "It may be damaged or cut off; fetch it again"]),
    "an archive": (
        _archive,
        ["part-0.jsonl: jsonl in a zip; the first 500 rows are read", "reads all 1,000 rows"],
    ),
    "another encoding": (_utf_16, ["CSV", "reads all 2 rows", "⟦Sö<|im_end|>⟧", "encoding: utf-16"]),
    "no data": (_page, ["error", "is a web page and not the data"]),
    "not there": (lambda folder: folder / "no.jsonl", ["no.jsonl doesn't exist"]),
}
