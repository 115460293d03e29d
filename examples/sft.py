"""Supervised fine-tuning on packed conversations: TRL's script with another trainer.

    python examples/sft.py MODEL ROWS.jsonl OUT [EPOCHS]

ROWS.jsonl has a column `messages`, or `prompt` and `completion`.
"""

import sys

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig

from snaketune.engine import PackedSFTTrainer, pack_conversations

if __name__ == "__main__":
    model, file, folder, epochs = (*sys.argv[1:], "1")[:4]
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = load_dataset("json", data_files=file, split="train")
    trainer = PackedSFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder,
            # Rows of 1024 tokens, each with several conversations.
            per_device_train_batch_size=2,
            num_train_epochs=float(epochs),
            learning_rate=1e-4,
            logging_steps=1,
            bf16=False,
            report_to="none",
        ),
        train_dataset=pack_conversations(dataset, tokenizer, length=1024),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(f"{folder}/model")
