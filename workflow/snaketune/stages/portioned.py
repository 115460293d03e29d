"""Of a run's config, what shapes the weights; how it runs; and what of it speed and memory follow from."""

from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import Execution
from snaketune.config.runs import Dpo, Learning, Lora, Pretrained, Scratch, Sft
from snaketune.stages.jobs import Job
from snaketune.stages.specs import CalibrateSpec, DpoSpec, Kind, PreflightRun, SftSpec, TrialSpec


def learning_of(run: Sft | Dpo) -> Learning:
    """Of a run's training, what shapes the weights."""
    return Learning(**run.training.model_dump(include=set(Learning.model_fields)))


def execution_of(run: Sft | Dpo, looked_at: Job, calibrated: Job) -> Execution:
    """How a run's training runs."""
    portions = run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"})
    shared = {"share_kernels": run.reference_pass.share_kernels} if isinstance(run, Dpo) else {}
    before = {"preflight": looked_at.manifest, "calibration": calibrated.manifest}
    return Execution(**run.operation.model_dump(), **portions, **shared, **before)


def waits_for(run: Sft | Dpo, looked_at: Job, calibrated: Job) -> tuple[Job, ...]:
    """The jobs that say whether it can run, and how."""
    return (looked_at, calibrated) if run.training.micro_batch_rows == "auto" else (looked_at,)


def kind_of_pairs(run: Dpo) -> Kind:
    """What a preference run's rows are."""
    return "unpaired" if run.unpaired else "preference"


def to_look_at(key: str, run: Sft | Dpo, lora: Lora | None, kind: Kind, pack: int) -> PreflightRun:
    """What of a run can be looked at before anything is trained.

    Args:
        key: where it is in the config.
        lora: its adapter, one that it goes on with too.
        pack: which of those that are looked at it trains on.
    """
    # What no finding follows from says nothing here, so that runs that differ in it are one.
    counts = {"epochs", "batch_rows", "learning_rate", "optimizer", "precision", "save_dtype"}
    learning = Learning(**run.training.model_dump(include=counts), schedule="constant")
    return PreflightRun(
        key=key,
        kind=kind,
        run=SftSpec(base=None, training=learning, lora=lora, quantization=run.quantization),
        reference=run.reference if isinstance(run, Dpo) else None,
        pack=pack,
        micro_batch_rows=1 if run.training.micro_batch_rows == "auto" else run.training.micro_batch_rows,
        gradient_checkpointing=run.training.gradient_checkpointing,
        **run.operation.model_dump(include={"gpus", "nodes", "launch", "zero_stage", "allow_cpu"}),
    )


def tried(run: Sft | Dpo, spec: SftSpec | DpoSpec, **told: int) -> TrialSpec:
    """What a short training of a run is told. Args: told: steps, warmup_steps, repeat and profile."""
    return TrialSpec(
        run=spec,
        **run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"}),
        **run.operation.model_dump(include={"launch", "zero_stage", "load_in_memory"}),
        processes=run.operation.processes,
        **told,
    )


def sized(run: Sft | Dpo, spec: SftSpec | DpoSpec, base: Pretrained | Scratch) -> CalibrateSpec:
    """What is told the job that measures trainings like this one; the same for all that take the same memory and time.

    Args:
        base: whose shape the model has that it starts from.
    """
    alike = {"base": None, "trust_remote_code": False, "training": sized_learning(spec.training)}
    alike["lora"] = spec.lora and spec.lora.model_copy(update={"merge": True})
    if isinstance(spec, DpoSpec):
        # Of all losses, those that learn prompts too compute more.
        alike |= PreferenceLoss(loss="orpo" if "orpo" in spec.weights else "sigmoid").model_dump()
        alike |= {"continued": False, "reference": None}
    return CalibrateSpec(
        base=base,
        run=spec.model_copy(update=alike),
        gradient_checkpointing=run.training.gradient_checkpointing,
        processes=run.operation.processes,
        launch=run.operation.launch,
        zero_stage=run.operation.zero_stage,
    )


def sized_learning(learning: Learning) -> Learning:
    """A learning that says no more than what takes memory or time."""
    kept = {"batch_rows", "optimizer", "precision", "deterministic"}
    # Each micro-batch would be compiled anew, for minutes; compiled layers need no more memory than eager ones.
    return Learning(**learning.model_dump(include=kept), compile=False, learning_rate=1e-6, schedule="constant")
