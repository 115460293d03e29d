"""The faults, one row each: where each strikes, how often, and the function that does it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.torture import damage, disks, kills
from benchmarks.torture.chain import STAGES
from benchmarks.torture.trials import Trial


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a chain.

    Attributes:
        do: injects it.
        trials: at each point.
        points: where it strikes.
        what: as the table of docs/reliability.md says it.
        strikes: how often it happens in one trial, each time somewhere else.
    """

    do: Callable[[Trial], None]
    trials: int
    points: Iterable[str]
    what: str
    strikes: int = 1


SIGNALS = [
    f"{name}, {times}, {whom}"
    for name in kills.SIGNALS
    for times in ("once", "twice")
    for whom in ("driver", "job", "terminal")
]
KILLS = kills.KILLS_PER_CHAIN
FAULTS = {
    "kill": Fault(
        kills.anywhere, 25, ["whole chain"], f"`kill -9` of all processes, {KILLS} times per run, at random times", KILLS,
    ),
    "kill-between": Fault(
        kills.between, 5, kills.POINTS, "`kill -9` of all processes between two writes of a training or of its publication",
    ),
    "signal": Fault(kills.by_signal, 2, SIGNALS, "a signal"),
    "orphan": Fault(
        kills.with_orphan, 2, ["corpus", "tokenizer", "sft", "ref_pass", "dpo"],
        "Snakemake alone killed, and restarted while its job runs",
    ),
    "other-machine": Fault(
        kills.other_machine, 3, ["wakes up too late", "wakes up in time"],
        "a machine hangs, another one without shared locks takes over, the first one wakes up",
    ),
    "disk-full": Fault(disks.full, 2, STAGES, "disk full while a stage writes, then free again"),
    "read-only": Fault(disks.read_only, 3, ["results"], "results folder read-only, then writable"),
    "unknown-calls": Fault(
        disks.unknown_calls, 3, disks.UNKNOWN,
        "a file system without locks or without hard links; all processes killed once",
    ),
    "flip-payload": Fault(
        damage.in_payload, 1, damage.PAYLOADS, "bit flip in a published file, before the next stage reads it",
    ),
    "flip-checkpoint": Fault(
        damage.in_checkpoint, 2, damage.CHECKPOINT, "bit flip in a checkpoint, before the training resumes",
    ),
    "flip-manifest": Fault(damage.in_manifest, 2, damage.MANIFESTS, "bit flip in a manifest"),
    "source": Fault(
        damage.source_changed, 3, ["corpus/chat"], "a corpus file that changes while it is read, then is restored",
    ),
    "clock": Fault(
        damage.wrong_clock, 3, damage.CLOCKS, "the clock changes during a training, which is killed and resumed",
    ),
    "two-drivers": Fault(
        kills.two_drivers, 5, ["whole chain", "after pack"], "two Snakemakes at the same time, with `--nolock`"
    ),
}  # fmt: skip
