"""The SFT of config/recipes/smollm2-135m.yaml beside TRL's SFTTrainer: the same documents in every step, padded, not packed.

    make real && PYTHONPATH=workflow:. python -m benchmarks.real_model

Ours is the run that `make real` left in results/; TRL's starts from the same weights and adapters, with the same optimizer and
schedule, in a plain transformers model. Prints the largest difference of the two loss curves, and both speeds.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.clock import Clock
from benchmarks.jobs import started
from benchmarks.trl_training import counts, train_by_trl
from snaketune.artifacts.manifest import read_artifact
from snaketune.config.operation import Execution
from snaketune.engine.optimizers import without_rate_zero
from snaketune.engine.packing.rows import EqualTokens
from snaketune.packing.reader import open_rows
from snaketune.stages.specs import SftSpec
from snaketune.training import pipeline
from snaketune.training.prepared import TrainingRun
from snaketune.training.prepared_sft import prepare_sft

# Settings of transformers' trainer that both take.
SAME = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "seed", "optim",
)  # fmt: skip


def documents_of(rows: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Return the documents of packed rows, each with its labels; the first token of one isn't predicted."""
    found = []
    for row in rows:
        start = 0
        for length in row["segment_lengths"].tolist():
            part = slice(start, start + length)
            found.append({name: row[name][part].tolist() for name in ("input_ids", "labels")})
            start += length
    return found


def prepared(job: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any], list[list[dict]]]:
    """Return the adapters that the run began with, their config, its settings, and the documents of each step."""
    (pack,), (tokenizer,) = (job["inputs"][role] for role in ("pack", "tokenizer"))
    pack = read_artifact(Path(pack), "shards")
    operation = Execution(micro_batch_rows=1, gradient_checkpointing=False)
    run = TrainingRun.of(SftSpec.model_validate(job["spec"]), operation, started(folder))
    training = prepare_sft(run, pack, read_artifact(Path(tokenizer), "tokenizer"))
    with pipeline.ready_trainer(training) as (trainer, _):
        items, order = EqualTokens(open_rows(pack, "train")), list(trainer._get_train_sampler())
        per_step = run.spec.training.batch_rows
        steps = [order[at : at + per_step] for at in range(0, len(order), per_step)]
        adapters = {name: value.clone() for name, value in get_peft_model_state_dict(trainer.model).items()}
        settings = {name: getattr(trainer.args, name) for name in SAME}
        config = trainer.model.peft_config["default"]
    return adapters, config, settings, [documents_of([row for item in step for row in items[item]]) for step in steps]


def by_trl(base: str, tokenizer: Path, adapters: Any, config: Any, settings: dict[str, Any], steps: list[list[dict]]):
    """Train by TRL; return its losses, and its tokens per second."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    set_peft_model_state_dict(model, adapters)
    numbers = iter(range(sum(map(len, steps))))
    batches = [[next(numbers) for _ in step] for step in steps]

    class Stepwise(SFTTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            """Ours has no step at a rate of zero."""
            schedule = super().create_scheduler(num_training_steps, optimizer)
            self.lr_scheduler = without_rate_zero(schedule, self.args.get_warmup_steps(num_training_steps))
            return self.lr_scheduler

        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    clock = Clock(2, len(steps) - 2)
    trainer = train_by_trl(
        clock.timing(Stepwise, counts), SFTConfig, model=model, tokenizer=AutoTokenizer.from_pretrained(tokenizer),
        rows=Dataset.from_list([document for step in steps for document in step]), max_length=None, logging_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True}, max_steps=len(steps), **settings,
    )  # fmt: skip
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], clock.found()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", default="smollm2", help="name of the SFT run below results/")
    name = parser.parse_args().run
    job = json.loads(Path(f"results/.jobs/sft/{name}.json").read_text(encoding="utf-8"))
    ours = json.loads(Path(f"results/sft/{name}/run.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        adapters, config, settings, steps = prepared(job, folder)
    tokenizer = Path(job["inputs"]["tokenizer"][0]).parent / "tokenizer"
    losses, speed = by_trl(job["spec"]["base"]["path"], tokenizer, adapters, config, settings, steps)
    own = [entry["loss"] for entry in ours["history"] if "loss" in entry]
    different = max(abs(one - other) for one, other in zip(own, losses, strict=True))
    print(f"losses, ours: {own}\nlosses, TRL:  {losses}\nlargest difference: {different:.1e}")
    print(
        f"ours: {statistics.median(e['tokens_per_second'] for e in ours['history'] if 'tokens_per_second' in e):.0f} tokens/s"
    )
    print(f"TRL: {speed}")


if __name__ == "__main__":
    main()
