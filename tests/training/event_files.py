"""Event files, read by TensorBoard's own reader."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
)

# The metrics of a log line that measure speed, which differ between two trainings that are the same.
SPEED = ("tokens_per_second", "supervised_tokens_per_second", "mfu", "mfu_computed", "memory_gb")


def points_of(folder: Path) -> list[tuple[int, str, float]]:
    """(step, curve, value) as TensorBoard plots them."""
    events = EventAccumulator(str(folder), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
    return [(event.step, curve, event.value) for curve in events.Tags()["scalars"] for event in events.Scalars(curve)]
