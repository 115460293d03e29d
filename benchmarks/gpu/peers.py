"""TRL's SFTTrainer on the same model and the same documents, packed by itself, as its documentation recommends."""

import tempfile
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.measure import LEARNING_RATE, Marks, as_many_as_fit
from benchmarks.gpu.shapes import Shape, make_model, make_rows

from snaketune.models.devices import Compute
from snaketune.packing.shards import IGNORED


def trl(shape: Shape, compute: Compute, micro_rows: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure real tokens/s and memory with as many rows as fit, starting with our number."""
    return as_many_as_fit(micro_rows, lambda rows: _trl(shape, compute, rows, warm_up, steps))


def _trl(shape: Shape, compute: Compute, micro_rows: int, warm_up: int, steps: int) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from transformers.utils import is_flash_attn_2_available
    from trl import SFTConfig, SFTTrainer

    on_cuda = compute.device.type == "cuda"
    marks = Marks(warm_up, steps, compute.device)

    class Timed(SFTTrainer):
        def training_step(self, model, inputs, *others):
            # Without padding: what isn't a document isn't there.
            marks.count(tokens=inputs["input_ids"].numel(), supervised=int((inputs["labels"] != IGNORED).sum()))
            return super().training_step(model, inputs, *others)

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= marks.step_ended()

    model = make_model(shape, compute)
    # TRL recommends flash-attn for packing; otherwise torch's attention is used.
    model.set_attn_implementation("flash_attention_2" if on_cuda and is_flash_attn_2_available() else "sdpa")
    # Rows of its own making may be more.
    made = make_rows(micro_rows * (warm_up + steps + 1), shape.length, shape.model["vocab_size"])
    rank = shape.rank
    adapters = (
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            args=SFTConfig(
                output_dir=folder, max_length=shape.length, packing=True, packing_strategy="bfd",
                per_device_train_batch_size=micro_rows, num_train_epochs=1, learning_rate=LEARNING_RATE,
                # Ours keeps activations too.
                gradient_checkpointing=False, bf16=compute.dtype == torch.bfloat16, use_cpu=not on_cuda,
                report_to="none", save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([_row(document) for document in made.documents]),
            processing_class=made_tokenizer(),
            peft_config=adapters,
            callbacks=[Ends()],
        )  # fmt: skip
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(compute.device)
        trainer.train()
    return marks.found() | {
        "attention": model.config._attn_implementation,
        "peak_memory_gb": torch.cuda.max_memory_allocated(compute.device) / 1e9 if on_cuda else None,
    }


def _row(document: np.ndarray) -> dict[str, list[int]]:
    half = len(document) // 2
    return {"input_ids": document.tolist(), "labels": [IGNORED] * half + document[half:].tolist()}


def made_tokenizer() -> Any:
    """Return a tokenizer, which TRL's trainers require although the rows are tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
