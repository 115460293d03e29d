"""Raw rows (format v2.0) on TRL's SFTTrainer: it tokenizes by the chat template and takes loss on assistant turns.

The slow way, for what the packed engine lacks and as its yardstick. One conversation per row, padded to the longest.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, set_seed

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.tables import read_table
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.models.devices import computing, weights_dtype
from snaketune.models.loading import add_lora, load_base, parameter_count
from snaketune.packing.shards import IGNORED, RAW_FORMAT_VERSION
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.checkpoints import SafeCheckpoints
from snaketune.training.engine import save_trained
from snaketune.training.trainer import OwnOrder, fit, training_arguments


def train_raw(
    spec: SftSpec, operation: Operation, work: WorkFolder, pack: Artifact, tokenizer_folder: Path, chat: ChatTokenizer
) -> Outcome:
    """Train on a v2.0 artifact and fill `work.payload` with the model.

    Raises:
        SnaketuneError: the artifact is of no format that is known.
    """
    from datasets import Dataset, concatenate_datasets
    from trl import SFTConfig, SFTTrainer

    found = pack.manifest.get("format_version")
    if found != RAW_FORMAT_VERSION:
        raise SnaketuneError(f"{pack.manifest_path}: format_version {found!r}; expected '2.0' or '3.0'")
    set_seed(spec.training.seed)
    _, dtype, _ = computing(spec.training.precision)
    rows = Dataset.from_list(
        [
            {
                "messages": [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]],
                "tools": row["tools"],
            }
            for path in pack.files("train-")
            for row in read_table(path).to_pylist()
        ]
    )
    model = load_base(
        spec.base,
        chat,
        weights_dtype=weights_dtype(dtype, frozen=spec.lora is not None),
        quantization=spec.quantization,
    )
    parameters = parameter_count(model)
    if spec.lora:
        model = add_lora(model, spec.lora)
    checkpoints = work.state / "checkpoints"
    arguments: dict[str, Any] = training_arguments(spec.training, operation, checkpoints, len(rows)).to_dict()
    # What is too long for a row was dropped and counted when the rows were written, so nothing is cut here.
    arguments |= {"max_length": None, "packing": False, "assistant_only_loss": True}

    class RawTrainer(OwnOrder, SafeCheckpoints, SFTTrainer):
        def items_of_an_epoch(self):
            # After them comes the blank one.
            return len(self.train_dataset) - 1

    trainer = RawTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(tokenizer_folder),
    )
    nothing = Dataset.from_dict({"input_ids": [[chat.pad_id]], "labels": [[IGNORED]]})
    trainer.train_dataset = concatenate_datasets([trainer.train_dataset.select_columns(nothing.column_names), nothing])
    run = fit(trainer, checkpoints)
    if trainer.is_world_process_zero():
        save_trained(trainer, work.payload, spec, lambda: load_base(spec.base, chat, weights_dtype=torch.bfloat16))
    return Outcome(
        counts={"rows": len(rows), "steps": trainer.state.global_step},
        about={"trainer": "trl", "parameters": parameters, "dtype": str(dtype).removeprefix("torch.")},
        run=run,
    )
