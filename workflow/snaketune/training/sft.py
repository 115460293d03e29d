"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.runs import Operation
from snaketune.packing.shards import FORMAT_VERSION
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.launch import is_first_process, launch, passed, read_passed, run_worker, writing


def build(
    spec: SftSpec, work: WorkFolder, *, operation: Operation, pack: Artifact, tokenizer: Artifact, base: list[Path]
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer."""
    return launch(
        "snaketune.training.sft",
        work,
        {
            "spec": spec.model_dump(mode="json"),
            "operation": operation.model_dump(mode="json"),
            **passed(pack=pack, tokenizer=tokenizer),
            "work": str(work.folder),
        },
    )


def train(job: dict[str, Any]) -> None:
    """The launched process."""
    from snaketune.tokenization.chat import ChatTokenizer

    spec, operation = SftSpec.model_validate(job["spec"]), Operation.model_validate(job["operation"])
    work = WorkFolder(Path(job["work"]))
    pack = read_passed(job, "pack", "shards")
    tokenizer = read_passed(job, "tokenizer", "tokenizer")
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    with writing(work):
        if pack.manifest["format_version"] == FORMAT_VERSION:
            outcome = _train_packed(spec, operation, work, pack, chat)
        else:
            from snaketune.training.raw import train_raw

            outcome = train_raw(spec, operation, work, pack, tokenizer.folder, chat)
        if is_first_process():
            for path in tokenizer.folder.iterdir():
                if path.is_file() and not path.name.startswith("."):
                    shutil.copyfile(path, work.payload / path.name)
            write_json(work.state / "outcome.json", dataclasses.asdict(outcome))


def _train_packed(spec: SftSpec, operation: Operation, work: WorkFolder, pack: Artifact, chat) -> Outcome:
    from snaketune.models.loading import load_base, read_config
    from snaketune.models.logprobs import token_losses
    from snaketune.packing.reader import PackedRows
    from snaketune.training.engine import train_packed
    from snaketune.training.trainer import PackedTrainer

    class SftTrainer(PackedTrainer):
        def items(self, batch):
            return len(batch["targets"])

        def batch_loss(self, model, batch):
            return token_losses(model, batch).sum()

    def load(weights_dtype, quantization):
        return load_base(spec.base, chat, weights_dtype=weights_dtype, quantization=quantization)

    rows = PackedRows(pack, "train", operation.load_in_memory)
    return train_packed(SftTrainer, rows, spec, operation, work, load, read_config(spec.base))


if __name__ == "__main__":
    run_worker(train)
