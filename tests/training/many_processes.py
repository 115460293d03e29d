"""As a program: trainings of tiny models in several processes, killed and continued by others; each writes down how it went.

One start of Python for all of them: processes are forked from this one, which has imported everything, and are told what torch's
launcher would tell them. A run that dies takes its whole process group with it, as `kill -9` of a job does.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.runs import Lora
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.stages.work import WorkFolder
from snaketune.training import checkpoints

from .pipeline_runs import LENGTH, pack, spec, train

FORKED = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: in which processes, of what, and where it goes on or ends early.

    Attributes:
        since: the run whose folder it finds, as that left it.
        killed: the method before whose nth call by the first process all of them are killed.
    """

    name: str
    processes: int
    launch: str
    training: dict[str, Any] = field(default_factory=dict)
    lora: Lora | None = None
    model: Any = "llama"
    since: str = ""
    killed: tuple[Any, str, int] | None = None


def work(plan: Plan, root: Path) -> None:
    """One of the processes of a training."""
    patch = pytest.MonkeyPatch()
    first = os.environ["RANK"] == "0"
    if plan.killed and first:
        kill_before(*plan.killed, patch)
    seen: list[int] = []
    take = EqualTokens.__getitem__
    patch.setattr(EqualTokens, "__getitem__", lambda items, item: seen.append(item) or take(items, item))
    folder = root / plan.name
    made = spec(plan.lora, **plan.training)
    outcome = train(
        folder, PackedRows(read_pack(root / "pack"), "train"), made, plan.model, every=2, launch=plan.launch
    )
    columns = {name: [entry[name] for entry in outcome.run["history"]] for name in ("loss", "grad_norm")}
    found = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    save_file(found | {"seen": torch.tensor(seen)}, folder / f"found-{os.environ['RANK']}")


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
    """Run `work_in` in so many processes of one group; their exit codes."""
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
            # Before the others join it, and by both sides, whoever comes first.
            os.setpgid(ranks[0].pid, ranks[0].pid)
    while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        wait(running)
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                # It would wait for the one that failed.
                rank.kill()
    return [rank.exitcode for rank in ranks]


def in_group(leader: int, work_in: Callable[..., None], *arguments: Any) -> None:
    os.setpgid(0, leader)
    work_in(*arguments)


def read_pack(folder: Path) -> Artifact:
    manifest = {"format_version": "3.0", "row_length": LENGTH, "records": {}}
    manifest["payload"] = describe_files(folder / "shards")
    return Artifact(folder / "manifest.json", manifest, folder / "shards")


def run_all(plans: list[Plan], root: Path) -> None:
    """One after the other; ends where one doesn't end as it should."""
    pack(root / "pack")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for plan in plans:
        began = time.monotonic()
        if plan.since:
            shutil.copytree(root / plan.since, root / plan.name)
        WorkFolder(root / plan.name).start()
        codes = run_forked(plan.processes, work, plan, root)
        print(f"{plan.name}: exit codes {codes}, {time.monotonic() - began:.1f} s", flush=True)
        if codes != [-signal.SIGKILL if plan.killed else 0] * plan.processes:
            sys.exit(f"{plan.name} failed")


SINGLE = {"micro_batch_rows": 1, "epochs": 1}
SAVE = (checkpoints.SafeCheckpoints, "_save_optimizer_and_scheduler")
CONTINUED = ("single", 1), ("fsdp", 4), ("ddp", 2)


def plans() -> list[Plan]:
    lora = Lora(rank=2)
    return [
        Plan(name="one", processes=1, launch="single", training=SINGLE),
        Plan(name="ddp", processes=2, launch="ddp", training=SINGLE),
        Plan(name="fsdp", processes=2, launch="fsdp", training=SINGLE),
        Plan(name="lora-one", processes=1, launch="single", training=SINGLE, lora=lora),
        Plan(name="lora-ddp", processes=2, launch="ddp", training=SINGLE, lora=lora),
        Plan(name="lora-fsdp", processes=2, launch="fsdp", training=SINGLE, lora=lora),
        # Killed in the middle of the second of three checkpoints, by which the weights are there; and when it is complete.
        *(
            Plan(name=f"{launch}-killed", processes=2, launch=launch, training=SINGLE, killed=(*SAVE, 2))
            for launch in ("ddp", "fsdp")
        ),
        *(
            Plan(name=f"{launch}-resumed", processes=2, launch=launch, training=SINGLE, since=f"{launch}-killed")
            for launch in ("ddp", "fsdp")
        ),
        *(
            Plan(
                name=f"{since}-{launch}-{count}",
                processes=count,
                launch=launch,
                training=SINGLE,
                since=f"{since}-killed",
            )
            for since in ("ddp", "fsdp")
            for launch, count in CONTINUED
            if (since, count) != ("ddp", 2)
        ),
        Plan(name="ddp-fsdp-2", processes=2, launch="fsdp", training=SINGLE, since="ddp-killed"),
    ]


if __name__ == "__main__":
    run_all(plans(), Path(sys.argv[1]))
