"""Event files, read by TensorBoard's own reader."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
)


def points_of(folder: Path, purge: bool = False) -> list[tuple[int, str, float]]:
    """Return (step, curve, value) as TensorBoard would plot them. Args: purge: whether it drops points before a restart."""
    events = EventAccumulator(
        str(folder), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE, purge_orphaned_data=purge
    ).Reload()
    return [(e.step, curve, e.value) for curve in events.Tags()["scalars"] for e in events.Scalars(curve)]
