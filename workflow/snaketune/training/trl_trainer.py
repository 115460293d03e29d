"""Training on unpacked text rows (manifest format 2.0) with TRL's SFTTrainer, which applies the chat template and takes loss on
assistant turns. Each row is one conversation, padded to the longest of its batch. It is slower than training on packed rows;
it serves features that the packed engine lacks, and as a reference in tests.
"""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import AutoTokenizer, PreTrainedModel, TrainingArguments
from trl import SFTConfig, SFTTrainer

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.features import Options, TrainingFeatures
from snaketune.engine.model.batches import Batch
from snaketune.engine.model.devices import Compute
from snaketune.engine.packing.shards import IGNORED, RAW_FORMAT_VERSION
from snaketune.errors import SnaketuneError, first_line
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.tool_calls import with_calls


class RawRows:
    """The training rows of a v2.0 artifact, and the tokenizer whose chat template TRL applies."""

    # Rows with weights were refused when the rows were written.
    weighted = False

    def __init__(self, pack: Artifact, tokenizer_folder: Path):
        """Raise SnaketuneError if the format is unknown, or if rows have tool calls that TRL would render differently."""
        version = pack.manifest.get("format_version")
        if version != RAW_FORMAT_VERSION:
            raise SnaketuneError(f"{pack.manifest_path}: format_version {version!r}; expected '2.0' or '3.0'")
        self.order: str = pack.manifest.get("order", "shuffled")
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        rows = [
            {"messages": [{key: turn[key] for key in ("role", "content")} for turn in row["messages"]]}
            | {"tools": row["tools"]}
            for path in pack.files("train-")
            for row in read_table(path).to_pylist()
        ]
        if ChatTokenizer.load(tokenizer_folder).template.reads_calls:
            conversations = (with_calls(row["messages"], row["tools"]) for row in rows)
            if affected := sum(any("tool_calls" in turn for turn in turns) for turns in conversations):
                raise SnaketuneError(
                    f"packing.strategy none: {affected} of {len(rows)} rows have tool calls, which TRL's trainer would render "
                    "as text, although the chat template has its own format for them; choose best-fit-decreasing"
                )
        self.conversations = Dataset.from_list(rows)

    def __len__(self) -> int:
        return len(self.conversations)

    def __str__(self) -> str:
        return f"{len(self)} rows that aren't packed"


class RawTrainer(TrainingFeatures, SFTTrainer):
    """TRL's SFTTrainer with the sample order, checkpoints and log of all trainings."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: RawRows,
        compute: Compute,
        options: Options,
        loss: str,
    ):
        rows = train_dataset
        arguments: dict[str, Any] = args.to_dict()
        # Conversations that are too long were dropped and counted when the rows were written, so nothing is truncated here.
        arguments |= {"max_length": None, "packing": False, "assistant_only_loss": True}
        arguments |= {"loss_type": loss, "neftune_noise_alpha": options.neftune_noise_alpha}
        arguments["activation_offloading"] = options.offload
        try:
            super().__init__(
                rows=rows,
                compute=compute,
                options=options,
                model=model,
                args=SFTConfig(**arguments),
                train_dataset=rows.conversations,
                processing_class=rows.tokenizer,
            )
        except ValueError as error:
            if "chat template" not in str(error):
                raise
            raise SnaketuneError(
                f"packing.strategy: none trains on TRL's trainer, which refuses the chat template: {first_line(error)}; set "
                "tokenizers.NAME.chat_template to one with {% generation %}, such as resources/chat_templates/chatml.jinja, or "
                "use another packing.strategy"
            ) from None
        collate = self.data_collator
        self.data_collator = lambda items: Batch(collate(items))
        blank = Dataset.from_dict({"input_ids": [[rows.tokenizer.pad_token_id]], "labels": [[IGNORED]]})
        self.train_dataset = concatenate_datasets([self.train_dataset.select_columns(blank.column_names), blank])

    def items_per_epoch(self) -> int:
        # The last item is the blank one.
        return len(self.train_dataset) - 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Count the batch's tokens and FLOPs, and return TRL's loss."""
        lengths_D = inputs["attention_mask"].sum(1).cpu().numpy()
        supervised = int((inputs["labels"] != IGNORED).sum())
        self.meter.count(np.zeros_like(lengths_D), lengths_D, supervised=supervised, projected=int(lengths_D.sum()))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
