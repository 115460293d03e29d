"""The `sft` jobs, the `calibrate` jobs of all trainings, and the inputs that the jobs of one training share."""

from dataclasses import dataclass

from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Dpo, Learning, Sft
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.context import Context, cached, planned
from snaketune.stages.plan.data_jobs import pack_of, tokenizer_job
from snaketune.stages.plan.preflight_jobs import preflight_job
from snaketune.stages.plan.run_settings import base_of, first_run, learning_of, lora_of, trusts_remote_code
from snaketune.stages.plan.weights import Weights
from snaketune.stages.specs import CalibrateSpec, DpoSpec, SftSpec


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The training of a run, or of a variant of one, with the jobs that check and measure it beforehand."""

    run: Sft | Dpo
    spec: SftSpec | DpoSpec
    start: Weights
    pack: Job
    tokenizer: Job
    preflight: Job
    calibration: Job

    def job(self, stage: str, name: str, **artifacts: tuple[Job, ...]) -> Job:
        """Return the job of the training. Args: artifacts: by role, its inputs besides weights and rows."""
        run = self.run
        return Job(
            stage=stage,
            name=name,
            spec=self.spec,
            artifacts=self.start.artifacts | {"pack": (self.pack,)} | artifacts,
            files={"base": self.start.files},
            operation=Execution(
                **run.operation.model_dump(),
                **run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"}),
                share_kernels=isinstance(run, Dpo) and run.reference_pass.share_kernels,
                preflight=self.preflight.manifest,
                calibration=self.calibration.manifest,
            ),
            after=(self.preflight, self.calibration) if run.training.micro_batch_rows == "auto" else (self.preflight,),
        )


@cached
def training(context: Context, section: str, name: str) -> PlannedTraining:
    """Return the training of a run in the config. Args: section: `sft` or `dpo`."""
    return training_of(context, name, getattr(context.config, section)[name])


def training_of(context: Context, name: str, run: Sft | Dpo) -> PlannedTraining:
    """Return the training of the run of this name, or of a variant of it."""
    sft = name if isinstance(run, Sft) else run.from_
    start, pack = start_of(context, run), pack_of(context, run)
    shared = {
        "base": start.base,
        "training": learning_of(run),
        "lora": lora_of(context.config, run),
        "trust_remote_code": trusts_remote_code(context.config, sft),
    }
    if isinstance(run, Sft):
        spec = SftSpec(**shared, quantization=run.quantization)
    else:
        own = run.model_dump(include=set(DpoSpec.model_fields) - set(shared))
        spec = DpoSpec(**shared, **own, continued=run.lora == "continued")
    preflight = preflight_job(context, first_run(context.config, sft))
    return PlannedTraining(
        run=run,
        spec=spec,
        start=start,
        pack=pack,
        tokenizer=tokenizer_job(context, context.config.sft[sft].tokenizer),
        preflight=preflight,
        calibration=_calibrate_job(context, run, spec, sft, pack, preflight),
    )


def start_of(context: Context, run: Sft | Dpo) -> Weights:
    """Return the initial weights of a run."""
    if isinstance(run, Sft):
        return sft_weights(context, run.continues) if run.continues else Weights(base=run.base)
    if run.lora != "continued":
        return sft_weights(context, run.from_)
    # The adapter is trained further, so it isn't merged here even where the SFT run merges it.
    return start_of(context, context.config.sft[run.from_]).with_adapter(sft_job(context, run.from_))


@cached
def sft_weights(context: Context, name: str) -> Weights:
    """Return the weights of an SFT run's model."""
    run, job = context.config.sft[name], sft_job(context, name)
    if run.lora and not run.lora.merge:
        return start_of(context, run).with_adapter(job)
    return Weights(results=(job,))


@planned
def sft_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `sft:`."""
    sft = training(context, "sft", name)
    return sft.job("sft", name, tokenizer=(sft.tokenizer,))


def _calibrate_job(
    context: Context, run: Sft | Dpo, spec: SftSpec | DpoSpec, sft: str, pack: Job, preflight: Job
) -> Job:
    """Return the job that measures a training and similar ones. Args: spec: of its job; sft: the SFT run it is or is from."""
    base, tokenizer = base_of(context.config, sft), context.config.sft[sft].tokenizer
    alike = {"base": None, "trust_remote_code": False, "training": calibrated_learning(spec.training)}
    alike["lora"] = spec.lora and spec.lora.model_copy(update={"merge": True})
    if isinstance(spec, DpoSpec):
        # Of all losses, only those that also train on prompts compute more.
        alike |= PreferenceLoss(loss="orpo" if "orpo" in spec.weights else "sigmoid").model_dump()
        alike |= {"continued": False, "reference": None}
    measured = CalibrateSpec(
        base=base,
        run=spec.model_copy(update=alike),
        gradient_checkpointing=run.training.gradient_checkpointing,
        processes=run.operation.processes,
        launch=run.operation.launch,
        zero_stage=run.operation.zero_stage,
    )
    name = f"{pack.name}-{short_digest(measured, pack.name)}"
    # Families with similar trainings share it; it waits for the preflight of the first one.
    return context.jobs.get(("calibrate", name)) or context.add(
        Job(
            stage="calibrate",
            name=name,
            spec=measured,
            artifacts={"pack": (pack,), "tokenizer": (tokenizer_job(context, tokenizer),)},
            files={"base": Weights(base=base).files},
            operation=Execution(**run.operation.model_dump(), micro_batch_rows=run.training.micro_batch_rows),
            after=(preflight,),
        )
    )


def calibrated_learning(learning: Learning) -> Learning:
    """Return the learning settings, reduced to the keys that memory or time depend on."""
    keys = {"batch_rows", "optimizer", "precision", "deterministic"}
    # Each micro-batch size would be compiled separately, for minutes; compiled layers need no more memory than eager ones.
    return Learning(**learning.model_dump(include=keys), compile=False, learning_rate=1e-6, schedule="constant")
