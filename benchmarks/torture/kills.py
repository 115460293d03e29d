"""Killed processes: all at a random time, between two writes, by a signal, or all but one."""

import errno
import os
import signal
import time
from pathlib import Path

from benchmarks.torture.chain import STAGES, Chain
from benchmarks.torture.processes import everything_in, kill, send, wait_for
from benchmarks.torture.trials import SECONDS, Failed, Trial

# Approximate time until the first job of a run starts.
START_SECONDS = 2.0
KILLS_PER_CHAIN = 4
SHORT_STAGES = ("corpus", "tokenizer")
# An audit event, raised before it happens, its path and count: the kill loses the work since the event before.
WORK, OUT = r"results/\.work/sft/[^/]+", r"results/sft/.*?"
CHECKPOINT = WORK + r"/state/checkpoints/"
POINTS = {
    "checkpoint, before its weights": ("open", CHECKPOINT + r".*/weights\.safetensors$", 2),
    "checkpoint, weights written": ("open", CHECKPOINT + r".*/optimizer\.safetensors$", 2),
    "checkpoint, optimizer written": ("open", CHECKPOINT + r".*/optimizer\.json$", 2),
    "checkpoint, before its random states": ("open", CHECKPOINT + r".*/random-0\.safetensors$", 2),
    "checkpoint, before the trainer's state": ("open", CHECKPOINT + r".*/trainer_state\.json$", 2),
    "checkpoint, before it counts": ("open", CHECKPOINT + r"[^/]+/\.?complete", 2),
    "checkpoint, before the older one is deleted": ("shutil.rmtree", CHECKPOINT + r"checkpoint-\d+$", 1),
    "outcome, before it is recorded": ("os.rename", WORK + r"/state/outcome\.json$", 1),
    "payload, before its rename": ("os.rename", WORK + r"/payload$", 1),
    "payload, before its run.json": ("os.rename", WORK + r"/run\.json$", 1),
    "payload, before its manifest": ("os.rename", WORK + r"/manifest\.json$", 1),
    "payload, before its state is deleted": ("shutil.rmtree", WORK + r"/state$", 1),
    "publishing, before the first file": ("open", OUT + r"/\.[^/]+\.partial/", 1),
    "publishing, before the second file": ("open", OUT + r"/\.[^/]+\.partial/", 2),
    "publishing, before its rename": ("os.rename", OUT + r"/(model|rows|logps|payload)$", 1),
    "publishing, before run.json": ("open", OUT + r"/run\.json$", 1),
    "publishing, before the manifest": ("os.rename", OUT + r"/manifest\.json$", 1),
}
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


def anywhere(trial: Trial) -> None:
    """Kill -9 everything, several times in one chain, at random times."""
    chain = trial.having(())
    begun = 0.0
    for until in sorted(trial.drawn.uniform(0, trial.reference.seconds) for _ in range(KILLS_PER_CHAIN)):
        running = chain.start()
        time.sleep(START_SECONDS + until - begun)
        trial.hit(everything_in(chain.folder))
        chain.kill(running)
        begun = until
        trial.counts.setdefault("killed at", []).append(round(until, 1))
        chain.snakemake("--unlock", seconds=SECONDS, log="unlock.log")
    trial.recover(unlock=False)


def between(trial: Trial) -> None:
    """Kill -9 everything before one particular write of a training or of its publishing."""
    chain = trial.before("sft")
    chain.order(kill_before=POINTS[trial.point])
    running = chain.start(*trial.targets)
    running.wait(SECONDS)
    chain.kill(running)
    if not (chain.folder / "killed").is_file():
        raise Failed(f"never came to the point: {chain.read('first.log')[-400:]}")
    trial.recover(unlock=True)


def stages(chain: Chain, what: str) -> list[int]:
    return everything_in(chain.folder, f" -m {what} ")


def begins(chain: Chain, what: str) -> None:
    if not wait_for(lambda: stages(chain, what), SECONDS):
        raise Failed(f"{what} never began")


def first_checkpoint(chain: Chain) -> Path:
    """Wait for a training's first checkpoint; return the file that marks one as complete."""
    pattern = ".work/sft/*/state/checkpoints/*/complete"
    if not wait_for(lambda: any(chain.results.glob(pattern)), SECONDS):
        raise Failed("the training never came to a checkpoint")
    return next(chain.results.glob(pattern))


def in_a_training(trial: Trial, chain: Chain) -> None:
    """Wait for a training's first checkpoint, then for a random time."""
    first_checkpoint(chain)
    time.sleep(trial.drawn.uniform(0, 0.3))


def by_signal(trial: Trial) -> None:
    """Send a signal once or twice: to the driver (a shutdown), to the job's process, or to all (Ctrl-C)."""
    name, times, whom = trial.point.split(", ")
    chain = trial.before("sft")
    running = chain.start(*trial.targets)
    if trial.drawn.random() < 0.5:
        in_a_training(trial, chain)
    else:
        begins(chain, "snaketune")
        time.sleep(trial.drawn.uniform(0, 8))
    for _ in range(2 if times == "twice" else 1):
        if running.poll() is not None:
            break
        if whom == "terminal":
            # All that a terminal has in its foreground.
            os.killpg(running.pid, SIGNALS[name])
            trial.hit(True)
        else:
            there = [running.pid] if whom == "driver" else stages(chain, "snaketune")
            send(there, SIGNALS[name])
            trial.hit(there)
        time.sleep(0.5)
    said = chain.wait(running, SECONDS)
    trial.check_message(said, fails=None)
    orphans = len(everything_in(chain.folder))
    trial.recover(unlock=said.status != 0)
    trial.counts["orphans"] = orphans


def with_orphan(trial: Trial) -> None:
    """Kill the driver alone, and run it again while its job still runs."""
    chain = trial.before(trial.point)
    running = chain.start(*trial.targets)
    begins(chain, f"snaketune {trial.point}")
    if trial.point == "sft" and trial.drawn.random() < 0.5:
        in_a_training(trial, chain)
    else:
        # Short stages would end before a later kill.
        time.sleep(trial.drawn.uniform(0, 0.5 if trial.point in SHORT_STAGES else 5))
    kill([running.pid])
    running.wait()
    trial.counts["orphans"] = len(stages(chain, f"snaketune {trial.point}"))
    trial.hit(trial.counts["orphans"])
    trial.recover(unlock=True)


def other_machine(trial: Trial) -> None:
    """Stop a training on a machine without shared locks, let another take over, then wake the first."""
    chain = trial.before("sft")
    chain.order(no_flock=errno.ENOLCK)
    chain.extra["TORTURE_BOOT"] = "first"
    running = chain.start(*trial.targets)
    in_a_training(trial, chain)
    first = everything_in(chain.folder)
    send(first, signal.SIGSTOP)
    chain.extra["TORTURE_BOOT"] = "second"
    chain.snakemake("--unlock", seconds=SECONDS, log="unlock.log")
    second = chain.start(*trial.targets, log="second.log")
    if trial.point == "wakes up in time":
        time.sleep(trial.drawn.uniform(5, 60))
    elif not wait_for(lambda: "resuming from" in chain.read("second.log"), SECONDS):
        raise Failed("the second machine never took the work over")
    send(first, signal.SIGCONT)
    for said in (chain.wait(running, SECONDS), chain.wait(second, SECONDS, "second.log")):
        trial.check_message(said, fails=None)
    trial.recover(unlock=True)


def two_drivers(trial: Trial) -> None:
    """Run two drivers with --nolock, the second one started at a random time."""
    chain = trial.having(() if trial.point == "whole chain" else STAGES[: STAGES.index("sft")])
    first = chain.start("--nolock")
    time.sleep(trial.drawn.uniform(0, trial.reference.seconds / 2))
    second = chain.start("--nolock", log="second.log")
    ends = [chain.wait(first, SECONDS), chain.wait(second, SECONDS, "second.log")]
    for said in ends:
        trial.check_message(said, fails=None)
    trial.counts["failed drivers"] = sum(said.status != 0 for said in ends)
    trial.recover(unlock=True)
