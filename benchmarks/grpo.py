"""TRL's GRPOTrainer beside the rounds of config/recipes/rounds.yaml: the same start, prompts, reward and wall time.

    snakemake --configfile config/recipes/rounds.yaml
    PYTHONPATH=workflow:. python -m benchmarks.grpo

The wall time is what the jobs of the rounds took (sampling, scores, data, checks, training), with all threads. Both are
evaluated on the same held-out prompts. GRPO's learning rate is the best of --rates, each of which gets the whole time.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_training import train_by_trl
from snaketune.evaluation.score_intervals import wilson
from snaketune.sampling.answers import same_answer
from snaketune.tables import read_table

# Stages whose jobs a round consists of.
OF_ROUND = ("prompts", "generate", "sample", "score", "select", "corpus", "tokenize", "plan", "write", "pack", "sft")
BATCH = 64


class WallTime(TrainerCallback):
    """Ends a training after some seconds."""

    def __init__(self, seconds: float):
        self.seconds, self.steps, self.started = seconds, 0, 0.0

    def on_train_begin(self, args, state, control, **_):
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.steps = state.global_step
        control.should_training_stop |= time.monotonic() - self.started > self.seconds


def seconds_of_rounds(results: Path, run: str) -> float:
    """What the jobs of a run's rounds took."""
    found = [
        path
        for stage in OF_ROUND
        for path in (results / stage).glob(f"{run}-[0-9]*/**/run.json")
        if "@" not in str(path)
    ]
    found += (results / "preflight").glob("*-[0-9]*/run.json")
    return sum(json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in found)


def is_right(pattern: re.Pattern, response: str, answer: str) -> bool:
    found = pattern.search(response)
    return found is not None and same_answer(found[1].strip(), answer)


def prompts_of(results: Path, corpus: str, split: str) -> Dataset:
    """Prompts with their checkable answers."""
    rows = read_table(results / f"corpus/{corpus}/rows/{split}-00000.arrow").to_pylist()
    return Dataset.from_list(
        [
            {"id": row["id"], "answer": row["answer"], "prompt": [_message(turn) for turn in row["messages"][:-1]]}
            for row in sorted(rows, key=lambda row: row["id"])
            if row["answer"] is not None
        ]
    )


def _message(turn: dict[str, Any]) -> dict[str, str]:
    return {"role": turn["role"], "content": turn["content"]}


@torch.no_grad()
def exact_match(model: Any, tokenizer: Any, prompts: Dataset, pattern: re.Pattern, tokens: int) -> int:
    """The number of greedy responses that are right."""
    model.eval()
    tokenizer.padding_side, right = "left", 0
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        inputs = tokenizer.apply_chat_template(
            batch["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        made = model.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_right(pattern, text, answer) for text, answer in zip(texts, batch["answer"], strict=True))
    return right


def train(start: Path, prompts: Dataset, pattern: re.Pattern, seconds: float, rate: float, tokens: int) -> tuple:
    """Train by GRPO for some seconds; return the model, the steps and the seconds."""

    def reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(is_right(pattern, text, expected)) for text, expected in zip(texts, answer, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    clock = WallTime(seconds)

    class Trainer(GRPOTrainer):
        def __init__(self, **arguments: Any):
            super().__init__(reward_funcs=reward, callbacks=[clock], **arguments)

    trainer = train_by_trl(
        Trainer, GRPOConfig, model=model, rows=prompts.shuffle(seed=0), tokenizer=tokenizer, learning_rate=rate,
        num_train_epochs=100, per_device_train_batch_size=BATCH, num_generations=8, max_completion_length=tokens,
        temperature=0.8, top_p=0.95, top_k=0, lr_scheduler_type="constant_with_warmup", warmup_steps=5, logging_steps=10**9,
    )  # fmt: skip
    return trainer.model, clock.steps, time.monotonic() - clock.started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--start", default="few")
    parser.add_argument("--run", default="self")
    parser.add_argument("--evaluation", default="rounds")
    parser.add_argument("--corpus", default="demo-chat")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4, 3e-4])
    arguments = parser.parse_args()
    results, corpus = arguments.results, arguments.corpus
    start = results / f"sft/{arguments.start}/model"
    scored = sorted((results / f"eval/{arguments.evaluation}").glob("sft-*/scores/responses.jsonl"))
    spec = json.loads((scored[0].parents[1] / "manifest.json").read_text(encoding="utf-8"))["spec"]
    pattern, tokens = re.compile(spec["exact_match"]["answer_pattern"]), spec["generation"]["max_new_tokens"]
    asked = [json.loads(line) for line in scored[0].read_text(encoding="utf-8").splitlines()]
    ids = {row["id"] for row in asked if row["corpus"] == corpus and row["answer"] is not None}
    held_out = prompts_of(results, corpus, "held_out").filter(lambda row: row["id"] in ids)
    train_prompts = prompts_of(results, corpus, "train")
    seconds = seconds_of_rounds(results, arguments.run)
    print(f"{len(train_prompts)} prompts, {len(held_out)} held out; the rounds took {seconds:.0f} s", flush=True)
    for path in scored:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        right = sum(bool(row["correct"]) for row in rows if row["id"] in ids)
        print(f"{path.parents[1].name}: {_share(right, len(held_out))}", flush=True)
    for rate in arguments.rates:
        model, steps, took = train(start, train_prompts, pattern, seconds, rate, tokens)
        right = exact_match(model, AutoTokenizer.from_pretrained(start), held_out, pattern, tokens)
        print(f"GRPO, {rate:g}: {_share(right, len(held_out))}, {steps} steps in {took:.0f} s", flush=True)


def _share(right: int, of: int) -> str:
    low, high = wilson(right / of, of)
    return f"{right / of:.1%} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
    main()
