"""The trainers of `snaketune.engine` beside TRL's, called alike on the same rows: seconds of a whole script on one thread.

    PYTHONPATH=workflow:. python -m benchmarks.python_api --model data/smollm2-135m

Both sides load the model, tokenize, add the same adapters and train one epoch in float32: TRL with its default of 8 rows a
step, the engine with one packed row, of some 14 to 24; each in a process of its own, in turn, medians. Rows: instructions with
a preferred and a rejected answer; `trees` gives each prompt four pairs, as sampled answers do. Prints the table of
docs/python.md.
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import SAID, checked, environment, pinned
from benchmarks.results import in_turn, markdown, medians, require, timed

FILE = "raschka_instruct/instruction-data-with-preference.json"
# Prompts.
TASKS = {"sft": 96, "dpo": 96, "trees": 24}
ROW_LENGTH = 1024


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a model with a chat template")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--side", choices=("snaketune", "trl"), help="train this side here, once, on the one task of --only"
    )
    options = parser.parse_args()
    require(options.data, [FILE])
    if options.side:
        train(options.side, options.only[0], options)
        return
    rows = []
    for task in options.only:
        sides = {side: timed(partial(run_side, side, task, options)) for side in ("trl", "snaketune")}
        with pinned():
            seconds = medians(in_turn(options.rounds, sides))
        ratio = seconds["trl"] / seconds["snaketune"]
        rows.append((task, *(f"{seconds[side]:.0f} s" for side in ("trl", "snaketune")), f"{ratio:.1f}"))
    print(markdown(("rows", "TRL", "snaketune", "ratio"), rows))


def run_side(side: str, task: str, options: Namespace) -> None:
    chosen = ["--side", side, "--only", task, "--model", str(Path(options.model).resolve())]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.python_api", *chosen, "--data", str(options.data.resolve())]
        checked(subprocess.run(command, cwd=name, env=environment(Path(name)), **SAID))


def train(side: str, task: str, options: Namespace) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from snaketune.engine import PackedDPOTrainer, PackedSFTTrainer, pack_conversations, pack_pairs

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dataset = Dataset.from_list(rows_of(task, json.loads((options.data / FILE).read_text(encoding="utf-8"))))
    theirs, packed, pack, config = (
        (SFTTrainer, PackedSFTTrainer, pack_conversations, SFTConfig)
        if task == "sft"
        else (DPOTrainer, PackedDPOTrainer, pack_pairs, DPOConfig)
    )
    settings: dict[str, Any] = {
        "num_train_epochs": 1, "learning_rate": 1e-4, "bf16": False, "use_cpu": True, "save_strategy": "no",
        "report_to": "none", "gradient_checkpointing": False, "logging_steps": 1,
    }  # fmt: skip
    if side == "trl":
        trainer_type, rows = theirs, dataset
        settings |= {"max_length": ROW_LENGTH}
    else:
        trainer_type, rows = packed, pack(dataset, tokenizer, length=ROW_LENGTH)
        settings |= {"per_device_train_batch_size": 1}
    trainer = trainer_type(
        model=options.model,
        args=config(output_dir="out", **settings),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    started = time.perf_counter()
    trainer.train()
    print(f"{side} {task}: {trainer.state.global_step} steps, {time.perf_counter() - started:.1f} s of training")


def rows_of(task: str, records: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Prompts as messages with their completions; of `trees`, each preferred answer beside four others' rejected ones."""
    prompts = [[{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}] for row in records]
    answers = {
        side: [[{"role": "assistant", "content": row[side]}] for row in records] for side in ("chosen", "rejected")
    }
    count = TASKS[task]
    if task == "sft":
        return [{"prompt": prompts[n], "completion": answers["chosen"][n]} for n in range(count)]
    others = (0,) if task == "dpo" else (0, 1, 2, 3)
    return [
        {"prompt": prompts[n], "chosen": answers["chosen"][n], "rejected": answers["rejected"][n + other]}
        for n in range(count)
        for other in others
    ]


if __name__ == "__main__":
    main()
