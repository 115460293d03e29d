"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact, write_json
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.work import WorkFolder
from snaketune.config.runs import Operation
from snaketune.config.specs import SftSpec
from snaketune.packing.shards import FORMAT_VERSION
from snaketune.training.launch import is_first_process, launch, run_worker, writing


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
            "pack": str(pack.manifest_path),
            "tokenizer": str(tokenizer.manifest_path),
            "work": str(work.folder),
        },
    )


def train(job: dict[str, Any]) -> None:
    """The launched process."""
    from snaketune.tokenization.chat import ChatTokenizer

    spec, operation = SftSpec.model_validate(job["spec"]), Operation.model_validate(job["operation"])
    work = WorkFolder(Path(job["work"]))
    pack = read_artifact(Path(job["pack"]), "shards")
    tokenizer = read_artifact(Path(job["tokenizer"]), "tokenizer")
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
    import torch
    from transformers import set_seed

    from snaketune.models.loading import load_base
    from snaketune.models.logprobs import token_losses
    from snaketune.packing.shards import PackedRows
    from snaketune.training.engine import prepare, save_trained
    from snaketune.training.trainer import PackedTrainer, fit, training_arguments

    class SftTrainer(PackedTrainer):
        def items(self, batch):
            return len(batch["targets"])

        def batch_loss(self, model, batch):
            return token_losses(model, batch).sum()

    rows = PackedRows(pack, "train")
    set_seed(spec.training.seed)
    engine = prepare(
        lambda weights_dtype: load_base(spec.base, chat, weights_dtype=weights_dtype, quantization=spec.quantization),
        rows,
        spec.training,
        spec.lora,
    )
    checkpoints = work.state / "checkpoints"
    trainer = SftTrainer(
        model=engine.model,
        args=training_arguments(spec.training, operation, checkpoints, len(rows)),
        rows=rows,
        kernel=engine.kernel,
        parameters=engine.parameters,
    )
    run = fit(trainer, checkpoints)
    if trainer.is_world_process_zero():
        save_trained(
            trainer,
            work.payload,
            spec.quantization,
            lambda: load_base(spec.base, chat, weights_dtype=torch.bfloat16),
        )
    return Outcome(
        counts={"rows": len(rows), "tokens_per_epoch": rows.tokens, "steps": trainer.state.global_step},
        about=engine.about(),
        libraries=("torch", "transformers", "peft", "accelerate"),
        run=run,
    )


if __name__ == "__main__":
    run_worker(train)
