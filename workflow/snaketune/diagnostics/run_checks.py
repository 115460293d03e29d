"""Checks of a run's rows, tokenizer and settings, from the manifests of what it reads. `key` is the run's key: `sft.demo`.

Tokens that are new to a base model start with random rows of embedding and output head. Adapters alone, or a pattern in
`training.trainable`, leave the rows as they are. A model that is trained to write such a token, as the end of its turns, then
never can.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.config.base_models import Pretrained
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.training_noise import draws_in_training
from snaketune.engine.packing.rows import PackedRows
from snaketune.evaluation.race import MIN_ROWS
from snaketune.models.load_model import own_tokenizer
from snaketune.models.traced_model import TracedModel, trace_model
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightEvaluation, PreflightRun
from snaketune.tokenization.chat import ChatTokenizer

# Findings are reported above this share of dropped tokens, and below this share of supervised ones.
REPORTED_SHARE, FEW_SUPERVISED = 0.01, 0.02
# Highest and lowest plausible learning rates of Adam-like optimizers, by kind of rows and of model. A model from scratch needs
# more than a pretrained one; preference losses move weights further than next-token prediction. Published recipes are well
# within: full SFT 1e-6 to 1e-4, LoRA 1e-5 to 5e-4, DPO 1e-7 to 5e-6 full and up to 5e-5 with adapters.
LOWEST = 1e-8
HIGHEST = {
    "conversations or text": {"scratch": 3e-2, "full": 3e-4, "lora": 3e-3},
    "preferences": {"scratch": 3e-3, "full": 5e-5, "lora": 1e-3},
}
TRAINED = {"lora": "adapters", "full": "all weights of a pretrained model", "scratch": "a model from scratch"}
FEWEST_STEPS = 10
# Relative to the base's embeddings: up to MORE tokens may have been added for a template, up to FEWER are padding.
MORE, FEWER = 0.01, 0.5


def check_dropped_tokens(key: str, pack: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings on tokens dropped for rows of this length, and on rows with few supervised tokens. Args: pack: manifest.

    >>> dropped = {"rows": 30, "tokens": 40_000, "enough": 2048}
    >>> counts = {"read": 100, "read_tokens": 120_000, "tokens": 80_000, "supervised_tokens": 30_000, "kept": 70}
    >>> manifest = {"packing_metadata": {"lost_to_length": dropped}, "counts": {"train": counts}, "row_length": 512}
    >>> print(*check_dropped_tokens("sft.demo", manifest))  # doctest: +NORMALIZE_WHITESPACE
    sft.demo.packing.length: 33.3% of the tokens (40,000 of 120,000, in 30 of 100 sequences) are dropped, since rows have 512
        tokens; rows of 2048 would keep 99% of them
    """
    counts, lost = pack["counts"]["train"], pack.get("packing_metadata", {}).get("lost_to_length")
    read, dropped = counts.get("read_tokens", 0), lost["tokens"] if lost else 0
    if read and dropped > REPORTED_SHARE * read:
        rows = f"in {lost['rows']:,} of {counts['read']:,} sequences"
        problem = (
            f"{dropped / read:.1%} of the tokens ({dropped:,} of {read:,}, {rows}) are dropped, since rows have "
            f"{pack['row_length']} tokens"
        )
        enough = lost.get("enough")
        do = f"rows of {enough} would keep 99% of them" if enough else "make rows longer"
        yield Finding(key=f"{key}.packing.length", problem=problem, do=do, certain=False)
    tokens, supervised = counts.get("tokens", 0), counts.get("supervised_tokens", 0)
    if tokens and not supervised:
        problem = "no token of the rows is supervised, so nothing would be learned"
        do = "check the tokenizer's chat template, and which turns are marked `supervised: false`"
        yield Finding(key=f"{key}.packing.train_on", problem=problem, do=do)
    elif tokens and supervised < FEW_SUPERVISED * tokens:
        problem = f"only {supervised / tokens:.2%} of the tokens are supervised ({supervised:,} of {tokens:,})"
        do = "if the prompts are meant to be that long, ignore this; otherwise check the tokenizer's chat template"
        yield Finding(key=f"{key}.packing.train_on", problem=problem, do=do, certain=False)


def check_raced_rows(run: PreflightRun, pack: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding if a race would have too few held-out rows to compare variants on. Args: pack: manifest."""
    rows = pack["counts"].get("held_out", {}).get("kept", 0)
    if run.raced and rows < MIN_ROWS:
        problem = f"the rows of its corpus have {rows} held-out ones, and {MIN_ROWS} are needed to compare variants on"
        yield Finding(key=f"{run.key}.race", problem=problem, do="raise the corpus' held_out, or remove the race")


def check_hyperparameters(run: PreflightRun, pretrained: bool, pack: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings on learning rates and batch sizes that are probably mistakes.

    Args:
        pretrained: whether the family starts from pretrained weights.
        pack: manifest of its rows.
    """
    training, key = run.run.training, f"{run.key}.training"
    how = "lora" if run.run.lora else "full" if pretrained else "scratch"
    of = "conversations or text" if run.kind == "sft" else "preferences"
    rate, highest = training.learning_rate, HIGHEST[of][how]
    if OPTIMIZERS[training.optimizer].betas and not LOWEST <= rate <= highest:
        problem = f"{rate:g}, while {TRAINED[how]} usually train on {of} with {LOWEST:g} to {highest:g}"
        do = "check the exponent; ignore this if it is intended"
        yield Finding(key=f"{key}.learning_rate", problem=problem, do=do, certain=False)
    rows = pack.get("packing_metadata", {}).get("rows") or pack["counts"]["train"].get("kept", 0)
    # The last step of an epoch may have fewer rows.
    steps = math.ceil(training.epochs * math.ceil(rows / training.batch_rows))
    if rows and steps < FEWEST_STEPS:
        sentence = (
            f"{training.batch_rows} rows a step make {steps} steps of {rows:,} rows in {training.epochs:g} epochs"
        )
        problem, do = f"{sentence}, too few to train with", "lower batch_rows, or raise epochs"
        yield Finding(key=f"{key}.batch_rows", problem=problem, do=do, certain=False)


def check_pad_token(key: str, chat: ChatTokenizer, tokenizer: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding if one token both pads and ends turns: masking padding by its id hides the end of turn from the loss.

    Args:
        tokenizer: manifest of the tokenizer.
    """
    pad = chat.id_to_token(chat.pad_id)
    if chat.pad_id in chat.stop_ids:
        problem = (
            f"{pad!r} both pads and ends a turn: code that masks padding by its id hides the end of turn from the loss, and "
            "the model never stops"
        )
        do = "set a pad_token of its own in its tokenizer_config.json"
        yield Finding(key=f"{key}.tokenizer", problem=problem, do=do, certain=False)
    elif before := tokenizer.get("adopted", {}).get("own_pad_token"):
        problem = (
            f"the adopted tokenizer pads with {before!r}, which ends its turns: models trained with it elsewhere never learn "
            f"to stop. Here {pad!r} pads"
        )
        do = "serve the model with the tokenizer beside it, not with the adopted one"
        yield Finding(key=f"{key}.tokenizer", problem=problem, do=do, certain=False)


def check_tokenizer_match(key: str, chat: ChatTokenizer, config: PretrainedConfig) -> Iterator[Finding]:
    """Yield a finding if the tokenizer seems to be another model's than the base's, whose config is given.

    The training resizes embeddings to any tokenizer.
    """
    text = config.get_text_config()
    size, mismatches = text.vocab_size, []
    if chat.vocab_size > (1 + MORE) * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base only {size:,}: the others start untrained")
    elif chat.vocab_size < FEWER * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base {size:,}")
    # Configs with parts may have no token ids of their own.
    eos = getattr(config, "eos_token_id", None)
    ends = eos if eos is not None else getattr(text, "eos_token_id", None)
    for end in ends if isinstance(ends, list | tuple) else () if ends is None else (ends,):
        if end < chat.vocab_size and not chat.is_control(np.array([end]))[0]:
            mismatches.append(f"the base's end-of-text token {end} is the word {chat.id_to_token(end)!r} in it")
    if mismatches:
        problem = f"it isn't the base's own: {'; '.join(mismatches)}"
        do = "adopt the base's (`tokenizers.NAME.adopt`), unless its embeddings are meant to be trained again"
        yield Finding(key=f"{key}.tokenizer", problem=problem, do=do, certain=False)


def check_positions(key: str, longest: int, config: PretrainedConfig, scaled: bool) -> Iterator[Finding]:
    """Yield a finding if sequences are longer than the pretrained model's positions.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(max_position_embeddings=2048)
    >>> print(*check_positions("sft.demo", 5000, config, False))  # doctest: +NORMALIZE_WHITESPACE
    sft.demo.packing.length: the longest sequence has 5000 tokens, but the model was made for 2048; lower packing.length, or
        scale its positions: base.rope: {type: yarn, factor: 3}

    Args:
        longest: tokens of the longest sequence of the rows.
        config: the model's, scaled if `base.rope` is set (`scaled`).
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or not 0 < limit < longest:
        return
    problem = f"the longest sequence has {longest} tokens, but the model was made for {limit}"
    do = "lower packing.length"
    if scaled:
        yield Finding(
            key=f"{key}.packing.length", problem=f"{problem}, with base.rope", do=f"{do}, or raise the factor"
        )
        return
    if getattr(text, "rope_parameters", None):
        do = f"{do}, or scale its positions: base.rope: {{type: yarn, factor: {math.ceil(longest / limit)}}}"
    yield Finding(key=f"{key}.packing.length", problem=problem, do=do, certain=False)


def check_training_noise(key: str, config: PretrainedConfig) -> Iterator[Finding]:
    """Yield a finding if a policy differs in training from its reference before it has learned anything."""
    if draws_in_training(config):
        problem = (
            f"{config.model_type} draws random numbers in training that no setting turns off, as routers that sample experts. "
            "So the policy would differ from its reference before the first step, and DPO would learn that difference"
        )
        do = "use a loss without a reference, such as simpo, or another model"
        yield Finding(key=f"{key}.loss", problem=problem, do=do)


def check_missing_answers(
    evaluations: Iterable[PreflightEvaluation], evaluated: dict[str, Artifact]
) -> Iterator[Finding]:
    """Yield a finding for each evaluation with exact match where no held-out row has a checkable answer.

    The answers are known after reading the rows, unlike in `config.workflow`. Args: evaluated: corpora by name.
    """
    for evaluation in evaluations:
        answers = [read_split(evaluated[name], "held_out").column("answer") for name in evaluation.exact_match]
        if answers and all(column.null_count == len(column) for column in answers):
            rows = f"none of the {sum(map(len, answers)):,} held-out rows of {' and '.join(evaluation.exact_match)}"
            problem = f"{rows} has a checkable answer, so there is nothing to compare"
            do = (
                f"set corpora.{evaluation.exact_match[0]}.answer_pattern to a pattern for it in the last assistant turn, or "
                "fields.answer of its sources to the column that holds it, or remove exact_match"
            )
            yield Finding(key=f"{evaluation.key}.exact_match", problem=problem, do=do)


# Tokens that a finding names.
SHOWN = 3


def new_tokens(base: Pretrained, config: PretrainedConfig, chat: ChatTokenizer) -> np.ndarray:
    """bool[vocabulary]: the tokens without a row in the base's embedding, and those whose row its own tokenizer has no
    token for, or another one (a reserved one that was renamed)."""
    ids, tokenizer = np.arange(chat.vocab_size), own_tokenizer(base)
    new = ids >= config.get_text_config().vocab_size
    if tokenizer:
        new |= np.array([tokenizer.id_to_token(id) != chat.id_to_token(id) for id in ids.tolist()])
    return new


def check_new_tokens(
    run: PreflightRun,
    base: Pretrained,
    config: PretrainedConfig,
    chat: ChatTokenizer,
    planned: TracedModel,
    packs: list[PackedRows | None],
    compute: Compute,
) -> Iterator[Finding]:
    """Yield a finding on new tokens whose rows stay random: it stops the run if they are to be written.

    Args:
        planned: the run's model, before its vocabulary grows.
        packs: the rows of the job's packs; None for raw rows, whose ends of turns alone are known.
    """
    names = list(dict.fromkeys(filter(None, (planned.frozen_embedding, planned.frozen_head))))
    if not names or not (new := new_tokens(base, config, chat)).any():
        return
    seen, written = _used(packs[run.pack], chat)
    for earlier in run.earlier:
        before = trace_model(config, compute, lora=earlier.lora, trainable=earlier.trainable)
        if before and not (before.frozen_embedding or before.frozen_head):
            new = new & ~_used(packs[earlier.pack], chat)[1]
    stops = new & written if planned.frozen_head else new & False
    unread = new & (seen | written) & ~stops if planned.frozen_embedding else new & False
    lora = run.run.lora
    key = f"{run.key}.{'lora.modules_to_save' if lora else 'training.trainable'}"
    entry = ", ".join([*(lora.modules_to_save if lora else ()), *names])
    do = f"set lora.modules_to_save: [{entry}]" if lora else f"let its pattern match {' and '.join(names)} too"
    do = f"{do}, or train all weights"
    for found, certain in ((stops, True), (unread, False)):
        if not found.any():
            continue
        shown = [repr(chat.id_to_token(id)) for id in np.flatnonzero(found)[:SHOWN].tolist()]
        more = f" and {found.sum() - SHOWN} more" if found.sum() > SHOWN else ""
        effect = "and are to be written, which the model could never learn" if certain else "and are in its rows"
        yield Finding(
            key=key,
            problem=f"{', '.join(shown)}{more}: tokens that the base wasn't trained on {effect}: their rows of "
            f"{' and '.join(names)} are random and aren't trained",
            do=do,
            certain=certain,
        )


def _used(rows: PackedRows | None, chat: ChatTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """bool[vocabulary], twice: the tokens in the rows, and the supervised ones."""
    counted = partial(np.bincount, minlength=chat.vocab_size)
    seen, written = np.zeros((2, chat.vocab_size), bool)
    if rows is None:
        written[list(chat.stop_ids)] = True
        return seen, written
    for views in rows.batches:
        labels = views["labels"]
        written |= counted(labels[labels >= 0]) > 0
        seen |= counted(views["input_ids"].ravel()) > 0
    # Padding is no token of a document.
    seen[chat.pad_id] = False
    return seen, written
