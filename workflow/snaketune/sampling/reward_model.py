"""Scores of a sample's responses by a reward model: a model with one output for a whole conversation.

The conversation is written by the reward model's own chat template. Scores are kept by its tokens.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.errors import SnaketuneError, first_line
from snaketune.models.load_model import load_reward_model, positions_of
from snaketune.progress import progress
from snaketune.sampling.score_table import Numbers, with_prompts, write_score_table
from snaketune.sampling.tables import RESPONSES, SCORE
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import cached_entries
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RateSpec
from snaketune.tables import read_table
from snaketune.training.reference.cache_key import identity

TOO_LONG, NOT_FINITE = "longer than the reward model's positions", "the score isn't a finite number"


def build(
    spec: RateSpec,
    work: WorkFolder,
    *,
    samples: Artifact,
    model: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Write `scores.arrow` to `work.payload`: a row per response, in their order.

    Args:
        model: a reward model that was trained here, if `spec.base` names none.
        base: files of a local model, which `spec.base` names.
    Raises:
        SnaketuneError: the model isn't a reward model, has no chat template, or scores no response.
    """
    compute = resolve_compute("auto")
    responses = read_table(samples.file(RESPONSES))
    conversations = [
        [*prompt["messages"], {"role": "assistant", "content": row["content"]}]
        for row, prompt in with_prompts(responses, samples)
    ]
    for result in model:
        result.files()
    pretrained = spec.base or Pretrained(path=str(model[0].folder))
    encoded = _encoded(pretrained, conversations)
    digests = [hashlib.sha256(repr(ids).encode()).digest()[:16] for ids in encoded]
    store = RowStore(
        work.root,
        {
            # A local model counts by its files, and a trained one by its content.
            "reward": model[0].content if model else identity(pretrained, named=not base),
            "files": [entry for _, entry in cached_entries("base", base, work.root)],
            "device": [compute.device.type, str(compute.dtype)],
            "code": code_digest("snaketune.sampling.reward_model"),
        },
    )
    store.mark(work)
    by_digest = dict(zip(digests, encoded, strict=True))

    def scored(missing: list[bytes]) -> Iterator[dict[bytes, float]]:
        loaded = load_reward_model(pretrained, compute.weights_dtype(frozen=True)).to(compute.device).eval()
        longest = positions_of(loaded.config) or math.inf
        fitting = {digest: by_digest[digest] for digest in missing if len(by_digest[digest]) <= longest}
        batches = _scores(loaded, compute, fitting, spec.batch_size)
        return progress(batches, "scoring", "responses", len(fitting), len)

    known, missing = store.completed(digests, scored, "scores")
    found: list[Numbers | str] = []
    for digest in digests:
        if digest not in known:
            found.append(TOO_LONG)
        else:
            found.append({SCORE: known[digest]} if math.isfinite(known[digest]) else NOT_FINITE)
    counts, mean = write_score_table(work, responses, found)
    return Outcome(
        counts=counts,
        about={"mean": mean, "rows": [store.key]},
        run={"device": str(compute.device), "responses_scored": len(missing)},
    )


def _encoded(base: Pretrained, conversations: Sequence[list[dict[str, Any]]]) -> list[list[int]]:
    """The tokens of each conversation, by the reward model's own tokenizer and chat template."""
    how = {"revision": base.revision or "main", "trust_remote_code": base.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.path, **how)
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"score.by.reward: {base.path} has no tokenizer that loads: {first_line(error)}") from None
    if not tokenizer.chat_template:
        raise SnaketuneError(
            f"score.by.reward: the tokenizer of {base.path} has no chat template, so it isn't known how to write a "
            "conversation for it; add chat_template.jinja to a local folder"
        )
    return [
        tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
        for conversation in conversations
    ]


@torch.no_grad()
def _scores(
    model: PreTrainedModel, compute: Compute, encoded: dict[bytes, list[int]], batch_size: int
) -> Iterator[dict[bytes, float]]:
    """Yield the scores of batches of similar length."""
    pad = model.config.get_text_config().pad_token_id
    # Without a token for padding, the model can't tell where a sequence ends.
    size = 1 if pad is None else batch_size
    ordered = sorted(encoded, key=lambda digest: (len(encoded[digest]), digest))
    for begin in range(0, len(ordered), size):
        batch = ordered[begin : begin + size]
        ids = [torch.tensor(encoded[digest]) for digest in batch]
        ids_BL = pad_sequence(ids, batch_first=True, padding_value=pad or 0)
        mask_BL = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        with compute.autocast():
            out = model(input_ids=ids_BL.to(compute.device), attention_mask=mask_BL.to(compute.device), use_cache=False)
        yield dict(zip(batch, out.logits[:, 0].double().tolist(), strict=True))
