"""Checks of a run's rows, tokenizer and settings, from the manifests of what it reads."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from snaketune.artifacts.manifest import Artifact
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightEvaluation, PreflightRun
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer

# Findings are reported above this share of dropped tokens, and below this share of supervised ones.
REPORTED_SHARE = 0.01
FEW_SUPERVISED = 0.02
# Highest and lowest plausible learning rates of Adam-like optimizers, by kind of rows and of model. A model from scratch needs
# more than a pretrained one; preference losses move weights further than next-token prediction. Published recipes are well
# within: full SFT 1e-6 to 1e-4, LoRA 1e-5 to 5e-4, DPO 1e-7 to 5e-6 full and up to 5e-5 with adapters.
HIGHEST = {
    ("sft", "scratch"): 3e-2,
    ("sft", "full"): 3e-4,
    ("sft", "lora"): 3e-3,
    ("preference", "scratch"): 3e-3,
    ("preference", "full"): 5e-5,
    ("preference", "lora"): 1e-3,
}
LOWEST = 1e-8
FEWEST_STEPS = 10
TRAINED = {"lora": "adapters", "full": "all weights of a pretrained model", "scratch": "a model from scratch"}
# Relative to the base's embeddings: up to MORE tokens may have been added for a template, up to FEWER are padding.
MORE, FEWER = 0.01, 0.5


def check_dropped_tokens(key: str, pack: dict[str, Any]) -> list[Finding]:
    """Return findings on tokens dropped for rows of this length, and on rows with few supervised tokens.

    Args:
        key: the run's key, such as `sft.demo`.
        pack: manifest of its rows.

    >>> dropped = {"rows": 30, "tokens": 40_000, "enough": 2048}
    >>> counts = {"read": 100, "read_tokens": 120_000, "tokens": 80_000, "supervised_tokens": 30_000, "kept": 70}
    >>> manifest = {"packing_metadata": {"lost_to_length": dropped}, "counts": {"train": counts}, "row_length": 512}
    >>> print(*check_dropped_tokens("sft.demo", manifest))  # doctest: +NORMALIZE_WHITESPACE
    sft.demo.packing.length: 33.3% of the tokens (40,000 of 120,000, in 30 of 100 sequences) are dropped, since rows have 512
        tokens; rows of 2048 would keep 99% of them
    """
    findings, counts = [], pack["counts"]["train"]
    dropped, read = (
        pack.get("packing_metadata", {}).get("lost_to_length") or {"tokens": 0},
        counts.get("read_tokens", 0),
    )
    if read and dropped["tokens"] > REPORTED_SHARE * read:
        problem = (
            f"{dropped['tokens'] / read:.1%} of the tokens ({dropped['tokens']:,} of {read:,}, in {dropped['rows']:,} of "
            f"{counts['read']:,} sequences) are dropped, since rows have {pack['row_length']} tokens"
        )
        enough = dropped.get("enough")
        do = f"rows of {enough} would keep 99% of them" if enough else "make rows longer"
        findings.append(Finding(key=f"{key}.packing.length", problem=problem, do=do, certain=False))
    tokens, supervised = counts.get("tokens", 0), counts.get("supervised_tokens", 0)
    if tokens and not supervised:
        problem = "no token of the rows is supervised, so nothing would be learned"
        do = "check the tokenizer's chat template, and which turns are marked `supervised: false`"
        findings.append(Finding(key=f"{key}.packing.train_on", problem=problem, do=do))
    elif tokens and supervised < FEW_SUPERVISED * tokens:
        problem = f"only {supervised / tokens:.2%} of the tokens are supervised ({supervised:,} of {tokens:,})"
        do = "if the prompts are meant to be that long, ignore this; otherwise check the tokenizer's chat template"
        findings.append(Finding(key=f"{key}.packing.train_on", problem=problem, do=do, certain=False))
    return findings


def check_hyperparameters(run: PreflightRun, pretrained: bool, pack: dict[str, Any]) -> list[Finding]:
    """Return findings on learning rates and batch sizes that are probably mistakes.

    Args:
        pretrained: whether the family starts from pretrained weights.
        pack: manifest of its rows.
    """
    training, findings = run.run.training, []
    how = "lora" if run.run.lora else "full" if pretrained else "scratch"
    kind, of = ("sft", "conversations or text") if run.kind == "sft" else ("preference", "preferences")
    rate, highest = training.learning_rate, HIGHEST[kind, how]
    if OPTIMIZERS[training.optimizer].betas and not LOWEST <= rate <= highest:
        problem = f"{rate:g}, while {TRAINED[how]} usually train on {of} with {LOWEST:g} to {highest:g}"
        do = "check the exponent; ignore this if it is intended"
        findings.append(Finding(key=f"{run.key}.training.learning_rate", problem=problem, do=do, certain=False))
    rows = pack.get("packing_metadata", {}).get("rows") or pack["counts"]["train"].get("kept", 0)
    steps = training.epochs * rows / training.batch_rows
    if rows and steps < FEWEST_STEPS:
        made = f"{training.batch_rows} rows a step make {max(1, round(steps))} steps of {rows:,} rows"
        problem, do = f"{made}, too few to train with", "lower batch_rows, or raise epochs"
        findings.append(Finding(key=f"{run.key}.training.batch_rows", problem=problem, do=do, certain=False))
    return findings


def check_pad_token(key: str, chat: ChatTokenizer, tokenizer: dict[str, Any]) -> list[Finding]:
    """Return a finding if one token both pads and ends turns, here or in the tokenizer that was adopted.

    Masking padding by its id would hide the end of turn from the loss, and the model would never stop.

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
    elif before := tokenizer.get("adopted", {}).get("own_pad_token"):
        problem = (
            f"the adopted tokenizer pads with {before!r}, which ends its turns: models trained with it elsewhere never learn "
            f"to stop. Here {pad!r} pads"
        )
        do = "serve the model with the tokenizer beside it, not with the adopted one"
    else:
        return []
    return [Finding(key=f"{key}.tokenizer", problem=problem, do=do, certain=False)]


def check_tokenizer_match(key: str, chat: ChatTokenizer, config: PretrainedConfig) -> list[Finding]:
    """Return a finding if the tokenizer seems to be another model's; the training resizes embeddings to any tokenizer.

    Args:
        config: of the base model.
    """
    text = config.get_text_config()
    size, mismatches = text.vocab_size, []
    if chat.vocab_size > (1 + MORE) * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base only {size:,}: the others start untrained")
    elif chat.vocab_size < FEWER * size:
        mismatches.append(f"it has {chat.vocab_size:,} tokens, but the base {size:,}")
    ends = config.eos_token_id if config.eos_token_id is not None else text.eos_token_id
    for end in ends if isinstance(ends, list | tuple) else () if ends is None else (ends,):
        if end < chat.vocab_size and not chat.is_control(np.array([end]))[0]:
            mismatches.append(f"the base's end-of-text token {end} is the word {chat.id_to_token(end)!r} in it")
    if not mismatches:
        return []
    problem = f"it isn't the base's own: {'; '.join(mismatches)}"
    do = "adopt the base's (`tokenizers.NAME.adopt`), unless its embeddings are meant to be trained again"
    return [Finding(key=f"{key}.tokenizer", problem=problem, do=do, certain=False)]


def check_missing_answers(evaluations: Iterable[PreflightEvaluation], evaluated: list[Artifact]) -> list[Finding]:
    """Return a finding for each evaluation with exact match where no held-out row has a checkable answer.

    The answers are known after reading the rows, unlike in `config.workflow`.
    """
    corpora = {corpus.folder.parent.name: corpus for corpus in evaluated}
    findings = []
    for one in evaluations:
        answers = [read_table(corpora[name].file("held_out.arrow")).column("answer") for name in one.exact_match]
        if answers and all(column.null_count == len(column) for column in answers):
            rows = f"none of the {sum(map(len, answers)):,} held-out rows of {' and '.join(one.exact_match)}"
            problem = f"{rows} has a checkable answer, so there is nothing to compare"
            do = (
                f"set corpora.{one.exact_match[0]}.answer_pattern to a pattern for it in the last assistant turn, or "
                "fields.answer of its sources to the column that holds it, or remove exact_match"
            )
            findings.append(Finding(key=f"{one.key}.exact_match", problem=problem, do=do))
    return findings
