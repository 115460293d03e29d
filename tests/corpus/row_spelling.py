"""What the tests of layouts and of malformed rows share: short spellings of conversations, and one way to read a row."""

from snaketune.config.corpora import Fields
from snaketune.corpus.layouts import canonical

SHORT = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
BOTH = ("conversations", "preferences")


def turns(*spelled):
    """`turns("U hi", "A hello")` as messages."""
    return [{"role": SHORT[turn[0]], "content": turn[2:]} for turn in spelled]


def read(raw, kind="conversations", layout="auto", **fields):
    """The layout and the canonical row of `raw`."""
    return canonical(raw, kind=kind, layout=layout, fields=Fields(**fields))


CHAT = turns("S be brief", "U hi", "A hello", "U more", "A no")
ALPACA = "Below is an instruction that describes a task. Write a response.\n\n### Instruction:\n{}\n\n### Response:\n"
