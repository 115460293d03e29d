"""Program that trains tiny models in several processes, killed and resumed by others; each process records its losses.

Python starts once: processes are forked from this one, which has imported everything, with the environment variables that
torch's launcher would set. A run is killed with its whole process group, as `kill -9` of a job does.
"""

import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from snaketune.artifacts.manifest import Artifact
from snaketune.config.lora import Lora, Quantization
from snaketune.config.training_runs import Training
from snaketune.engine import checkpoints
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.fsdp import local
from snaketune.engine.packing.rows import EqualTokens
from snaketune.engine.sft import SftTrainer
from snaketune.files import write_json
from snaketune.models import load_model
from snaketune.models.adapter_stack import AdapterStack
from snaketune.packing.reader import open_rows, sources_of
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec, RewardSpec
from snaketune.training import pipeline
from snaketune.training.launch.accelerate_config import deepspeed_config
from snaketune.training.prepared import TrainingRun
from snaketune.training.prepared_dpo import prepare_dpo
from snaketune.training.prepared_reward import reward_training
from tests.models.conftest import CPU, tiny_model

from .executed import executed
from .pipeline_runs import FORKED, pack, prepare_forks, read_pack, spec, train
from .preference_runs import Start, packed_pairs, referenced

# For preference runs: the pairs and their reference log-probabilities.
PREFERENCES: list[Artifact] = []


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        model: a family, or a function that makes a model; None for training on pairs.
        preference: loss settings of preference training.
        rewards: whether pairs train a reward model.
        since: the name of the run that it resumes, whose folder is copied.
        fails: whether its processes end with an error.
        killed: owner, method and n: all processes are killed before the main process's nth call of the method.
    """

    name: str
    processes: int
    launch: str
    zero_stage: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    lora: Lora | None = None
    model: Any = "llama"
    preference: dict[str, Any] = field(default_factory=dict)
    rewards: bool = False
    since: str = ""
    trainer: type = SftTrainer
    quantization: Quantization | None = None
    fails: bool = False
    killed: tuple[Any, str, int] | None = None
    dtype: torch.dtype = torch.float32


class BreaksOneShard(SftTrainer):
    """Writes an infinite weight in the second process, before the first checkpoint."""

    def finite_tensors(self, keep=False):
        if os.environ["RANK"] == "1":
            local(self.model.lm_head.weight).data.fill_(math.inf)
        return super().finite_tensors(keep)


def work(plan: Plan, root: Path) -> None:
    """Train in one of the processes."""
    patch = pytest.MonkeyPatch()
    if plan.killed and os.environ["RANK"] == "0":
        kill_before(*plan.killed, patch)
    if plan.launch == "deepspeed":
        use_deepspeed(plan, root, patch)
    seen: list[int] = []
    take = EqualTokens.__getitem__
    patch.setattr(EqualTokens, "__getitem__", lambda items, item: seen.append(item) or take(items, item))
    names = ("loss", "grad_norm")
    if plan.rewards:
        outcome, names = train_rewards(plan, root), (*names, "margin", "accuracy", "sources.1/chosen_reward")
    elif plan.model is None:
        outcome, names = train_preferences(plan, root), (*names, "margin", "kl", "chosen_logp")
    else:
        outcome = train_rows(plan, root)
    columns = {name: [entry[name] for entry in outcome.run["history"]] for name in names}
    recorded = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    save_file(recorded | {"seen": torch.tensor(seen)}, root / plan.name / f"recorded-{os.environ['RANK']}")


def use_deepspeed(plan: Plan, root: Path, patch: pytest.MonkeyPatch) -> None:
    """Set up DeepSpeed as `accelerate launch` does."""
    config = root / plan.name / "deepspeed.json"
    config.write_text(json.dumps(deepspeed_config(plan.zero_stage)), encoding="utf-8")
    del os.environ["ACCELERATE_USE_CPU"]
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
    # It would be compiled first, and gloo doesn't need it.
    patch.setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)


def train_rows(plan: Plan, root: Path) -> Outcome:
    rows, made = open_rows(read_pack(root), "train"), spec(plan.lora, **({"warmup_fraction": 0.3} | plan.training))
    made = made.model_copy(update={"quantization": plan.quantization})
    compute = replace(CPU, dtype=plan.dtype)
    outcome = train(
        root / plan.name,
        rows,
        made,
        plan.model,
        plan.trainer,
        every=2,
        launch=plan.launch,
        zero_stage=plan.zero_stage,
        compute=compute,
        # The training's own rows: seven of them, which two processes can't share evenly.
        held_out=open_rows(read_pack(root), "train", columns=sources_of),
        evaluate="evaluate" in plan.training and made.training.evaluate,
    )
    if "held_out" in outcome.run and os.environ["RANK"] == "0":
        write_json(root / plan.name / "held_out.json", outcome.run["held_out"] | outcome.about.get("kept", {}))
    return outcome


def train_preferences(plan: Plan, root: Path) -> Outcome:
    made = DpoSpec(
        **{"loss": "sigmoid", "beta": 0.5, **plan.preference}, lora=plan.lora, quantization=None, trust_remote_code=False,
        training=Training(epochs=1, batch_rows=4, micro_batch_rows=1, learning_rate=1e-3, seed=1),
    )  # fmt: skip
    operation = executed(made.training, log_steps=1, gpus=plan.processes, launch=plan.launch, checkpoint_steps=1)
    run = TrainingRun(spec=made, operation=operation, work=WorkFolder(root / plan.name), compute=CPU)
    packed, reference = PREFERENCES
    return pipeline.train(prepare_dpo(run, (Start(root / "model"),), packed, reference))


def train_rewards(plan: Plan, root: Path) -> Outcome:
    training = Training(epochs=1, batch_rows=4, micro_batch_rows=1, learning_rate=1e-3, seed=1)
    made = RewardSpec(
        training=training, lora=plan.lora, quantization=None, trust_remote_code=False, center_rewards_coefficient=0.1
    )
    operation = executed(training, log_steps=1, gpus=plan.processes, launch=plan.launch, checkpoint_steps=1)
    run = TrainingRun(spec=made, operation=operation, work=WorkFolder(root / plan.name), compute=CPU)
    initial = AdapterStack(results=(Start(root / "model"),), tokenizer=root / "model")
    return pipeline.train(reward_training(run, initial, PREFERENCES[0], held_out=False))


def kill_before(owner: Any, method: str, call: int, patch: pytest.MonkeyPatch) -> None:
    """Kill the process group when `method` is called for the `call`th time."""
    original, calls = getattr(owner, method), []

    def called(*arguments: Any, **keywords: Any) -> Any:
        calls.append(method)
        if len(calls) == call:
            os.killpg(0, signal.SIGKILL)
        return original(*arguments, **keywords)

    patch.setattr(owner, method, called)


def run_forked(processes: int, work_in: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run `work_in` in this number of processes of one process group; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    ranks: list[Any] = []
    for rank in range(processes):
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        ranks.append(FORKED.Process(target=in_group, args=(ranks[0].pid if ranks else 0, work_in, *arguments)))
        ranks[-1].start()
        if rank == 0:
            # The group must exist before the others join it, so parent and child both create it.
            os.setpgid(ranks[0].pid, ranks[0].pid)
    while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        wait(running)
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                # The others would wait for the one that failed.
                rank.kill()
    return [rank.exitcode for rank in ranks]


def in_group(leader: int, work_in: Callable[..., None], *arguments: Any) -> None:
    os.setpgid(0, leader)
    work_in(*arguments)


def run_all(plans: list[Plan], root: Path) -> None:
    """Run the plans in order; exit with an error if one ends with unexpected exit codes."""
    pack(root / "pack")
    model = tiny_model("llama")
    model.save_pretrained(root / "model")
    # Ten rows of two or three pairs: the last of three steps of four rows has two blank ones.
    pairs = packed_pairs(root / "pairs", rows=10)
    PREFERENCES.extend((pairs, referenced(root / "pairs/logps", pairs, model)))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    load_model._device_for_4_bits = lambda: "cpu"
    prepare_forks(root)
    for plan in plans:
        began = time.monotonic()
        if plan.since:
            shutil.copytree(root / plan.since, root / plan.name)
        WorkFolder(root / plan.name).start()
        codes = run_forked(plan.processes, work, plan, root)
        print(f"{plan.name}: exit codes {codes}, {time.monotonic() - began:.1f} s", flush=True)
        # When processes fail, the others are killed after the first one.
        ended = any(codes) if plan.fails else codes == [-signal.SIGKILL if plan.killed else 0] * plan.processes
        if not ended:
            sys.exit(f"{plan.name} failed")


BALANCED = partial(
    tiny_model,
    "mixtral",
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    num_experts_per_tok=2,
)
# 22 rows in steps of four: the last of the six steps has two.
SHORT = {"micro_batch_rows": 1, "epochs": 1}
LAST_LAYER = {"trainable": r".*layers\.1\..*"}
# Three processes: 12 rows, then 10. By SGD, whose steps show the scale of gradients: where a gradient is almost zero, Adam's
# step depends on its last bits, which the order of so many sums changes.
WIDE = SHORT | {"batch_rows": 12, "optimizer": "sgd"}
MEASURED = SHORT | {"evaluate": {"every": 1, "rows": 7, "samples": 0}}
# The learning rate rises in all steps: the second step learns, and later ones forget, whatever rounding does.
BEST = MEASURED | {"learning_rate": 0.3, "schedule": "constant_with_warmup", "warmup_fraction": 1.0, "keep": "best"}
SAVE = (TrainingFeatures, "_save_optimizer_and_scheduler")
MARK = (checkpoints, "sync_folder")
# A micro-batch of preferences.
AMID = (DpoTrainer, "batch_loss")
SORTED = {
    "model": None,
    "preference": {"loss": {"aot": 1.0, "sft": 0.5}, "stop_if": {"margin_below": 100, "window": 2}},
}


def alike(name: str, *launches: str, **what: Any) -> list[Plan]:
    """Plans for one training in a single process, and in two under each of `launches`."""
    counts = (("single", 1), *((launch, 2) for launch in launches))
    return [Plan(name=f"{name}-{launch}", processes=count, launch=launch, **what) for launch, count in counts]


def plans() -> list[Plan]:
    lora = Lora(rank=2)
    return [
        *alike("full", "ddp", "fsdp", training=SHORT),
        *alike("adapters", "ddp", "fsdp", training=SHORT, lora=lora),
        *alike("unmerged", "fsdp", training=SHORT, lora=Lora(rank=2, merge=False)),
        *alike("frozen", "ddp", "fsdp", training=SHORT | LAST_LAYER),
        *alike("muon", "ddp", training=SHORT | {"optimizer": "muon"}),
        *alike(
            "pissa", "ddp", "fsdp", training=SHORT, lora=Lora(rank=2, init_lora_weights="pissa", loraplus_lr_ratio=4)
        ),
        *alike("eva", "ddp", training=SHORT, lora=Lora(rank=2, init_lora_weights="eva")),
        *alike("best", "ddp", "fsdp", training=BEST),
        *alike("averaged", "ddp", "fsdp", training=SHORT | {"average": {"ema": 0.7}}),
        Plan(name="best-killed", processes=2, launch="fsdp", training=BEST, killed=(*MARK, 3)),
        Plan(name="best-again", processes=2, launch="fsdp", training=BEST, since="best-killed"),
        # The load-balancing loss is a mean over the rows of a step, of which the last has two and two blank ones.
        *alike("experts", "ddp", "fsdp", training=SHORT, model=BALANCED),
        *alike("preferences", "ddp", "fsdp", model=None),
        *alike("rewards", "ddp", "fsdp", model=None, rewards=True),
        *alike("adapted-rewards", "fsdp", model=None, rewards=True, lora=lora),
        Plan(name="rewards-killed", processes=2, launch="fsdp", model=None, rewards=True, killed=(*SAVE, 2)),
        Plan(name="rewards-again", processes=2, launch="fsdp", model=None, rewards=True, since="rewards-killed"),
        # The loss is a function of all pairs of a step, in all processes; `stop_if` ends the run before the third step.
        *alike("sorted", "ddp", "fsdp", **SORTED),
        Plan(name="sorted-killed", processes=2, launch="ddp", **SORTED, killed=(*AMID, 4)),
        Plan(name="sorted-again", processes=2, launch="ddp", **SORTED, since="sorted-killed"),
        Plan(name="sorted-alone", processes=1, launch="single", **SORTED, since="sorted-killed"),
        # Tied weights with float32 masters and bfloat16 products, and gradient checkpointing.
        *alike(
            "bfloat16",
            "fsdp",
            training=SHORT | {"gradient_checkpointing": True},
            model=partial(tiny_model, "qwen2", tie_word_embeddings=True),
            dtype=torch.bfloat16,
        ),
        *alike("four-bit", "fsdp", training=SHORT, lora=lora, quantization=Quantization()),
        Plan(name="diverging", processes=2, launch="fsdp", training=SHORT, trainer=BreaksOneShard, fails=True),
        Plan(name="wide-1", processes=1, launch="single", training=WIDE),
        Plan(name="wide-3", processes=3, launch="ddp", training=WIDE),
        Plan(name="wide-4", processes=4, launch="ddp", training=WIDE),
        # Killed during the second of three checkpoints: when only its weights are written, and before it is marked complete.
        Plan(name="ddp-killed", processes=2, launch="ddp", training=SHORT, killed=(*SAVE, 2)),
        Plan(name="fsdp-killed", processes=2, launch="fsdp", training=SHORT, killed=(*MARK, 2)),
        *(
            Plan(
                name=f"{since}-{launch}-{count}",
                processes=count,
                launch=launch,
                training=SHORT,
                since=f"{since}-killed",
            )
            for since in ("ddp", "fsdp")
            for launch, count in (("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4))
        ),
    ]


def brief_plans() -> list[Plan]:
    """Those that each change of the code is tested with."""
    names = {"full-single", "full-ddp", "full-fsdp", "fsdp-killed", "fsdp-fsdp-2"}
    return [plan for plan in plans() if plan.name in names]


def plans_with_deepspeed() -> list[Plan]:
    # Adam on gradients that ZeRO sums in another order: at 0.01 a norm differs by 1.2e-5.
    slow = {"learning_rate": 0.003}
    # Two learning rates.
    lora = Lora(rank=2, loraplus_lr_ratio=4)
    zero = {stage: {"launch": "deepspeed", "zero_stage": stage} for stage in (2, 3)}
    return [
        Plan(name="full-single", processes=1, launch="single", training=MEASURED | slow),
        Plan(name="adapters-single", processes=1, launch="single", training=SHORT | slow, lora=lora),
        Plan(name="adapters-zero-3", processes=2, training=SHORT | slow, lora=lora, **zero[3]),
        Plan(name="frozen-single", processes=1, launch="single", training=SHORT | slow | LAST_LAYER),
        Plan(name="frozen-zero-3", processes=2, training=SHORT | slow | LAST_LAYER, **zero[3]),
        Plan(name="killed-2", processes=2, training=MEASURED | slow, killed=(*SAVE, 2), **zero[2]),
        Plan(name="killed-3", processes=2, training=MEASURED | slow, killed=(*SAVE, 2), **zero[3]),
        Plan(name="2-zero", processes=2, training=MEASURED | slow, since="killed-2", **zero[2]),
        Plan(name="2-single", processes=1, launch="single", training=MEASURED | slow, since="killed-2"),
        Plan(name="3-zero", processes=2, training=MEASURED | slow, since="killed-3", **zero[3]),
        Plan(name="3-fsdp", processes=2, launch="fsdp", training=MEASURED | slow, since="killed-3"),
    ]


if __name__ == "__main__":
    run_all({"plain": plans, "brief": brief_plans, "deepspeed": plans_with_deepspeed}[sys.argv[2]](), Path(sys.argv[1]))
