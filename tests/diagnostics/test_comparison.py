"""The comparison of timings, with invented ones whose answers are known; the workflow's tests run real ones."""

from typing import Any

import pytest

from snaketune.diagnostics.settings import compared_tokens, figures_of, machine_notes


def timing(speed: float, *, loss: float = 3.0, tokens: int = 100, matmul: float = 1e9) -> dict[str, Any]:
    windows = [{"tokens": tokens * (n + 1), "loss": loss + 1 - n / 10} for n in range(11)]
    return {
        "fits": True, "windows": windows, "tokens_per_second": speed, "memory_gb": 2.0, "device": "cpu",
        "probe": {"matmul_flops_per_second": matmul, "copy_bytes_per_second": 1e9}, "libraries": {"torch": "2.13"},
    }  # fmt: skip


def figures(one: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    return figures_of([one], [baseline], compared_tokens([one, baseline]))


def test_what_a_warming_machine_does_to_all_is_no_gain_of_any():
    """Rounds get slower; within each, the change is a fifth faster."""
    speeds = (1000, 800, 500)
    result = figures_of([timing(1.2 * speed) for speed in speeds], [timing(speed) for speed in speeds], 1000)
    assert result["gain_percent"] == {"median": 20.0, "least": 20.0, "most": 20.0}
    assert result["tokens_per_second"] == {"median": 960.0, "least": 600.0, "most": 1200.0}


def test_a_loss_that_is_off_is_not_comparable_and_losses_are_of_equal_tokens():
    # The same curve over tokens, in rows of twice as many; and another training's curve.
    same = timing(100, tokens=200)
    for n, window in enumerate(same["windows"]):
        window["loss"] = 3 + 1 - (2 * n + 0.5) / 10
    result = figures(same, timing(100))
    assert result["learns"] == "" and result["loss"]["median"] == pytest.approx(3.0)
    assert figures(timing(100, loss=9), timing(100))["learns"] == "at equal tokens its loss is 9 instead of 3"


def test_a_variant_that_diverges_is_timed_and_not_compared():
    diverged = timing(200)
    for window in diverged["windows"][3:]:
        window["loss"] = None
    result = figures(diverged, timing(100))
    assert result["gain_percent"]["median"] == 100 and result["loss"] is None
    assert result["learns"] == "its loss, or the baseline's, isn't finite"
    # Nothing can be held against a baseline of none, and no other figure is lost.
    other = figures(timing(150), diverged)
    assert other["learns"] == result["learns"] and other["gain_percent"]["median"] == -25
    assert other["loss"]["median"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"libraries": {"torch": "2.12"}}, "libraries differed: torch 2.12, torch 2.13"),
        ({"device": "NVIDIA H100"}, "devices differed: NVIDIA H100 and cpu"),
        (timing(100, matmul=1.3e9), "matrix products differed by 30%: something else ran, or the clock changed"),
    ],
)
def test_a_machine_that_changed_between_timings_is_noted(changed, note):
    assert machine_notes([timing(100), timing(150)]) == []
    repeat = "`snakemake doctor --forcerun timing` measures again"
    assert machine_notes([timing(100), timing(150) | changed]) == [f"between timings, {note}; {repeat}"]
