"""Work of the `tokenizer` stage: train or adopt a tokenizer, check it, and write it with its chat template.

Payload: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` (a folder for AutoTokenizer), and
`sentencepiece.model` if it was trained.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TokenizerSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.control import any_of
from snaketune.tokenization.creation.adopt import adopt
from snaketune.tokenization.creation.check import PROBES, check, check_mistral_frame
from snaketune.tokenization.creation.from_sentencepiece import convert, save
from snaketune.tokenization.creation.parity import compare
from snaketune.tokenization.creation.train import CONTROL, PAD, TURN_END, UNK, Texts, train
from snaketune.tokenization.template import TEXT, Message, render, shipped_templates
from snaketune.tokenization.template_errors import Refused

SAMPLES = 3
# The most characters of a conversation that is shown as a sample.
SHORT = 1000
ROWS_PER_BATCH = 1000


def make_tokenizer(
    spec: TokenizerSpec, work: WorkFolder, *, corpora: list[Artifact], chat_template: list[Path], base: list[Path]
) -> Outcome:
    """Write the tokenizer to the payload.

    Args:
        corpora: the corpora to train on; only their train splits are read.
        chat_template: the template's file; empty for an adopted tokenizer's own template.
        base: the files of an adopted local folder. The folder is read through `spec.adopt`; its files are inputs so that
            changes are detected.
    Raises:
        SnaketuneError: see `train`, `adopt` and `check`.
    """
    template = _read_template(chat_template)
    if spec.adopt is not None:
        about: dict[str, Any] = {"adopted": adopt(spec, template, work.payload)}
        counts = {}
        samples = list(PROBES)
    else:
        if template is None:
            raise SnaketuneError(
                f"tokenizers.chat_template: a trained tokenizer needs one; there are {shipped_templates()}"
            )
        tables = [artifact.file("train.arrow") for artifact in corpora]
        texts = Texts(_texts(tables, template))
        model = train(texts, spec)
        tokenizer = convert(model)
        parity = compare(tokenizer, model, _texts(tables))
        print(f"the fast tokenizer equals sentencepiece on {parity} texts", flush=True)
        (work.payload / "sentencepiece.model").write_bytes(model)
        save(tokenizer, template, work.payload)
        about = {"parity": {"texts": parity}}
        counts = {"texts": texts.count, "bytes": texts.bytes, "reserved_characters_left_out": texts.reserved}
        samples = list(islice(_short_conversations(tables), SAMPLES)) or list(PROBES)

    chat = ChatTokenizer.load(work.payload)
    if template is not None:
        check_mistral_frame(chat)
    if chat.template and not chat.marked:
        print("the chat template marks nothing as generated; the supervised tokens are found by roles", flush=True)
    about |= {
        "spans": "none" if not chat.template else "markers" if chat.marked else "roles",
        "samples": check(chat, samples) if chat.template else [],
        "vocab_size": chat.vocab_size,
        "pad_id": chat.pad_id,
        "stop_ids": list(chat.stop_ids),
    }
    return Outcome(counts=counts, about=about)


def _read_template(files: list[Path]) -> str | None:
    if not files:
        return None
    try:
        template = files[0].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnaketuneError(
            f"tokenizers.chat_template: {files[0]} can't be read: {error}; there are {shipped_templates()}"
        ) from None
    try:
        render(template, [PROBES[0]], {"eos_token": TURN_END, "pad_token": PAD, "unk_token": UNK, "bos_token": ""})
    except SnaketuneError as error:
        raise SnaketuneError(f"tokenizers.chat_template: {files[0]}: {error}") from None
    return template


def _rows(tables: list[Path]) -> Iterator[dict[str, list[Message]]]:
    for path in tables:
        table = read_table(path)
        columns = [
            name
            for name in ("messages", "prompt", "chosen", "rejected", "completion", "tools")
            if name in table.column_names
        ]
        for batch in table.select(columns).to_batches(max_chunksize=ROWS_PER_BATCH):
            yield from batch.to_pylist()


def _texts(tables: list[Path], template: str | None = None) -> Iterator[str]:
    """Yield all contents, the prompt of a preference pair once; with `template`, also the text that it writes around them.

    Role names and newlines are in every turn. A vocabulary that was trained on them encodes them as one token instead of five.
    """

    @cache
    def frame(roles: tuple[str, ...]) -> tuple[str, ...]:
        empty = [{"role": role, "content": ""} for role in roles]
        try:
            (text,), _ = render(template, [empty], {"eos_token": TURN_END, "pad_token": PAD, "unk_token": UNK})
        except Refused:
            # The `tokenize` stage decides whether such rows are an error.
            return ()
        return tuple(chunk for chunk in re.split(any_of(CONTROL), text) if chunk)

    for row in _rows(tables):
        if tools := row.pop("tools", None):
            yield tools
        for messages in row.values():
            yield from (message["content"] for message in messages)
        if template is not None:
            roles = tuple(message["role"] for message in _conversation(row))
            # Documents have no template.
            yield from () if roles == (TEXT,) else frame(roles)


def _short_conversations(tables: list[Path]) -> Iterator[list[Message]]:
    for row in _rows(tables):
        messages = _conversation(row)
        if messages[0]["role"] != TEXT and sum(len(message["content"]) for message in messages) <= SHORT:
            yield messages


def _conversation(row: dict[str, list[Message]]) -> list[Message]:
    return row["messages"] if "messages" in row else row["prompt"] + row["chosen" if "chosen" in row else "completion"]
