"""What TensorBoard's own reader finds in a folder."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
)


def points_of(folder: Path, purge: bool = False) -> list[tuple[int, str, float]]:
    """Steps, curves and values, as it would draw them; args: purge: whether it drops what a restart seems to have left."""
    events = EventAccumulator(
        str(folder), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE, purge_orphaned_data=purge
    ).Reload()
    return [(e.step, curve, e.value) for curve in events.Tags()["scalars"] for e in events.Scalars(curve)]
