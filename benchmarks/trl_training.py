"""A training by one of TRL's trainers, with what all comparisons set alike."""

import tempfile
from typing import Any

from snaketune.engine.packing.shards import IGNORED


def train_by_trl(
    trainer_type: type, config_type: type, *, model: Any, rows: Any, tokenizer: Any, peft: Any = None, **settings: Any
):
    """Train on a dataset, on the CPU in float32 unless `settings` says otherwise; return the trainer.

    Args:
        peft: config of adapters.
        settings: of `config_type`. Activations are kept, as ours are.
    """
    same = {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "num_train_epochs": 1}
    silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = config_type(output_dir=folder, **same | silent | settings)
        adapters = {"peft_config": peft} if peft else {}
        trainer = trainer_type(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, **adapters)
        trainer.train()
    return trainer


def counts(inputs: dict[str, Any]) -> dict[str, int]:
    """Count the real tokens and the supervised ones of a micro-batch of SFT; rows without padding have no mask."""
    mask = inputs.get("attention_mask")
    tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
    return {"tokens": tokens, "supervised": int((inputs["labels"] != IGNORED).sum())}
