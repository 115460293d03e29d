"""Check that tokens which are new to a base model can be learned: their rows of embedding and output head start at random.

Adapters alone, or a pattern in `training.trainable`, leave the rows as they are. A model that is trained to write such a token,
as the end of its turns, then never can.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
from transformers import PretrainedConfig

from snaketune.config.base_models import Pretrained
from snaketune.engine.model.devices import Compute
from snaketune.engine.packing.rows import PackedRows
from snaketune.models.load_model import own_tokenizer
from snaketune.models.memory import TracedModel, trace_model
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun
from snaketune.tokenization.chat import ChatTokenizer

# Tokens that a finding names.
SHOWN = 3


def new_tokens(base: Pretrained, config: PretrainedConfig, chat: ChatTokenizer) -> np.ndarray:
    """Return bool[vocabulary]: the tokens without a row in the base's embedding, and those whose row its own tokenizer has no
    token for, or another one (a reserved one that was renamed)."""
    ids, own = np.arange(chat.vocab_size), own_tokenizer(base)
    new = ids >= config.get_text_config().vocab_size
    if own:
        new |= np.array([own.id_to_token(id) != chat.id_to_token(id) for id in ids.tolist()])
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
    """Return bool[vocabulary], twice: the tokens in the rows, and the supervised ones."""
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
