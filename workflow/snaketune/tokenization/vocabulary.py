"""Work of the `tokenizer` stage: train or adopt a tokenizer, check it, and write it with its chat template.

Payload: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` (a folder for AutoTokenizer); `sentencepiece.model` if
it was trained; and `training_template.jinja` if TRL has one for the chat template.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import split_files
from snaketune.config.model_files import check_model_files
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TokenizerSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import DATE_KEY, TRAINING_TEMPLATE, ChatTokenizer
from snaketune.tokenization.control import any_of
from snaketune.tokenization.creation.check import PROBES, check, check_mistral_frame, training_template
from snaketune.tokenization.creation.train import CONTROL, PAD, TURN_END, UNK, Texts, compare, convert, save, train
from snaketune.tokenization.template import (
    TEXT,
    Message,
    Refused,
    marks_generation,
    render,
    shipped_templates,
    writes_date,
)

SAMPLES = 3
# The most characters of a conversation that is shown as a sample.
SHORT = 1000
ROWS_PER_BATCH = 1000
COLUMNS = ("messages", "prompt", "chosen", "rejected", "completion", "tools")
VARIABLES = {"eos_token": TURN_END, "pad_token": PAD, "unk_token": UNK}


def build(
    spec: TokenizerSpec, work: WorkFolder, *, corpora: list[Artifact], chat_template: list[Path], base: list[Path]
) -> Outcome:
    """Write the tokenizer to the payload.

    Args:
        corpora: the corpora to train on; only their train splits are read.
        chat_template: the template's file; empty for an adopted tokenizer's own template.
        base: the files of an adopted local folder, which is read through `spec.adopt`; inputs so that changes are detected.
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
        tables = [path for artifact in corpora for path in split_files(artifact, "train")]
        texts = Texts(_texts(tables, template))
        model = train(texts, spec)
        tokenizer = convert(model)
        parity = compare(tokenizer, model, _texts(tables))
        print(f"the fast tokenizer equals sentencepiece on {parity} texts", flush=True)
        (work.payload / "sentencepiece.model").write_bytes(model)
        save(tokenizer, template, work.payload)
        about = {"parity": {"texts": parity}}
        counts = {"texts": texts.count, "bytes": texts.bytes, "reserved_characters_left_out": texts.reserved}
        short = (
            messages
            for messages in map(_conversation, _rows(tables))
            if messages[0]["role"] != TEXT and sum(len(message["content"]) for message in messages) <= SHORT
        )
        samples = list(islice(short, SAMPLES)) or list(PROBES)

    spans = _complete(spec, work.payload)
    chat = ChatTokenizer.load(work.payload)
    if template is not None:
        check_mistral_frame(chat)
    about |= {
        "spans": spans,
        "samples": check(chat, samples) if chat.template.text else [],
        "vocab_size": chat.vocab_size,
        "pad_id": chat.pad_id,
        "stop_ids": list(chat.stop_ids),
    }
    return Outcome(counts=counts, about=about)


def adopt(spec: TokenizerSpec, template: str | None, folder: Path) -> dict[str, str | None]:
    """Write the tokenizer of `spec.adopt`, a base model's, with `template` or its own, to `folder`.

    AutoTokenizer loads it, which is the only import of torch (about 2 s) in the data stages.

    Returns:
        The source of the chat template, the pad token, and the base's own pad token if it was replaced.
    Raises:
        SnaketuneError: it can't be loaded, or has no fast version or no eos token.
    """
    from transformers import AutoTokenizer

    check_model_files(spec.adopt)
    name = f"tokenizers.adopt: {spec.adopt}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.adopt, revision=spec.revision or "main", trust_remote_code=False, use_fast=True
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise SnaketuneError(
            f"{name} can't be loaded as a tokenizer: {reason}; give a folder with tokenizer.json, or a Hub id and revision"
        ) from None
    if not tokenizer.is_fast:
        raise SnaketuneError(
            f"{name} has only a slow tokenizer ({type(tokenizer).__name__}); masks need the character offsets of a fast "
            "one: convert it to tokenizer.json, or adopt another"
        )
    if tokenizer.eos_token is None:
        raise SnaketuneError(f"{name} has no eos token, so nothing can end a turn; adopt another tokenizer")

    base_template = tokenizer.chat_template
    if isinstance(base_template, dict):
        base_template = base_template.get("default")
    if template is None and base_template is None:
        # Documents need none; conversations are refused by the `tokenize` stage.
        print(
            f"{name} has no chat template, so only corpora of kind text can be tokenized. For conversations and pairs, name "
            f"one under `chat_template`: {shipped_templates()}",
            flush=True,
        )
    tokenizer.chat_template = template or base_template

    own_pad = tokenizer.pad_token
    if own_pad in (None, tokenizer.eos_token):
        # If eos also pads, masking padding by its id would exclude the end of turn from the loss.
        if tokenizer.unk_token not in (None, tokenizer.eos_token):
            tokenizer.pad_token = tokenizer.unk_token
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    source = "given" if template else "the model's own" if base_template else "none"
    replaced = {"own_pad_token": own_pad} if own_pad and own_pad != tokenizer.pad_token else {}
    return {"chat_template": source, "pad_token": tokenizer.pad_token, **replaced}


def _complete(spec: TokenizerSpec, folder: Path) -> str:
    """Write the date of the chat template into the tokenizer's config, and TRL's training template beside it, if it has one;
    return and print how supervised tokens are found."""
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.exists() else ""
    if spec.template_date and not writes_date(template):
        raise SnaketuneError("tokenizers.NAME.template_date: the chat template writes no date; remove the key")
    if spec.template_date:
        config = folder / "tokenizer_config.json"
        known = json.loads(config.read_text(encoding="utf-8"))
        write_json(config, known | {DATE_KEY: spec.template_date.isoformat()})
    if not template:
        return "none"
    if marks_generation(template):
        return "markers"
    if found := training_template(template):
        name, text = found
        (folder / TRAINING_TEMPLATE).write_text(text, encoding="utf-8")
        print(f"the chat template marks nothing as generated; TRL's training template for it does ({name})", flush=True)
        return f"training template {name}"
    print("the chat template marks nothing as generated; the supervised tokens are found by roles", flush=True)
    return "roles"


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
        render(template, [PROBES[0]], VARIABLES | {"bos_token": ""})
    except SnaketuneError as error:
        raise SnaketuneError(f"tokenizers.chat_template: {files[0]}: {error}") from None
    return template


def _rows(tables: list[Path]) -> Iterator[dict[str, Any]]:
    for table in map(read_table, tables):
        columns = [name for name in COLUMNS if name in table.column_names]
        for batch in table.select(columns).to_batches(max_chunksize=ROWS_PER_BATCH):
            yield from batch.to_pylist()


def _conversation(row: dict[str, list[Message]]) -> list[Message]:
    return row["messages"] if "messages" in row else row["prompt"] + row["chosen" if "chosen" in row else "completion"]


def _texts(tables: list[Path], template: str | None = None) -> Iterator[str]:
    """Yield all contents, the prompt of a preference pair once; with `template`, also the text that it writes around them.

    Role names and newlines are in every turn. A vocabulary that was trained on them encodes them as one token instead of five.
    """

    @cache
    def frame(roles: tuple[str, ...]) -> list[str]:
        empty = [{"role": role, "content": ""} for role in roles]
        try:
            (text,), _ = render(template, [empty], VARIABLES)
        except Refused:
            # The `tokenize` stage decides whether such rows are an error.
            return []
        return [chunk for chunk in re.split(any_of(CONTROL), text) if chunk]

    for row in _rows(tables):
        if tools := row.pop("tools", None):
            yield tools
        for messages in row.values():
            yield from (message["content"] for message in messages)
        roles = tuple(message["role"] for message in _conversation(row))
        # Documents have no template.
        if template is not None and roles != (TEXT,):
            yield from frame(roles)
