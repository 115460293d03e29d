"""DPO with adapters on packed pairs: TRL's script with another trainer.

    python examples/dpo.py MODEL PAIRS.jsonl OUT [EPOCHS]

PAIRS.jsonl has the columns `prompt`, `chosen` and `rejected`.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig

from snaketune.engine import PackedDPOTrainer, pack_pairs

if __name__ == "__main__":
    model, file, folder, epochs = (*sys.argv[1:], "1")[:4]
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = load_dataset("json", data_files=file, split="train")
    trainer = PackedDPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=folder,
            # Rows of 1024 tokens, each with several pairs, whose prompts are computed once.
            per_device_train_batch_size=2,
            num_train_epochs=float(epochs),
            learning_rate=1e-4,
            beta=0.1,
            logging_steps=1,
            bf16=False,
            report_to="none",
        ),
        train_dataset=pack_pairs(dataset, tokenizer, length=1024),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
