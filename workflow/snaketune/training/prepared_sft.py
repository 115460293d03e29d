"""Preparation of an SFT training: its rows, in either format, and its initial weights."""

from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.distillation import Distillation
from snaketune.engine.packing.shards import FORMAT_VERSIONS
from snaketune.engine.sft import SftTrainer
from snaketune.models.adapter_stack import AdapterStack
from snaketune.packing.reader import open_rows, sources_of
from snaketune.stages.specs import SftSpec
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.reference.teacher_file import open_teacher


def prepare_sft(
    run: TrainingRun,
    pack: Artifact,
    tokenizer: Artifact,
    results: tuple[Artifact, ...] = (),
    teacher: Artifact | None = None,
) -> PreparedTraining:
    """Prepare a training on rows of either format, from `results` if there are any, else from the spec's base. Args: teacher: a
    teacher's tokens for the rows, if the spec has `distill`."""
    spec = run.spec
    initial = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer.folder, trust_remote_code=spec.trust_remote_code
    )
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = open_rows(pack, "train", run.operation.load_in_memory)
        held_out = open_rows(pack, "held_out", run.operation.load_in_memory, columns=sources_of)
        if teacher:
            for split, of_split in (("train", rows), ("held_out", held_out)):
                of_split.teacher = open_teacher(teacher, pack, split, of_split, spec.distill.temperature)
        prepared = PreparedTraining(
            trainer_class=SftTrainer, rows=rows, run=run, initial=initial, held_out=held_out, loss=sft_loss(spec)
        )
        return prepared.with_kernel()
    # TRL takes a second to import.
    from snaketune.training.trl_trainer import RawRows, RawTrainer

    rows = RawRows(pack, tokenizer.folder)
    return PreparedTraining(trainer_class=RawTrainer, rows=rows, run=run, initial=initial, loss=sft_loss(spec))


def sft_loss(spec: SftSpec) -> dict[str, Any]:
    """The arguments of an SFT trainer that define its loss."""
    taught = {"distillation": Distillation(**spec.distill.model_dump())} if spec.distill else {}
    return {"loss": spec.loss} | taught
