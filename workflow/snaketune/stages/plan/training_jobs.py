"""The `sft` jobs, and the `preflight` and `calibrate` jobs that check and measure all trainings beforehand."""

from collections.abc import Iterator
from typing import Any, Literal

from snaketune.config.base_models import Pretrained
from snaketune.config.distillation import DistillLoss
from snaketune.config.evaluations import Evaluation
from snaketune.config.held_out import snapshot_name
from snaketune.config.lineage import waves
from snaketune.config.losses import PreferenceLoss
from snaketune.config.named_entries import first_run
from snaketune.config.operation import Execution
from snaketune.config.reward_runs import Reward, Run
from snaketune.config.training_runs import Dpo, Learning, Sft, Training, snapshots_of
from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.data_jobs import (
    Context,
    Weights,
    base_of,
    cached,
    corpus_job,
    corpus_of,
    kind_of,
    lora_of,
    pack_name,
    pack_of,
    sft_below,
    tokenizer_job,
    trusts_remote_code,
)
from snaketune.stages.specs import (
    CalibrateSpec,
    DpoSpec,
    EarlierTraining,
    PreflightEvaluation,
    PreflightRun,
    PreflightSpec,
    RewardSpec,
    SftSpec,
    TrainingSpec,
    canonical,
    spec_from,
)

# The keys of `training` that a preflight finding can depend on; runs that differ only in others are checked once.
CHECKED_LEARNING = {
    *("epochs", "batch_rows", "learning_rate", "optimizer", "trainable", "precision", "save_dtype", "keep", "average")
}
# Those that the memory or time of a step depend on.
MEASURED_LEARNING = {"batch_rows", "optimizer", "trainable", "average", "precision", "deterministic"}


@cached
def sft_job(context: Context, name: str) -> Job:
    # It plans teachers by means of this module.
    from snaketune.stages.plan.teacher_jobs import teacher_job

    run = context.config.sft[name]
    tokenizer = tokenizer_job(context, run.tokenizer)
    teacher = (teacher_job(context, run),) if run.distill else ()
    return context.add(training_job(context, "sft", name, name, run, tokenizer=(tokenizer,), teacher=teacher))


@cached
def reward_job(context: Context, name: str) -> Job:
    return context.add(training_job(context, "reward", name, name, context.config.reward[name]))


# The spec of a run's training.
SPECS: dict[type[Run], type[TrainingSpec]] = {Sft: SftSpec, Dpo: DpoSpec, Reward: RewardSpec}


def training_job(context: Context, stage: str, name: str, of: str, run: Run, **artifacts: tuple[Job, ...]) -> Job:
    """A job that trains the run called `of`, or a variant of it, after planning the jobs that check and measure it.
    Args: artifacts: by role, its inputs besides weights and rows."""
    # A race plans trainings, those before it.
    from snaketune.stages.plan.model_jobs import race_before

    config, training, sft = context.config, run.training, sft_below(context.config, of, run)
    start, pack = start_of(context, run), pack_of(context, run)
    is_dpo = isinstance(run, Dpo)
    spec = spec_from(
        SPECS[type(run)],
        run,
        base=start.base,
        training=_learning(training),
        lora=lora_of(config, run),
        trust_remote_code=trusts_remote_code(config, sft),
        **({"continued": run.lora == "continued", "reference": reference_of(run)} if is_dpo else {}),
        **({"distill": spec_from(DistillLoss, run.distill)} if isinstance(run, Sft) and run.distill else {}),
    )
    preflight = preflight_job(context, first_run(config, sft), run_wave(context, run))
    calibration = calibrate_job(context, of, run, spec)
    # Timings measure a few steps from the start.
    snapshots = _snapshots_before(config, stage, name) if stage in ("sft", "dpo", "reward") else {}
    # Snapshots of other runs are planned before their run, as the config lists them.
    before = [
        sft_job(context, snapshot) if stage == "sft" else context.jobs[stage, snapshot] for snapshot in snapshots
    ][-1:]
    race = race_before(context, stage, name) if stage in ("sft", "dpo") else None
    return Job(
        stage=stage,
        name=name,
        spec=spec,
        artifacts=start.artifacts | {"pack": (pack,)} | artifacts,
        files={"base": start.files},
        operation=spec_from(
            Execution,
            run.operation,
            training,
            share_kernels=is_dpo and run.reference_pass.share_kernels,
            preflight=preflight.manifest,
            calibration=calibration.manifest,
            snapshots=tuple(snapshots.values()),
            race=race.manifest if race else "",
        ),
        after=(
            preflight,
            *([calibration] if training.micro_batch_rows == "auto" else []),
            *before,
            *([race] if race else []),
        ),
    )


def reference_of(run: Dpo) -> Pretrained | Literal["result"] | None:
    """The reference of a run, as its spec names it."""
    return "result" if isinstance(run.reference, str) else run.reference


def _learning(training: Training) -> Learning:
    """The settings that shape the weights; with those of measurements if these decide which weights are kept."""
    # The answers to sample prompts never decide.
    decides = training.evaluate.model_copy(update={"samples": 0}) if training.selects and training.evaluate else False
    return spec_from(Learning, training, evaluate=decides)


def _snapshots_before(config: Workflow, stage: str, name: str) -> dict[str, float]:
    """The snapshots that a run of this name resumes from, in the order of the shares where they end."""
    runs, whole = getattr(config, stage), name.partition("@")[0]
    shares = snapshots_of(runs[whole]) if whole in runs else ()
    end = runs[name].training.until or 1.0
    return {snapshot_name(whole, share): share for share in shares if share < end}


def start_of(context: Context, run: Run) -> Weights:
    if not run.start:
        return Weights(base=run.base)  # pyrefly: ignore[missing-attribute]
    before, job = context.config.run_of(run.start), run_job(context, run.start)
    if run.lora != "continued":
        return weights_of(context, before, job)
    # The adapter is trained further, so it isn't merged here even where the run before merges it.
    return _below_adapter(context, before).with_adapter(job)


def run_job(context: Context, model: str) -> Job:
    """The job of `sft:NAME` or `dpo:NAME`."""
    # Its reference is planned by means of this module.
    from snaketune.stages.plan.dpo_jobs import dpo_job

    section, _, name = model.partition(":")
    return dpo_job(context, name) if section == "dpo" else sft_job(context, name)


def weights_of(context: Context, run: Run, job: Job) -> Weights:
    """The weights of the model that a run's job makes."""
    lora = lora_of(context.config, run)
    if lora is None or lora.merge:
        return Weights(results=(job,))
    return _below_adapter(context, run).with_adapter(job)


def _below_adapter(context: Context, run: Run) -> Weights:
    """The weights that a run's adapter is trained for; a continued one replaces those of the runs before."""
    while run.start and run.lora == "continued":
        run = context.config.run_of(run.start)
    return start_of(context, run)


def calibrate_job(context: Context, name: str, run: Run, spec: TrainingSpec) -> Job:
    """The job that measures the training of a run of this name, and similar ones. Args: spec: of the training."""
    config, sft = context.config, sft_below(context.config, name, run)
    pack = pack_of(context, run)
    base = base_of(config, sft)
    measured = spec_from(CalibrateSpec, run.operation, run.training, base=base, run=calibrated_spec(spec))
    job_name = f"{pack.name}-{short_digest(measured, pack.name)}"
    # Families with similar trainings share it; it waits for the preflight of the first one.
    return context.jobs.get(("calibrate", job_name)) or context.plan(
        "calibrate",
        job_name,
        measured,
        {"pack": (pack,), "tokenizer": (tokenizer_job(context, config.tokenizer_of(run)),)},
        files={"base": Weights(base=base).files},
        operation=spec_from(
            Execution,
            run.operation,
            calibrated_epochs=_waiting_epochs(context).get(pack.name, 0.0),
        ),
        after=(preflight_job(context, first_run(config, sft), run_wave(context, run)),),
    )


@cached
def _waiting_epochs(context: Context) -> dict[str, float]:
    """By pack, the epochs of the longest training on it that waits for a calibration."""
    longest: dict[str, float] = {}
    for run in (*context.config.sft.values(), *context.config.dpo.values(), *context.config.reward.values()):
        if run.training.micro_batch_rows == "auto":
            pack = pack_name(context.config, run)
            longest[pack] = max(longest.get(pack, 0.0), run.training.epochs)
    return longest


def calibrated_spec(spec: TrainingSpec) -> TrainingSpec:
    """The spec of a training, reduced to what memory or time depend on."""
    alike: dict[str, Any] = {"base": None, "trust_remote_code": False, "training": calibrated_learning(spec.training)}
    same = {"merge": True, "init_lora_weights": True, "loraplus_lr_ratio": None}
    alike["lora"] = spec.lora and spec.lora.model_copy(update=same)
    if isinstance(spec, SftSpec):
        # The rows of a measurement have no teacher.
        alike["distill"] = None
    if isinstance(spec, DpoSpec):
        # Of all losses, only those that also train on prompts compute more.
        alike |= PreferenceLoss(loss="orpo" if "orpo" in spec.weights else "sigmoid").model_dump()
        alike |= {"continued": False, "reference": None}
    if isinstance(spec, RewardSpec):
        alike |= {"center_rewards_coefficient": None, "margin": False}
    return spec.model_copy(update=alike)


def calibrated_learning(learning: Learning) -> Learning:
    """The learning settings, reduced to the keys that memory or time depend on."""
    kept = learning.model_dump(include=MEASURED_LEARNING)
    # Each micro-batch size would be compiled separately, for minutes; compiled layers need no more memory than eager ones.
    return Learning(**kept, compile=False, learning_rate=1e-6, schedule="constant")


def run_wave(context: Context, run: Run) -> int:
    """How often models are sampled before a run can be trained; runs of a wave are checked together."""
    entries = [f"corpora.{run.corpus}", f"tokenizers.{context.config.tokenizer_of(run)}"]
    entries += [run.start.replace(":", ".", 1)] if run.start else []
    return max(_waves(context)[entry] for entry in entries)


@cached
def _waves(context: Context) -> dict[str, int]:
    return waves(context.config)


def family_of(context: Context, name: str, run: Run) -> str:
    """The SFT run at the start of the chain that a run of this name ends."""
    return first_run(context.config, sft_below(context.config, name, run))


@cached
def preflight_job(context: Context, family: str, wave: int) -> Job:
    """The job that checks the family of an SFT run: that run, those that continue it, and the runs from them on pairs. Those on
    responses of a model of the family are checked when these are there, in a job for each wave."""
    config = context.config
    runs: dict[str, Run] = {
        f"{section}.{name}": run
        for section, entries in (("sft", config.sft), ("dpo", config.dpo), ("reward", config.reward))
        for name, run in entries.items()
        if family_of(context, name, run) == family and run_wave(context, run) == wave
    }
    packs_of_runs = {key: pack_of(context, run) for key, run in runs.items()}
    for key, run in list(runs.items()):
        packs_of_runs |= {f"{key} {n}": pack_of(context, one) for n, one in enumerate(_continued_by(config, run))}
    # Sorted, so that the order of the config doesn't matter.
    packs = tuple({packs_of_runs[key].manifest: packs_of_runs[key] for key in sorted(packs_of_runs)}.values())
    checked: dict[str, PreflightRun] = {}
    for key, run in sorted(runs.items()):
        earlier = tuple(
            EarlierTraining(
                lora=lora_of(config, before),
                trainable=before.training.trainable,
                pack=packs.index(pack_of(context, before)),
            )
            for before in _continued_by(config, run)
        )
        spec = _run_spec(config, key, run, packs.index(packs_of_runs[key]), earlier)
        checked.setdefault(canonical(spec.model_copy(update={"key": ""})), spec)
    models = {key.replace(".", ":", 1) for key in runs} | {f"base:{key[4:]}" for key in runs if key.startswith("sft.")}
    # Later ones are of models that this job waits for.
    there = {corpus for corpus in config.corpora if _waves(context)[f"corpora.{corpus}"] <= wave}
    evaluations = tuple(
        _evaluation_spec(config, name, evaluation, evaluated, there)
        for name, evaluation in sorted(config.eval.items())
        if (evaluated := models.intersection(evaluation.every_model(context.variants)))
    )
    evaluated_corpora = sorted({corpus for evaluation in evaluations for corpus in evaluation.corpora})
    base = base_of(config, family)
    return context.plan(
        "preflight",
        f"{family}-{wave}" if wave else family,
        PreflightSpec(base=base, runs=tuple(checked.values()), evaluations=evaluations),
        {
            "tokenizer": (tokenizer_job(context, config.sft[family].tokenizer),),
            "packs": packs,
            "corpora": tuple(map(corpus_of, packs)),
            "evaluated": tuple(corpus_job(context, corpus) for corpus in evaluated_corpora),
        },
        files={"base": Weights(base=base).files},
        operation=Execution(gpus=max(min(run.operation.gpus, 1) for run in runs.values())),
    )


def _continued_by(config: Workflow, run: Run) -> Iterator[Sft | Dpo]:
    """Yield the runs that a run continues, the last first."""
    while run.start:
        run = config.run_of(run.start)
        yield run


def _run_spec(config: Workflow, key: str, run: Run, pack: int, earlier: tuple[EarlierTraining, ...]) -> PreflightRun:
    """The settings of a run that preflight checks. Args: key: of the config; pack: its index in the job's packs."""
    learning = Learning(**run.training.model_dump(include=CHECKED_LEARNING), schedule="constant")
    loss = run.loss if isinstance(run, Sft) else "nll"
    # Whether there is a teacher, not how it takes part.
    distill = DistillLoss() if isinstance(run, Sft) and run.distill else None
    return spec_from(
        PreflightRun,
        run.training,
        run.operation,
        key=key,
        kind=kind_of(run),
        run=spec_from(
            SftSpec, run, base=None, training=learning, lora=lora_of(config, run), loss=loss, distill=distill
        ),
        reference=run.reference if isinstance(run, Dpo) and isinstance(run.reference, Pretrained) else None,
        pack=pack,
        earlier=earlier,
        needs_reference=isinstance(run, Dpo) and run.needs_reference,
        rewards=isinstance(run, Reward),
        raced=run.race is not None,
        micro_batch_rows=1 if run.training.micro_batch_rows == "auto" else run.training.micro_batch_rows,
    )


def _evaluation_spec(
    config: Workflow, name: str, evaluation: Evaluation, models: set[str], there: set[str]
) -> PreflightEvaluation:
    """What of an evaluation of these models can be checked before training. Args: there: the corpora that are there then."""
    # Documents have no questions.
    chats = tuple(
        corpus for corpus in evaluation.conversations if config.corpora[corpus].kind != "text" and corpus in there
    )
    return PreflightEvaluation(
        key=f"eval.{name}",
        corpora=tuple(corpus for corpus in (*evaluation.conversations, *evaluation.preferences) if corpus in there),
        trained_on=tuple(sorted({corpus for model in models for corpus in _trained_on(config, *model.split(":"))})),
        exact_match=chats if "exact_match" in evaluation.model_fields_set else (),
    )


def _trained_on(config: Workflow, kind: str, name: str) -> set[str]:
    """The corpora that a model was trained on, including all trainings that it continues."""
    if kind == "merge":
        return set().union(*(_trained_on(config, *model.split(":")) for model in config.merge[name].models))
    if kind in ("dpo", "reward"):
        run = getattr(config, kind)[name]
        return {run.corpus} | _trained_on(config, *run.start.split(":"))
    run = config.sft[name]
    previous = _trained_on(config, "sft", run.continues) if run.continues else set()
    return previous | ({run.corpus} if kind == "sft" else set())
