"""Trainings before their models are loaded: what they are, how they run, on which rows, from which weights."""

from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from transformers import PretrainedConfig

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.fsdp import world_size
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.packing_support import choose_kernel, with_supported_kernel
from snaketune.engine.model.passed_test import PassedTest
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import FORMAT_VERSIONS
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, check_trained_on
from snaketune.packing.reader import open_rows, sources_of
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.tracking.curves import TrackedRun
from snaketune.training.pair_rows import pair_rows
from snaketune.training.passed_tests import record_of_test
from snaketune.training.reference.logps_table import check_ref_logps

OFFLOADING_DEVICES = ("cuda", "xpu")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training is, and how it runs.

    Attributes:
        operation: with every `auto` resolved.
        adapter: folder of the adapter that is trained further; None if there is none.
    """

    spec: SftSpec | DpoSpec
    operation: Execution
    work: WorkFolder
    compute: Compute
    tracked: TrackedRun | None = None
    adapter: Path | None = None

    @classmethod
    def of(
        cls, spec: SftSpec | DpoSpec, operation: Execution, work: WorkFolder, tracked: TrackedRun | None = None
    ) -> Self:
        """Return a run on the device and precision that this process has."""
        compute = resolve_compute(spec.training.precision, training=True)
        return cls(spec=spec, operation=operation, work=work, compute=compute, tracked=tracked)

    @property
    def offloads(self) -> bool:
        """Whether activations are moved to host memory: from devices with memory of their own, if the config asks for it."""
        return self.operation.activation_offloading and self.compute.device.type in OFFLOADING_DEVICES

    @property
    def in_shards(self) -> bool:
        """Whether the model is sharded over the processes by FSDP."""
        return self.operation.launch == "fsdp" and world_size() > 1

    @property
    def record(self) -> PassedTest | None:
        """The record of the self-test with the kernel of `compute`; see `passed_tests.record_of_test`."""
        return record_of_test(self.spec, self.work, self.compute)

    @property
    def has_passed(self) -> bool:
        """Whether an earlier training has passed that self-test, so that its kernel needs no other check."""
        return self.record is not None and self.record.share() is not None

    @property
    def checkpoints(self) -> Path:
        return self.work.state / "checkpoints"

    @property
    def best(self) -> Path:
        """The folder of the weights of the best measurements."""
        return self.work.state / "best"


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A training with its rows and its initial model, before that is loaded; all that `pipeline` needs.

    Attributes:
        rows: training rows, as the trainer takes them; `str(rows)` describes them in the log.
        held_out: rows that may be measured while the training runs; None if it can't measure any.
    """

    trainer_class: type[TrainingFeatures]
    rows: Sized
    run: TrainingRun
    initial: AdapterStack
    held_out: PackedRows | None = None

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """The config of the initial model; None for a model from scratch."""
        return self.initial.config()

    @property
    def any_config(self) -> PretrainedConfig | None:
        """The config of the initial model, also if that is made from scratch."""
        return self.config or self.initial.new_config()

    def with_kernel(self) -> Self:
        """Return the training with the kernel for its model and packed rows; see `packing_support.choose_kernel`."""
        if self.run.has_passed:
            return self
        longest, prefixes, dropout = self.rows.longest[0], self.rows.has_prefixes, self.trainer_class.drops_out
        compute = choose_kernel(self.run.compute, self.any_config, longest, prefixes=prefixes, dropout=dropout)
        return replace(self, run=replace(self.run, compute=compute))


def prepare_sft(
    run: TrainingRun, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()
) -> PreparedTraining:
    """Prepare a training on rows of either format, from `results` if there are any, else from the spec's base."""
    spec = run.spec
    initial = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer.folder, trust_remote_code=spec.trust_remote_code
    )
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = open_rows(pack, "train", run.operation.load_in_memory)
        held_out = open_rows(pack, "held_out", run.operation.load_in_memory, columns=sources_of)
        prepared = PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=initial, held_out=held_out)
        return prepared.with_kernel()
    # TRL takes a second to import.
    from snaketune.training.trl_trainer import RawRows, RawTrainer

    return PreparedTraining(trainer_class=RawTrainer, rows=RawRows(pack, tokenizer.folder), run=run, initial=initial)


def prepare_dpo(
    run: TrainingRun, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None
) -> PreparedTraining:
    """Prepare a training on packed pairs, whose initial weights are also the reference, unless the spec names another.

    Args:
        results: the SFT result and, if it is an adapter alone, its base layers, from the top down.
        ref_logps: the reference log-probabilities; required if the loss needs a reference.
    Raises:
        SnaketuneError: the log-probabilities are missing, or don't belong to this run's reference.
    """
    spec, tokenizer = run.spec, results[0].folder
    base_layers = results[1:] if spec.continued else results
    initial = AdapterStack(
        results=base_layers, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code
    )
    if not run.has_passed:
        run = replace(run, compute=with_supported_kernel(run.compute, initial.config(), dropout=DpoTrainer.drops_out))
    # Before the rows are read, which are those of the pairs that the log-probabilities are for.
    if ref_logps:
        share_kernels = run.operation.share_kernels
        check_ref_logps(ref_logps, spec, model=results, pack=pack, compute=run.compute, share_kernels=share_kernels)
    elif spec.needs_reference:
        raise SnaketuneError(
            f"loss {spec.loss} needs reference log-probabilities, and the job has none; add a ref_logps result to its inputs"
        )
    if spec.continued:
        # The SFT result's adapter is attached to its base layers and trained further.
        check_trained_on(results[0], base_layers)
        run = replace(run, adapter=tokenizer / ADAPTER)
    rows = pair_rows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha)
    held_out = pair_rows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha, split="held_out")
    prepared = PreparedTraining(trainer_class=DpoTrainer, rows=rows, run=run, initial=initial, held_out=held_out)
    return prepared.with_kernel()
