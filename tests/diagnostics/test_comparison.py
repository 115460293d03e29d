"""The comparison of timings, with invented ones whose answers are known; the workflow's tests run real ones."""

from typing import Any

from snaketune.diagnostics.settings import figures_of


def timing(speed: float) -> dict[str, Any]:
    return {"fits": True, "tokens_per_second": speed, "memory_gb": 2.0, "device": "cpu"}


def test_what_a_warming_machine_does_to_all_is_no_gain_of_any():
    """Rounds get slower; within each, the change is a fifth faster."""
    speeds = (1000, 800, 500)
    result = figures_of([timing(1.2 * speed) for speed in speeds], [timing(speed) for speed in speeds])
    assert result["gain_percent"] == {"median": 20.0, "least": 20.0, "most": 20.0}
    assert result["tokens_per_second"] == {"median": 960.0, "least": 600.0, "most": 1200.0}
