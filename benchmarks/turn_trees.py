"""Tokens of a conversation with reasoning as one tree, against one sample per turn, by the number of turns.

    python -m benchmarks.turn_trees

The chat template is Qwen3's, as TRL ships it; a token is a byte. Texts have the lengths QUESTION, THOUGHT and ANSWER.
"""

from importlib.metadata import files
from pathlib import Path

import pyarrow as pa

from snaketune.corpus.rows import SCHEMAS
from snaketune.preview.rendered_rows import load_renderer
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.turn_columns import conversation_turns

QUESTION, THOUGHT, ANSWER = 120, 600, 300
TURNS = (1, 2, 4, 8, 16)


def conversation(turns: int) -> list[dict]:
    content = f"<think>\n{'t' * THOUGHT}\n</think>\n\n{'a' * ANSWER}"
    both = [{"role": "user", "content": "q" * QUESTION}, {"role": "assistant", "content": content}]
    return [turn | {"supervised": True} for _ in range(turns) for turn in both]


def tokens(chat: ChatTokenizer, messages: list[dict], reasoning: str) -> int:
    """Return the tokens of a conversation, in one tree or with one treatment of `corpora.NAME.reasoning`."""
    schema = pa.schema([SCHEMAS["conversations"].field("messages")])
    turns = conversation_turns(pa.table({"messages": [messages]}, schema), "assistant", reasoning)
    return len(encode_turns(chat, turns).ids)


def main() -> None:
    template = next(Path(path.locate()) for path in files("trl") if path.name == "qwen3.jinja")
    chat = load_renderer(template, None).chat
    print("| turns | tree | one sample per turn | ratio |\n|---|---|---|---|")
    for turns in TURNS:
        messages = conversation(turns)
        tree = tokens(chat, messages, "exact")
        samples = sum(tokens(chat, messages[: 2 * end], "last") for end in range(1, turns + 1))
        print(f"| {turns} | {tree:,} | {samples:,} | {samples / tree:.2f} |")


if __name__ == "__main__":
    main()
