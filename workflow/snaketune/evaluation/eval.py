"""The `eval` stage: one model on the held-out rows.

scores.json       held-out loss and perplexity, exact match, preference accuracy and margins, task scores
responses.jsonl   every generated response, with the prompt, the expected and the found answer
"""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.artifacts.tables import read_table
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.evaluation.continuing import how_to_continue
from snaketune.evaluation.exact_match import as_rows, choose_prompts, judge, summarize
from snaketune.evaluation.generation import generate, generates_plainly
from snaketune.evaluation.preferences import preference_scores
from snaketune.models.attention import Unpackable, use_own_attention
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.loading import (
    load_base,
    load_folder,
    parameter_count,
    read_config,
    read_folder_config,
    set_special_tokens,
)
from snaketune.models.logprobs import SEPARATE, losses_by_batch, pair_logprobs_of
from snaketune.models.packable import check_config
from snaketune.models.selftest import self_test
from snaketune.packing.reader import PackedRows, documents
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec
from snaketune.stages.work import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.reference import is_comparable, read_ref_logps

ROWS_PER_BATCH = 8


def build(
    spec: EvalSpec,
    work: WorkFolder,
    *,
    operation: Operation,
    model: list[Artifact],
    tokenizer: Artifact,
    corpora: list[Artifact],
    packs: list[Artifact],
    ref_logps: list[Artifact],
    base: list[Path],
    tasks: list[Path],
    task_data: list[Path],
) -> Outcome:
    """Fill `work.payload` with `scores.json` and `responses.jsonl`.

    Args:
        packs: of `spec.conversations`, then of `spec.preferences`.
        task_data: what tasks name outside their folder, which lm-eval reads by itself.
    """
    started = time.monotonic()
    compute = resolve_compute("auto")
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    if model:
        model[0].files()
        config = read_folder_config(model[0].folder, trust_remote_code=spec.trust_remote_code)
        # As the reference was loaded, so that their log-probabilities can be compared.
        frozen = not ref_logps or ref_logps[0].manifest["spec"]["frozen_weights"]
        loaded = load_folder(
            model[0].folder,
            weights_dtype=compute.weights_dtype(frozen=frozen),
            trust_remote_code=spec.trust_remote_code,
        )
        set_special_tokens(loaded, chat)
    else:
        config = read_config(spec.base)
        loaded = load_base(spec.base, chat, weights_dtype=compute.dtype)
    loaded = loaded.to(compute.device)
    scores: dict[str, Any] = {"parameters": parameter_count(loaded)}
    # By the model's own attention, which nothing has replaced yet.
    continuing = how_to_continue(loaded, chat, compute)
    if spec.task_names and not continuing.cached:
        raise SnaketuneError(
            f"eval.tasks: lm-evaluation-harness generates with the cache, and that of {loaded.config.model_type} gives other "
            "logits than its forward: leave the tasks out of this model's evaluation"
        )

    held_out = [PackedRows(pack, "held_out") for pack in packs]
    about, run = _how_to_run(loaded, config, held_out, compute)
    compute = replace(compute, kernel=about["kernel"])
    preference_packs = packs[len(spec.conversations) :]
    scores["conversations"] = {
        name: held_out_loss(loaded, rows, compute, name) for name, rows in zip(spec.conversations, held_out)
    }
    references = {
        pair: reference
        for artifact in ref_logps
        if is_comparable(artifact, compute)
        for pair, reference in read_ref_logps(artifact, "held_out").items()
    }
    scores["preferences"] = {}
    for name, pack, rows in zip(spec.preferences, preference_packs, held_out[len(spec.conversations) :], strict=True):
        if len(rows):
            sums, counts = pair_logprobs_of(loaded, rows, compute, ROWS_PER_BATCH, f"preferences, {name}")
            ids = [document["id"] for document in documents(pack, "held_out")]
            scores["preferences"][name] = preference_scores(ids, sums, counts, references)

    use_own_attention(loaded)
    prompts = [
        prompt
        for name, corpus in zip(spec.conversations, corpora, strict=True)
        for prompt in choose_prompts(
            name, read_table(corpus.file("held_out.arrow")), spec.exact_match.limit, spec.samples
        )
    ]
    written = generate(
        loaded,
        chat,
        [chat.encode_prompt(prompt.messages, prompt.tools) for prompt in prompts],
        max_new_tokens=spec.generation.max_new_tokens,
        batch_size=continuing.batch_size(spec.generation.batch_size),
        compute=compute,
        cached=continuing.cached,
    )
    responses = [
        judge(prompt, text, length, spec.exact_match) for prompt, (text, length) in zip(prompts, written, strict=True)
    ]
    for name in spec.conversations:
        scores["conversations"][name]["exact_match"] = summarize([r for r in responses if r.corpus == name])
    if spec.task_names:
        from snaketune.evaluation.tasks import run_tasks

        generates_plainly(loaded, chat)
        scores["tasks"] = run_tasks(
            loaded,
            tokenizer.folder,
            Path(os.path.commonpath([path.parent for path in tasks])),
            spec.task_names,
            spec.task_limit,
            continuing.batch_size(spec.task_batch_size),
            work.state,
        )
    write_json(work.payload / "scores.json", scores)
    lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in as_rows(responses)]
    (work.payload / "responses.jsonl").write_text("".join(lines), encoding="utf-8")
    return Outcome(
        counts={"prompts": len(prompts)},
        about=about
        | {
            "generation": {
                "strategy": "greedy",
                "max_new_tokens": spec.generation.max_new_tokens,
                "stop_ids": list(chat.stop_ids),
                **continuing.about(),
            },
        },
        run=run | {"device": str(compute.device), "evaluation_seconds": round(time.monotonic() - started, 1)},
    )


def _how_to_run(
    model: PreTrainedModel, config: PretrainedConfig | None, packs: list[PackedRows], compute: Compute
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Whether rows can be run as they are packed; else one sequence at a time, by the model's own attention.

    Returns:
        For the manifest, with the `kernel` to go on with, and for run.json.
    """
    if not any(len(rows) for rows in packs):
        return compute.about(), {}
    try:
        if config:
            check_config(config, max(rows.longest[0] for rows in packs), any(rows.has_prefixes for rows in packs))
        tested = self_test(model, packs, compute, training=False)
    except Unpackable as error:
        use_own_attention(model)
        print(f"{error}. Held-out rows are therefore run one sequence at a time, by its own attention", flush=True)
        return replace(compute, kernel=SEPARATE).about(), {}
    return tested.about(), {"self_test_share": tested.share}


def held_out_loss(model: torch.nn.Module, rows: PackedRows, compute: Compute, name: str) -> dict[str, Any]:
    """Mean negative log-probability of the supervised tokens in nats, and its exponential."""
    total, tokens = 0.0, 0
    for _, losses_N in losses_by_batch(model, rows, compute, ROWS_PER_BATCH, f"loss, {name}"):
        total += losses_N.double().sum().item()
        tokens += len(losses_N)
    if not tokens:
        return {"held_out_loss": None, "perplexity": None, "supervised_tokens": 0}
    mean = total / tokens
    return {
        "held_out_loss": round(mean, 5),
        "perplexity": round(math.exp(min(mean, 50.0)), 4),
        "supervised_tokens": tokens,
    }
