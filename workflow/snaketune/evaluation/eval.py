"""The `eval` stage: one model on the held-out rows.

scores.json       held-out loss and perplexity, exact match, preference accuracy and margins, task scores
responses.jsonl   every generated response, with the prompt, the expected and the found answer
pairs.arrow       log-probabilities of every held-out pair's completions, beside the reference's (`evaluation/pairs.py`)
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.errors import SnaketuneError
from snaketune.evaluation.continuing import Continuing, how_to_continue
from snaketune.evaluation.exact_match import Response, as_rows, choose_prompts, judge, summarize
from snaketune.evaluation.generation import generate, generates_plainly
from snaketune.evaluation.held_out import held_out_loss, how_to_run
from snaketune.evaluation.pairs import PAIRS
from snaketune.evaluation.preferences import comparable_references, held_out_preferences
from snaketune.models.attention import use_own_attention
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.loading import parameter_count, set_special_tokens
from snaketune.models.stacked import Stack
from snaketune.packing.reader import PackedRows
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec
from snaketune.stages.work import WorkFolder
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer


def build(
    spec: EvalSpec,
    work: WorkFolder,
    *,
    model: list[Artifact],
    tokenizer: Artifact,
    corpora: list[Artifact],
    packs: list[Artifact],
    ref_logps: list[Artifact],
    base: list[Path],
    tasks: list[Path],
    task_data: list[Path],
    beneath: Sequence[Artifact] = (),
) -> Outcome:
    """Fill `work.payload` with `scores.json`, `responses.jsonl` and `pairs.arrow`.

    Args:
        model, beneath: the result that is evaluated, and what lies beneath it; none for a base.
        packs: of `spec.conversations`, then of `spec.preferences`.
        task_data: what tasks name outside their folder, which lm-eval reads by itself.
    """
    started = time.monotonic()
    compute = resolve_compute("auto")
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    stack = Stack(
        results=(*model, *beneath),
        base=spec.base,
        tokenizer=tokenizer.folder,
        trust_remote_code=spec.trust_remote_code,
    )
    asked, config = _load(stack, ref_logps, chat, compute)
    # By the model's own attention, which nothing has replaced yet.
    continuing = how_to_continue(asked, chat, compute)
    if spec.task_names and not continuing.cached:
        raise SnaketuneError(
            f"eval.tasks: lm-evaluation-harness generates with the cache, and that of {asked.config.model_type} gives other "
            "logits than its forward: leave the tasks out of this model's evaluation"
        )
    held_out = [PackedRows(pack, "held_out") for pack in packs]
    compute, about, run = how_to_run(asked, config, held_out, compute)
    of_pairs = len(spec.conversations)
    references = comparable_references(ref_logps, compute)
    preferred = {
        name: held_out_preferences(asked, rows, pack, compute, name, references)
        for name, rows, pack in zip(spec.preferences, held_out[of_pairs:], packs[of_pairs:], strict=True)
        if len(rows)
    }
    scores: dict[str, Any] = {
        "parameters": parameter_count(asked),
        "conversations": {
            name: held_out_loss(asked, rows, compute, name) for name, rows in zip(spec.conversations, held_out)
        },
        "preferences": {name: found for name, (found, _) in preferred.items()},
    }
    use_own_attention(asked)
    responses = _responses(spec, asked, chat, compute, continuing, corpora)
    for name in spec.conversations:
        scores["conversations"][name]["exact_match"] = summarize([r for r in responses if r.corpus == name])
    if spec.task_names:
        from snaketune.evaluation.tasks import run_tasks

        generates_plainly(asked, chat)
        scores["tasks"] = run_tasks(
            asked,
            tokenizer.folder,
            Path(os.path.commonpath([path.parent for path in tasks])),
            spec.task_names,
            spec.task_limit,
            continuing.batch_size(spec.task_batch_size),
            work.state,
        )
    write_json(work.payload / "scores.json", scores)
    pairs = [PAIRS.empty_table(), *(table for _, table in preferred.values())]
    write_table(work.payload / "pairs.arrow", pa.concat_tables(pairs))
    lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in as_rows(responses)]
    (work.payload / "responses.jsonl").write_text("".join(lines), encoding="utf-8")
    generation = {
        "strategy": "greedy",
        "max_new_tokens": spec.generation.max_new_tokens,
        "stop_ids": list(chat.stop_ids),
    }
    return Outcome(
        counts={"prompts": len(responses)},
        about=about | {"generation": generation | continuing.about()},
        run=run | {"device": str(compute.device), "evaluation_seconds": round(time.monotonic() - started, 1)},
    )


def _load(
    stack: Stack, ref_logps: list[Artifact], chat: ChatTokenizer, compute: Compute
) -> tuple[PreTrainedModel, PretrainedConfig | None]:
    """The model, and its config as it was read."""
    for result in stack.results:
        result.files()
    # As the reference was loaded, so that their log-probabilities can be compared.
    frozen = not ref_logps or ref_logps[0].manifest["spec"]["frozen_weights"]
    asked = stack.load(compute.weights_dtype(frozen=frozen))
    set_special_tokens(asked, chat)
    return asked.to(compute.device), stack.config()


def _responses(
    spec: EvalSpec,
    model: PreTrainedModel,
    chat: ChatTokenizer,
    compute: Compute,
    continuing: Continuing,
    corpora: list[Artifact],
) -> list[Response]:
    """What the model writes to held-out prompts, and whether it is right."""
    prompts = [
        prompt
        for name, corpus in zip(spec.conversations, corpora, strict=True)
        for prompt in choose_prompts(
            name, read_table(corpus.file("held_out.arrow")), spec.exact_match.limit, spec.samples
        )
    ]
    written = generate(
        model,
        chat,
        [chat.encode_prompt(prompt.messages, prompt.tools) for prompt in prompts],
        max_new_tokens=spec.generation.max_new_tokens,
        batch_size=continuing.batch_size(spec.generation.batch_size),
        compute=compute,
        cached=continuing.cached,
    )
    return [
        judge(prompt, text, length, spec.exact_match) for prompt, (text, length) in zip(prompts, written, strict=True)
    ]
