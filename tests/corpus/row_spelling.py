"""Shared by the tests of layouts and of malformed rows: short notations of conversations, and ways to read rows."""

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import Dropped, Malformed, RawRow

SHORT = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
CONVERSATIONS, PREFERENCES = BOTH = ("conversations", "preferences")


def turns(*texts):
    """Return `turns("U hi", "A hello")` as messages."""
    return [{"role": SHORT[turn[0]], "content": turn[2:]} for turn in texts]


def compact(messages):
    """Return messages in one line: `U hi|A hello`."""
    return "|".join(f"{turn['role'][0].upper()} {turn['content']}" for turn in messages)


def read_all(raws, kind="conversations", layout="auto", repair=(), speakers=None, **fields):
    """Return the results for the rows of one file."""
    source = Source(files=["x"], layout=layout, fields=fields, speakers=speakers or {})
    numbered = (RawRow("row", number, raw) for number, raw in enumerate(raws, start=1))
    return list(canonical_rows(numbered, kind=kind, source=source, repair=repair))


def read(raw, kind="conversations", layout="auto", repair=(), speakers=None, **fields):
    """Return the layout and the canonical row of `raw`, or raise the reason why there is none."""
    (made,) = read_all([raw], kind, layout, repair, speakers, **fields)
    if isinstance(made.row, Malformed | Dropped):
        raise made.row
    return made.layout, made.row


def reasons(made):
    """Return for each result the reason why there is no row, `row`, or `part` of another."""
    return ["part" if m.row is None else getattr(m.row, "reason", "row") for m in made]


CHAT = turns("S be brief", "U hi", "A hello", "U more", "A no")
ALPACA = "Below is an instruction that describes a task. Write a response.\n\n### Instruction:\n{}\n\n### Response:\n"


SHAREGPT = {"human": "U", "gpt": "A", "system": "S"}


def sharegpt(*texts):
    """Return `turns` in ShareGPT's format."""
    names = {short: name for name, short in SHAREGPT.items()}
    return [{"from": names[turn[0]], "value": turn[2:]} for turn in texts]


def typed(*texts, key="value"):
    """Return `turns` with typed parts."""
    return [turn | {"content": [{"type": "text", key: turn["content"]}]} for turn in turns(*texts)]
