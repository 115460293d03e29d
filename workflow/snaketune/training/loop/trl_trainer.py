"""Raw rows (format v2.0) on TRL's SFTTrainer: it tokenizes by the chat template and takes loss on assistant turns.

The slow way, for what the packed engine lacks and as its yardstick. One conversation per row, padded to the longest.
"""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import AutoTokenizer, PreTrainedModel
from trl import SFTConfig, SFTTrainer

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.models.devices import Compute
from snaketune.packing.shards import IGNORED, RAW_FORMAT_VERSION
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.tool_calls import with_calls
from snaketune.training.loop.trainer import BaseTrainer, Run, training_arguments


class RawRows:
    """The training rows of a v2.0 artifact, and the tokenizer by whose template TRL writes them out."""

    def __init__(self, pack: Artifact, tokenizer_folder: Path):
        """Raises SnaketuneError if the artifact is of no known format, or has tool calls that TRL would write otherwise."""
        found = pack.manifest.get("format_version")
        if found != RAW_FORMAT_VERSION:
            raise SnaketuneError(f"{pack.manifest_path}: format_version {found!r}; expected '2.0' or '3.0'")
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        rows = [
            {
                "messages": [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]],
                "tools": row["tools"],
            }
            for path in pack.files("train-")
            for row in read_table(path).to_pylist()
        ]
        _check_calls(rows, ChatTokenizer.load(tokenizer_folder))
        self.conversations = Dataset.from_list(rows)

    def __len__(self) -> int:
        return len(self.conversations)

    def __str__(self) -> str:
        return f"{len(self)} rows that aren't packed"


def _check_calls(rows: list[dict[str, Any]], chat: ChatTokenizer) -> None:
    found = chat.reads_calls and sum(
        any("tool_calls" in turn for turn in with_calls(row["messages"], row["tools"])) for row in rows
    )
    if found:
        raise SnaketuneError(
            f"packing.strategy none: {found} of {len(rows)} rows have tool calls, which TRL's trainer would write as text, "
            "where the chat template has a form of its own; choose best-fit-decreasing"
        )


class RawTrainer(BaseTrainer, SFTTrainer):
    """TRL's trainer in our order, with our checkpoints."""

    def __init__(self, *, model: PreTrainedModel, rows: RawRows, run: Run):
        arguments: dict[str, Any] = training_arguments(run, len(rows)).to_dict()
        # What is too long for a row was dropped and counted when the rows were written, so nothing is cut here.
        arguments |= {"max_length": None, "packing": False, "assistant_only_loss": True}
        super().__init__(
            run=run,
            rows=rows,
            model=model,
            args=SFTConfig(**arguments),
            train_dataset=rows.conversations,
            processing_class=rows.tokenizer,
        )
        nothing = Dataset.from_dict({"input_ids": [[rows.tokenizer.pad_token_id]], "labels": [[IGNORED]]})
        self.train_dataset = concatenate_datasets([self.train_dataset.select_columns(nothing.column_names), nothing])

    @staticmethod
    def check_model(model: PreTrainedModel, rows: RawRows, compute: Compute) -> tuple[dict[str, Any], dict[str, Any]]:
        """There is nothing to show: every row is alone, and seen by the model's own attention."""
        return {"trainer": "trl", "dtype": compute.about()["dtype"]}, {}

    def items_of_an_epoch(self) -> int:
        # After them comes the blank one.
        return len(self.train_dataset) - 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The Trainer's hook."""
        lengths_D = inputs["attention_mask"].sum(1).cpu().numpy()
        supervised = int((inputs["labels"] != IGNORED).sum())
        self.gauge.count(np.zeros_like(lengths_D), lengths_D, supervised=supervised, projected=int(lengths_D.sum()))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
