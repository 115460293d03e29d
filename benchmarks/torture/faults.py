"""The faults, one row each: where each strikes, how often, and the function that does it."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.torture import damage, disks, kills
from benchmarks.torture.chain import STAGES
from benchmarks.torture.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is injected into a chain.

    Attributes:
        what: as the table of docs/reliability.md says it.
        trials: at each point.
        strikes: how often it happens in one trial, each time somewhere else.
    """

    what: str
    points: tuple[str, ...]
    trials: int
    do: Callable[[Trial], None]
    strikes: int = 1


FAULTS = {
    "kill": Fault(
        what=f"`kill -9` of all processes, {kills.KILLS_PER_CHAIN} times per run, at random times",
        points=("whole chain",),
        trials=25,
        do=kills.anywhere,
        strikes=kills.KILLS_PER_CHAIN,
    ),
    "kill-between": Fault(
        what="`kill -9` of all processes between two writes of a training or of its publication",
        points=tuple(kills.POINTS),
        trials=5,
        do=kills.between,
    ),
    "signal": Fault(
        what="a signal",
        points=tuple(
            f"{name}, {times}, {whom}"
            for name in kills.SIGNALS
            for times in ("once", "twice")
            for whom in ("driver", "job", "terminal")
        ),
        trials=2,
        do=kills.by_signal,
    ),
    "orphan": Fault(
        what="Snakemake alone killed, and restarted while its job runs",
        points=("corpus", "tokenizer", "sft", "ref_pass", "dpo"),
        trials=2,
        do=kills.with_orphan,
    ),
    "other-machine": Fault(
        what="a machine hangs, another one without shared locks takes over, the first one wakes up",
        points=("wakes up too late", "wakes up in time"),
        trials=3,
        do=kills.other_machine,
    ),
    "disk-full": Fault(
        what="disk full while a stage writes, then free again",
        points=STAGES,
        trials=2,
        do=disks.full,
    ),
    "read-only": Fault(
        what="results folder read-only, then writable",
        points=("results",),
        trials=3,
        do=disks.read_only,
    ),
    "unknown-calls": Fault(
        what="a file system without locks or without hard links; all processes killed once",
        points=tuple(disks.UNKNOWN),
        trials=3,
        do=disks.unknown_calls,
    ),
    "flip-payload": Fault(
        what="bit flip in a published file, before the next stage reads it",
        points=damage.PAYLOADS,
        trials=1,
        do=damage.in_payload,
    ),
    "flip-checkpoint": Fault(
        what="bit flip in a checkpoint, before the training resumes",
        points=damage.CHECKPOINT,
        trials=2,
        do=damage.in_checkpoint,
    ),
    "flip-manifest": Fault(
        what="bit flip in a manifest",
        points=damage.MANIFESTS,
        trials=2,
        do=damage.in_manifest,
    ),
    "source": Fault(
        what="a corpus file that changes while it is read, then is restored",
        points=("corpus/chat",),
        trials=3,
        do=damage.source_changed,
    ),
    "clock": Fault(
        what="the clock changes during a training, which is killed and resumed",
        points=tuple(damage.CLOCKS),
        trials=3,
        do=damage.wrong_clock,
    ),
    "two-drivers": Fault(
        what="two Snakemakes at the same time, with `--nolock`",
        points=("whole chain", "after pack"),
        trials=5,
        do=kills.two_drivers,
    ),
}
