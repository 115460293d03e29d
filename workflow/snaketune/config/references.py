"""Checks of the references between the sections of a config."""

from snaketune.config.base import Reference
from snaketune.config.doctor import BASELINE
from snaketune.config.evaluations import Evaluation
from snaketune.config.lineage import check_cycles, references
from snaketune.config.named_entries import check_held_out_corpus, check_known, sft_of
from snaketune.config.response_references import check_sample, check_score, missing_answers_hint
from snaketune.config.run_references import (
    check_document_packing,
    check_dpo,
    check_length,
    check_race,
    check_reward,
    check_sft,
    check_training,
)
from snaketune.config.training_runs import Sft
from snaketune.config.workflow import Merge, Variants, Workflow
from snaketune.errors import SnaketuneError


def check_references(config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if a section names something that doesn't exist, is of the wrong kind or doesn't fit. Args: as
    `config.load` returns them."""
    for key, named in references("", config):
        check_known(key.removeprefix("."), named, config, variants)
    check_cycles(config)
    for name, run in config.sft.items():
        check_sft(f"sft.{name}", name, run, config)
    for name, run in config.dpo.items():
        check_dpo(f"dpo.{name}", run, config)
    for name, run in config.reward.items():
        check_reward(f"reward.{name}", run, config)
    for section, runs in (("sft", config.sft), ("dpo", config.dpo)):
        for name, run_names in variants[section].items():
            check_race(f"{section}.{name}.race", [runs[run_name] for run_name in run_names], config)
            if runs[run_names[0]].race and (race_name := f"race-{section}-{name}") in config.eval:
                raise SnaketuneError(
                    f"eval.{race_name}: the race of {section}.{name} evaluates under this name; rename it"
                )
    for name, merge in config.merge.items():
        _check_merge(f"merge.{name}.models", merge, config)
    _check_doctor(config)
    for name, evaluation in config.eval.items():
        _check_evaluation(f"eval.{name}", evaluation, config, variants)
    for name, sample in config.sample.items():
        check_sample(f"sample.{name}.prompts.corpora", sample.prompts, config)
    for name in config.score:
        check_score(f"score.{name}", config.score[name], config)


def _check_merge(key: str, merge: Merge, config: Workflow) -> None:
    tokenizers = {config.sft[sft_of(config, *model.split(":"))].tokenizer: model for model in merge.models}
    if len(tokenizers) > 1:
        used = ", ".join(f"{model} has {tokenizer}" for tokenizer, model in tokenizers.items())
        raise SnaketuneError(f"{key}: models with different tokenizers can't be merged: {used}")


def _check_doctor(config: Workflow) -> None:
    if BASELINE in config.doctor.changes:
        raise SnaketuneError(f"doctor.changes.{BASELINE}: this is the name of the unchanged run; choose another one")
    for section, runs in (("sft", config.sft), ("dpo", config.dpo)) if config.doctor.changes else ():
        for of, unchanged in runs.items():
            for name, run in config.doctor.variants(unchanged).items() if config.doctor.examines(section, of) else ():
                key = f"doctor.changes.{name}"
                check_length(key, run.packing, of if isinstance(run, Sft) else config.sft_below(run), config)
                check_training(f"{key}.training", run.training)


def _check_evaluation(key: str, evaluation: Evaluation, config: Workflow, variants: Variants) -> None:
    packing, corpora = evaluation.packing, config.corpora
    for model in evaluation.every_model(variants):
        check_known(f"{key}.models", Reference.to("", model), config, variants)
        check_length(key, packing, sft_of(config, *model.split(":")), config)
    if evaluation.teacher_of and not config.sft[evaluation.teacher_of].distill:
        raise SnaketuneError(
            f"{key}.teacher_of: sft.{evaluation.teacher_of} has no distill; name a run that a teacher teaches"
        )
    taught = evaluation.teacher_of and f"sft:{evaluation.teacher_of}"
    for name, other in (("kl_from", evaluation.kl_from), ("teacher_of", taught)):
        models = (*evaluation.every_policy(variants), other) if other else ()
        tokenizers = {config.sft[sft_of(config, *model.split(":"))].tokenizer: model for model in models}
        if len(tokenizers) > 1:
            used = ", ".join(f"{model} has {tokenizer}" for tokenizer, model in tokenizers.items())
            raise SnaketuneError(f"{key}.{name}: models with different tokenizers can't be compared: {used}")
    if evaluation.judge:
        judge, models = evaluation.judge, [*evaluation.every_policy(variants)]
        if judge.against not in models:
            raise SnaketuneError(
                f"{key}.judge.against: {judge.against} isn't one of the evaluation's models ({', '.join(models)}); add it to "
                "models, or name one of them"
            )
        if len(models) == 1:
            raise SnaketuneError(
                f"{key}.judge: there is only one model, {judge.against}, so there is nothing to compare"
            )
        if not any(corpora[corpus].kind == "conversations" for corpus in evaluation.conversations):
            raise SnaketuneError(f"{key}.judge: documents have no prompts; name a corpus of kind conversations")
    for corpus in evaluation.conversations:
        check_held_out_corpus(f"{key}.conversations", corpus, config, "conversations", "text")
    read = [corpora[corpus] for corpus in evaluation.conversations]
    if read and "exact_match" in evaluation.model_fields_set and not any(corpus.may_have_answers for corpus in read):
        hint = missing_answers_hint(evaluation.conversations, config)
        raise SnaketuneError(f"{key}.exact_match: {hint}, or remove exact_match")
    if read and all(corpus.kind == "text" for corpus in read):
        check_document_packing(key, packing)
    for model in evaluation.models:
        if model.startswith("reward:") and not evaluation.preferences:
            raise SnaketuneError(
                f"{key}.models: {model} is a reward model, which is evaluated on pairs alone; name corpora under "
                "`preferences`, or remove it"
            )
    for corpus in evaluation.preferences:
        check_held_out_corpus(f"{key}.preferences", corpus, config, "preferences")
    if packing.order != "shuffled":
        raise SnaketuneError(f"{key}.packing.order: evaluations measure all rows, in any order; remove it")
    if packing.strategy == "none":
        raise SnaketuneError(f"{key}.packing.strategy: `none` has no packed rows to evaluate on")
    if evaluation.preferences and (packing.strategy == "wrapped" or packing.overflow == "split"):
        raise SnaketuneError(
            f"{key}.packing: pairs are never split; choose another strategy and overflow, or evaluate preferences in a "
            "separate entry of `eval:`"
        )


def check_publish_targets(config: Workflow) -> None:
    """Raise SnaketuneError if a model for a GGUF file has only an adapter, or if two models are pushed to the same branch."""
    for name, gguf in config.gguf.items():
        lora = None if gguf.model.startswith("merge:") else config.lora_of(config.run_of(gguf.model))
        if lora and not lora.merge:
            raise SnaketuneError(
                f"gguf.{name}.model: {gguf.model} is an adapter alone (lora.merge: false), and a GGUF file needs full "
                "weights; set lora.merge: true, or convert the adapter with llama.cpp's convert_lora_to_gguf.py"
            )
    targets: dict[tuple[str, str], str] = {}
    for name, push in config.push.items():
        first = targets.setdefault((push.repository.lower(), push.branch), name)
        if first != name:
            raise SnaketuneError(
                f"push.{name}.repository: push.{first} already pushes to branch {push.branch!r} of {push.repository}; choose "
                "another repository or branch"
            )
