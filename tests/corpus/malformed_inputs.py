"""Some three hundred malformed inputs, each different, made from small tables.

Damaged rows stand between two sound ones of the same layout, which have to come through unharmed. Damaged files have to
end the reading.
"""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, turns


class Input(NamedTuple):
    """A file and its expected outcome: these reasons of its rows, or, for None, an error that names the file."""

    name: str
    content: bytes
    reasons: tuple[str, ...] | None
    kind: str = CONVERSATIONS
    layout: str = "auto"


def message(id_: int, parent: int | None, text: Any, **columns: Any) -> dict[str, Any]:
    role = "prompter" if str(text).startswith("q") else "assistant"
    return {"message_id": id_, "parent_id": parent, "role": role, "text": text, **columns}


# A valid row of each layout, its kind, and its required columns.
SOUND: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "messages": ({"messages": turns("U hi", "A x")}, CONVERSATIONS, ("messages",)),
    "turns": (
        {"turns": [{"speaker": "USER", "utterance": "hi"}, {"speaker": "SYSTEM", "utterance": "x"}]},
        CONVERSATIONS,
        ("turns",),
    ),
    "dialogue": ({"chat": "User 1: hi\nUser 2: x"}, CONVERSATIONS, ("chat",)),
    "instances": (
        {"instruction": "Add", "instances": [{"input": "", "output": "x"}]},
        CONVERSATIONS,
        ("instruction", "instances"),
    ),
    "prompt-response": ({"prompt": "hi", "response": "x"}, CONVERSATIONS, ("prompt", "response")),
    "pairs": ({"prompt": "hi", "chosen": "x", "rejected": "y"}, PREFERENCES, ("prompt", "chosen", "rejected")),
    "votes": (
        {"instruction": "Add", "response1": "x", "response2": "y", "annotator1": 1},
        PREFERENCES,
        ("instruction", "response1", "response2", "annotator1"),
    ),
    "unpaired": ({"prompt": "hi", "completion": "x", "label": True}, PREFERENCES, ("prompt", "completion", "label")),
    "message-tree": (message(1, None, "q"), CONVERSATIONS, ("message_id", "parent_id", "role", "text")),
}
WRONG_VALUES = (3, -0.5, False, None, [], {}, [3], {"x": 1}, [[["x"]]], [{"role": "user"}], "", " \n")
# Values that these layouts accept in these columns; numbers are read as texts.
TEXTS = {
    "prompt",
    "question",
    "instruction",
    "input",
    "output",
    "response",
    "completion",
    "answer",
    "chosen",
    "rejected",
}
TEXTS |= {"response1", "response2"}
RIGHT_AFTER_ALL = {
    "unpaired": {"label": (False,)},
    "message-tree": {"message_id": (3, False, "", " \n"), "parent_id": (None,), "text": ()},
}


def line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _between(layout: str, damaged: bytes, *reasons: str, name: str = "rows.jsonl") -> Input:
    row, kind, _ = SOUND[layout]
    return Input(name, line(row | {"n": 1}) + damaged + line(row | {"n": 2}), reasons, kind, layout)


def wrong_values() -> list[Input]:
    """A wrong value in each column of each layout, or the column missing."""
    made = []
    for layout, (row, _, columns) in SOUND.items():
        for column in columns:
            for value in WRONG_VALUES:
                if column in TEXTS and type(value) in (int, float):
                    continue
                if value not in RIGHT_AFTER_ALL.get(layout, {}).get(column, ()):
                    made.append(_between(layout, line(row | {column: value, "n": 3})))
        made.append(_between(layout, line({"n": 3})))
    return made


def wrong_turns() -> list[Input]:
    """Turns that don't make a conversation, in each format."""
    reasons = {
        "S s": "no_assistant_turn",
        "U a": "no_assistant_turn",
        "A a": "turn_out_of_order",
        "T a": "no_assistant_turn",
        "U a|A b|U c": "ends_on_user",
        "U a|A b|T c": "ends_on_tool",
        "U a|A b|S c": "turn_out_of_order",
        "U a|U b|A c": "two_turns_in_a_row",
        "U a|A b|A c": "two_turns_in_a_row",
        "S a|S b|U c|A d": "two_turns_in_a_row",
        "S a|A b": "turn_out_of_order",
        "U a|S b|A c": "turn_out_of_order",
        "U a|T b|A c": "turn_out_of_order",
        "T a|U b|A c": "turn_out_of_order",
        "U a|A b|T c|U d|A e": "turn_out_of_order",
        "U |A b": "empty_turn",
        "U a|A \t": "empty_turn",
    }
    made = []
    for texts, reason in reasons.items():
        messages = turns(*texts.split("|"))
        made.append(_between("messages", line({"messages": messages}), reason))
    for turn, reason in (
        ({"content": "x"}, "missing_speaker"),
        ({"role": "", "content": "x"}, "missing_speaker"),
        ({"role": "narrator", "content": "x"}, "unknown_role"),
        ({"role": 3, "content": "x"}, "wrong_type"),
        ({"role": "user"}, "missing_column"),
        ({"role": "user", "content": None}, "non_string_content"),
        ({"role": "user", "content": {"a": 3}}, "non_string_content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "unsupported_part"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "bad_tool_call"),
        ("x", "wrong_type"),
    ):
        made.append(_between("messages", line({"messages": [turn, *turns("U a", "A b")]}), reason))
    return made


def damaged_lines() -> list[Input]:
    """Lines that are no rows, first, in the middle and last in their file."""
    deep = b"[" * 100_000
    damaged = {
        b'{"prompt": "cut': "not_json",
        b'{"prompt": -Infinity}': "not_json",
        b'{"prompt": Infinity}': "not_json",
        b'{"prompt": "a\0b"}': "not_json",
        b"\0\0\0": "not_json",
        b"{'prompt': 'x'}": "python_repr",
        b'{"prompt": "x",}': "not_json",
        b'{"prompt": "' + b"x" * 1_000_000: "not_json",
        b'{"n": ' + b"1" * 5000 + b"}": "not_json",
        deep: "not_json",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000: "not_json",
        b'{"prompt": "\xff"}': "not_utf8",
        b'{"prompt": "\xed\xa0\xbd"}': "not_utf8",
        b'{"prompt": "\xc3': "not_utf8",
        b'{"prompt": "x", "prompt": "y"}': "duplicate_key",
        b'{"prompt": "x", "pro\\u006dpt" : "y"}': "duplicate_key",
        b'{"messages": [{"role": "user", "role": "x"}]}': "duplicate_key",
        b"null": "not_an_object",
        b"12": "not_an_object",
        b'"prompt"': "not_an_object",
        b'[{"prompt": "x"}]': "not_an_object",
        b'{"prompt": "hi", "response": "\\ud83d"}': "lone_surrogate",
        b"{}": "missing_column",
        b'{"text": "' + b"x" * 1_000_000 + b'"}': "missing_column",
    }
    row, *_ = SOUND["prompt-response"]
    made = []
    for content, reason in damaged.items():
        for position in range(3):
            lines = [line(row | {"n": 1}), line(row | {"n": 2})]
            lines.insert(position, content + b"\n")
            made.append(Input("rows.jsonl", b"".join(lines), (reason,)))
    return made


def wrong_trees() -> list[Input]:
    """Messages that hang in no tree."""
    ring = [message(i, (i + 1) % 50, "q") for i in range(50)]
    deep = {"role": "assistant", "text": "a", "message_id": "x"}
    for _ in range(200):
        deep = {"role": "prompter", "text": "q", "message_id": "x", "replies": [deep]}
    rows = {
        "cyclic_tree": [message(1, 1, "q")],
        "cyclic_tree ": [message(1, 2, "q"), message(2, 1, "a")],
        "cyclic_tree  ": ring,
        "orphan_node": [message(1, 9, "a")],
        "orphan_node ": [message(1, 9, "a"), message(2, 1, "q")],
        "two_turns_in_a_row": [deep],
        "turn_out_of_order": [message(1, None, "a")],
    }
    made = []
    for reason, messages in rows.items():
        content = b"".join(line(row | {"message_id": f"m{row['message_id']}"} | _parent(row)) for row in messages)
        made.append(Input("tree.jsonl", content, (reason.strip(),) * len(messages), CONVERSATIONS))
    return made


def _parent(row: dict[str, Any]) -> dict[str, str]:
    return {} if row.get("parent_id") is None else {"parent_id": f"m{row['parent_id']}"}


def _table(suffix: str) -> bytes:
    rows = pa.Table.from_pylist([{"prompt": f"hi {i}", "response": "x"} for i in range(3000)])
    sink = io.BytesIO()
    if suffix == "parquet":
        pq.write_table(rows, sink, row_group_size=500)
    else:
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=500)
    return sink.getvalue()


def _zip(lines: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("b.jsonl", "a.jsonl"):
            file.writestr(zipfile.ZipInfo(name), lines, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _tar(lines: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for name in ("b.jsonl", "a.jsonl"):
            info = tarfile.TarInfo(name)
            info.size = len(lines)
            file.addfile(info, io.BytesIO(lines))
        end = file.offset
    # Of the zero bytes at the end, one block is all that it takes.
    return made.getvalue()[: end + tarfile.BLOCKSIZE]


def whole_files() -> list[Input]:
    """Sound files of every format, to be damaged."""
    row, *_ = SOUND["prompt-response"]
    rows = [row | {"n": i} for i in range(200)]
    lines = b"".join(map(line, rows))
    csv = b"prompt,response\n" + b"".join(b'"q, %d",x\n' % i for i in range(200))
    contents = {
        "jsonl.gz": gzip.compress(lines, mtime=0),
        "jsonl.zst": pa.Codec("zstd").compress(lines, asbytes=True),
        "csv.gz": gzip.compress(csv, mtime=0),
        "csv.zst": pa.Codec("zstd").compress(csv, asbytes=True),
        "json": json.dumps(rows).encode(),
        "pretty.json": json.dumps({"rows": rows}, indent=1).encode(),
        "parquet": _table("parquet"),
        "arrow": _table("arrow"),
        "zip": _zip(lines),
        "tar": _tar(lines),
        "tar.xz": lzma.compress(_tar(lines)),
    }
    return [Input(f"whole.{suffix}", content, ()) for suffix, content in contents.items()]


def damaged_files() -> list[Input]:
    """Files that end the reading, by whatever is wrong with them."""
    whole = {given.name.removeprefix("whole."): given.content for given in whole_files()}
    cut = [
        Input(f"half.{suffix}", content[: int(len(content) * share)], None)
        for suffix, content in whole.items()
        for share in (0.1, 0.4, 0.7, 0.95)
    ]
    flipped = [
        Input("flipped.jsonl.gz", whole["jsonl.gz"][:-8] + b"\0\0\0\0" + whole["jsonl.gz"][-4:], None),
        Input("tailless.jsonl.gz", whole["jsonl.gz"] + b"tail", None),
        Input("tailless.jsonl.zst", whole["jsonl.zst"] + b"tail", None),
        Input("footless.parquet", whole["parquet"][:-4] + b"NONE", None),
        Input("headless.arrow", b"NONE" + whole["arrow"][4:], None),
    ]
    plain = {
        "empty.jsonl": b"",
        "empty.json": b"",
        "empty.csv": b"",
        "empty.parquet": b"",
        "blank.jsonl": b"\n \n\t\n",
        "bom.jsonl": b"\xef\xbb\xbf",
        "bom.csv": b"\xef\xbb\xbf\n",
        "no_rows.json": b"[]",
        "no_rows_wrapped.json": b'{"rows": []}',
        "header.csv": b"prompt,response\n",
        "twice.csv": b"prompt,prompt\nx,y\n",
        "header_quote.csv": b'prompt,"response\nx,y\n',
        "quote.csv": b'prompt,response\nx,y\n"hi,x\nhi,x\n',
        "quote_at_end.csv": b'prompt,response\nx,y\nz,"',
        "prose.txt": b"Dear reader,\nhow are you?\n",
        "prose.json": b"Not found",
        "prose.parquet": b"Not found",
        "page.jsonl": b"<html><body>404</body></html>",
        "pointer.jsonl": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "archive.zip": b"PK\x03\x04...",
        "utf16.jsonl": "\n".join(['{"prompt": "x", "response": "y"}'] * 3).encode("utf-16"),
        "utf16le.jsonl": '{"prompt": "x", "response": "y"}'.encode("utf-16-le"),
        "utf32.json": '[{"prompt": "x", "response": "y"}]'.encode("utf-32"),
        "utf16.csv": "prompt,response\nx,y\n".encode("utf-16"),
        "zeros.jsonl": b"\0" * 5000,
        "deep.json": b"[" * 100_000 + b"]" * 99_999,
        "infinity.json": b'[{"prompt": "x", "response": Infinity}]',
        "latin.json": '[{"prompt": "x", "response": "ä"}]'.encode("latin-1"),
    }
    return cut + flipped + [Input(name, content, None) for name, content in plain.items()]


def damaged_csv() -> list[Input]:
    """Rows of CSV that cost only themselves."""
    damaged = {
        b"x\n": "wrong_number_of_cells",
        b"x,y,z\n": "wrong_number_of_cells",
        b"\xff,y\n": "not_utf8",
        b'"a"b,y\n': "not_csv",
        b" ,y\n": "empty_turn",
        b"x,\n": "empty_turn",
    }
    return [
        Input("rows.csv", b"prompt,response\nhi,x\n" + row + b"hi,z\n", (reason,)) for row, reason in damaged.items()
    ]


INPUTS = [
    *wrong_values(),
    *wrong_turns(),
    *damaged_lines(),
    *wrong_trees(),
    *damaged_files(),
    *damaged_csv(),
]
