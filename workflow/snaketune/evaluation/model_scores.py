"""Compute the scores of one model on held-out rows: the work of the `eval` stage.

scores.json       held-out loss and perplexity, exact match, preference accuracy and margins, task scores; 95% intervals
responses.jsonl   every generated response, with the prompt, the expected and the extracted answer
losses.arrow      loss of every held-out document (`evaluation.held_out`)
pairs.arrow       log-probabilities of the completions of every held-out pair, with the reference's
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.devices import use_threads
from snaketune.engine.model.parameters import parameter_count
from snaketune.errors import SnaketuneError
from snaketune.evaluation.agreement import teacher_agreement
from snaketune.evaluation.divergence import kl_of_responses, summarize_kl
from snaketune.evaluation.exact_match import judge, summarize
from snaketune.evaluation.held_out import (
    LOSSES,
    PAIRS,
    choose_forward,
    comparable_references,
    held_out_loss,
    held_out_preferences,
)
from snaketune.evaluation.held_out_prompts import held_out_prompts
from snaketune.evaluation.reward_scores import score_reward_model
from snaketune.evaluation.tasks import prepared_tasks, run_tasks
from snaketune.files import write_json
from snaketune.packing.reader import open_rows
from snaketune.sampling.engines import engine_of, resolve
from snaketune.sampling.generation_check import MODES, choose_generation_mode
from snaketune.sampling.responses import Request, batches
from snaketune.sampling.sampled import Sampled
from snaketune.sampling.transformers_engine import TransformersEngine
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec
from snaketune.tables import write_table
from snaketune.training.reference.teacher_file import open_teacher


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
    operation: Execution,
    base_layers: Sequence[Artifact] = (),
    kl_from: Sequence[Artifact] = (),
    kl_base: Sequence[Path] = (),
    teacher: Sequence[Artifact] = (),
    taught_pack: Sequence[Artifact] = (),
) -> Outcome:
    """Fill `work.payload` with the files above; of a reward model, with those of `evaluation.reward_scores`.

    Args:
        model, base_layers: the evaluated result and its base layers; empty for a base model.
        packs: packs of `spec.conversations`, then of `spec.preferences`.
        tasks: files of the tasks' folder; empty for tasks that lm-evaluation-harness ships.
        task_data: files outside the tasks' folder that tasks name; lm-eval reads them itself.
        operation: with the engine of responses.
        kl_from, kl_base: the results and the base of the model from which the divergence is measured, if `spec.kl` says so.
        teacher, taught_pack: a teacher's tokens, and the rows that they belong to, if `spec.teacher_temperature` is set.
    """
    if spec.rewards:
        return score_reward_model(spec, work, model=model[0], packs=packs)
    results, taught = (*model, *base_layers), (*teacher, *taught_pack)
    started = time.monotonic()
    sampled = Sampled(
        results=results,
        base=spec.base,
        trust_remote_code=spec.trust_remote_code,
        tokenizer=tokenizer,
        decoding=spec.generation.decoding,
        frozen=_frozen(ref_logps),
        base_files=base,
        operation=operation,
        work=work,
    )
    chat, compute, decoding = sampled.chat, sampled.compute, sampled.decoding
    prompts, encoded = held_out_prompts(spec, chat, corpora)
    wanted = batches(encoded, 1, spec.generation.batch_size)
    engine_name = resolve(operation.engine, operation.vllm, compute.device.type) if wanted else "transformers"
    cache, generated = None, 0
    if engine_name != "transformers":
        # Before this process takes memory of the GPU.
        longest = max(map(len, encoded)) + decoding.max_new_tokens
        cache = sampled.cache(engine_of(engine_name, sampled, longest))
        generated, _ = cache.complete(wanted)
    folder = Path(os.path.commonpath([path.parent for path in tasks])) if tasks else None
    tasks_at = prepared_tasks(spec.tasks, folder, tokenizer.folder, work.state) if spec.tasks else nullcontext()
    with tasks_at as prepared:
        loaded = sampled.on_device()
        use_threads(loaded.config, compute)
        # Before the model's own attention is replaced.
        generates = bool(prepared or (wanted and cache is None))
        mode = choose_generation_mode(loaded, chat, compute) if generates else MODES[0]
        if prepared and not mode.cached:
            raise SnaketuneError(
                f"eval.tasks: lm-evaluation-harness generates with the cache, and that of {loaded.config.model_type} gives "
                "other logits than its forward; remove the tasks from this model's evaluation"
            )
        held_out = [open_rows(pack, "held_out") for pack in (*packs, *taught[1:])]
        compute, about, run = choose_forward(loaded, sampled.stack.config(), held_out, compute)
        references = comparable_references(ref_logps, compute)
        of_pairs = list(zip(held_out, packs))[len(spec.conversations) :]
        preferences = {
            name: held_out_preferences(loaded, rows, pack, compute, name, references)
            for name, (rows, pack) in zip(spec.preferences, of_pairs, strict=True)
            if len(rows)
        }
        losses = {name: held_out_loss(loaded, rows, compute, name) for name, rows in zip(spec.conversations, held_out)}
        scores: dict[str, Any] = {
            "parameters": parameter_count(loaded),
            "conversations": {name: score for name, (score, _) in losses.items()},
            "preferences": {name: score for name, (score, _) in preferences.items()},
        }
        if spec.teacher_temperature:
            rows, temperature = held_out[-1], spec.teacher_temperature
            rows.teacher = open_teacher(*taught, "held_out", rows, temperature)
            scores["teachers"] = {"teacher": teacher_agreement(loaded, rows, temperature, compute, chat)}
        use_own_attention(loaded)
        if cache is None:
            engine = TransformersEngine(model=loaded, chat=chat, compute=compute, mode=mode, decoding=decoding)
            cache = sampled.cache(engine)
            generated, _ = cache.complete(wanted)
        responses = [
            judge(prompt, known.text, len(known.tokens), spec.exact_match)
            for prompt, known in zip(prompts, [cache.known[Request(ids).digest] for ids in encoded], strict=True)
        ]
        for name in spec.conversations:
            scores["conversations"][name]["exact_match"] = summarize([r for r in responses if r.corpus == name])
        if spec.kl:
            start = replace(sampled, results=tuple(kl_from), base=spec.kl_base).on_device()
            answered = [cache.known[Request(ids).digest].tokens for ids in encoded]
            kl_by_response = kl_of_responses(loaded, start, encoded, answered, compute)
            for name in spec.conversations:
                of_corpus = [kl for kl, prompt in zip(kl_by_response, prompts, strict=True) if prompt.corpus == name]
                scores["conversations"][name]["kl"] = summarize_kl(of_corpus)
        if prepared:
            scores |= run_tasks(loaded, prepared, spec.tasks, mode.batch_size(spec.tasks.batch_size))
            about = about | {"task_data": prepared.data}
    write_json(work.payload / "scores.json", scores)
    for name, schema, of_corpora in (("losses.arrow", LOSSES, losses), ("pairs.arrow", PAIRS, preferences)):
        tables = [schema.empty_table(), *(table for _, table in of_corpora.values())]
        write_table(work.payload / name, pa.concat_tables(tables))
    lines = [json.dumps(asdict(row), ensure_ascii=False, sort_keys=True) + "\n" for row in responses]
    (work.payload / "responses.jsonl").write_text("".join(lines), encoding="utf-8")
    generation = {
        "engine": cache.engine.about(),
        "strategy": "sampling" if spec.generation.temperature else "greedy",
        "max_new_tokens": spec.generation.max_new_tokens,
        "stop_ids": list(chat.stop_ids),
        "responses": cache.rows.key,
    }
    run |= {
        "device": str(compute.device),
        "evaluation_seconds": round(time.monotonic() - started, 1),
        "responses_generated": generated,
        **cache.engine.run(),
    }
    if wanted:
        about = about | {"generation": generation}
    return Outcome(counts={"prompts": len(responses)}, about=about, run=run)


def _frozen(ref_logps: list[Artifact]) -> bool:
    """Whether weights are loaded in the data type of the computation: the same rule as for the reference, so that their
    log-probabilities can be compared."""
    return not ref_logps or ref_logps[0].manifest["spec"]["frozen_weights"]
