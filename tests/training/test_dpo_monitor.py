"""Warnings and early stops of the DPO monitor, on invented metrics."""

import pytest

from snaketune.config.losses import WINDOW, PreferenceLoss
from snaketune.engine.preference_metrics import SUMS
from snaketune.engine.preference_monitor import PreferenceMonitor
from snaketune.engine.preference_settings import PreferenceSettings, StopIf

SETTINGS = PreferenceLoss(beta=0.1)
REFERENCE_FREE = PreferenceLoss(loss="cpo", beta=0.1)


def step(
    chosen: float,
    rejected: float,
    *,
    spread: float = 0.1,
    tokens: float = 20.0,
    logp: float = -40.0,
    follows: float = 0.0,
) -> dict[str, float]:
    """Sums of eight pairs: their mean rewards, the standard deviation of chosen ones, and of margins beside their mean.

    Args:
        follows: correlation of the margins with the differences of lengths, which are 3 tokens in either direction.
    """
    pairs = 8.0
    margin, deviation, difference = chosen - rejected, 0.5, 3.0
    return dict.fromkeys(SUMS, 0.0) | {
        "pairs": pairs, "chosen": pairs, "rejected": pairs, "right": pairs if margin > 0 else 0.0, "margin": pairs * margin,
        "margin_squared": pairs * (margin**2 + deviation**2), "chosen_reward": pairs * chosen,
        "chosen_reward_squared": pairs * (chosen**2 + spread**2), "rejected_reward": pairs * rejected,
        "chosen_logp": pairs * logp, "rejected_logp": pairs * logp, "chosen_tokens": pairs * tokens,
        "rejected_tokens": pairs * tokens, "longer": pairs / 2, "difference_squared": pairs * difference**2,
        "margin_by_difference": pairs * follows * deviation * difference,
    }  # fmt: skip


def kinds(settings: PreferenceLoss, steps: list[dict[str, float]], from_zero: bool = True) -> set[str]:
    monitor = PreferenceMonitor(settings, from_zero)
    for sums in steps:
        monitor.step(sums)
    return {warning["kind"] for warning in monitor.final_warnings()}


def test_a_good_training_has_no_warnings():
    assert not kinds(SETTINGS, [step(0.05 * n, -0.05 * n) for n in range(2 * WINDOW)])


def test_usual_changes_cause_no_warning():
    """Both rewards fall, the chosen one by a fifth of the rejected one and by 0.05 nats per token."""
    assert not kinds(SETTINGS, [step(-0.1, -0.5)] * WINDOW)


@pytest.mark.parametrize(("chosen", "seen"), [(-0.19, False), (-0.21, True)])
def test_chosen_completions_collapse_from_a_tenth_of_a_nat_per_token_on(chosen, seen):
    # 0.1 nats for each of 20 tokens are a reward of -0.2.
    assert ("collapse" in kinds(SETTINGS, [step(chosen, -0.9)] * WINDOW)) == seen


def test_noise_of_a_few_pairs_causes_no_warning():
    assert not kinds(SETTINGS, [step(-0.25, -0.9, spread=3.0)] * WINDOW)


@pytest.mark.parametrize(("chosen", "seen"), [(-0.11, False), (-0.13, True)])
def test_margins_that_grow_only_by_pushing_rejected_ones_down(chosen, seen):
    warned = kinds(SETTINGS, [step(chosen, -0.5)] * WINDOW)
    assert warned == ({"only_rejected"} if seen else set())


def test_equal_decreases_are_not_a_growing_margin():
    assert "only_rejected" not in kinds(SETTINGS, [step(-0.15, -0.14)] * WINDOW)


@pytest.mark.parametrize(("follows", "seen"), [(0.45, False), (0.55, True), (-0.9, False)])
def test_margins_that_follow_length(follows, seen):
    assert kinds(SETTINGS, [step(0.1, -0.1, follows=follows)] * WINDOW) == ({"length"} if seen else set())


def test_a_warning_is_reported_once_and_again_at_the_end():
    monitor = PreferenceMonitor(SETTINGS)
    texts_by_step = [monitor.step(step(0.0, 0.0) if n < 30 else step(-0.5, -1.0)) for n in range(80)]
    settings = [text for texts in texts_by_step for text in texts]
    assert len(settings) == 2
    (collapse,) = (text for text in settings if "collapsing" in text)
    assert "nats per token less likely than under the reference" in collapse and collapse.startswith("step ")
    warnings = {one["kind"]: one for one in monitor.final_warnings()}
    # First reported when the window's mean has fallen far enough; at the end, the whole window has fallen.
    assert 30 < warnings["collapse"]["step"] < 50 < warnings["collapse"]["at_end"]["step"] == 80
    assert warnings["collapse"]["at_end"]["numbers"]["nats_per_token"] == pytest.approx(-0.25)
    assert "over steps 61 to 80" in warnings["collapse"]["at_end"]["text"]


def test_a_past_warning_is_reported_at_the_end():
    monitor = PreferenceMonitor(SETTINGS)
    for n in range(100):
        monitor.step(step(-0.5, -0.5) if 20 <= n < 50 else step(0.3, 0.3))
    (warning,) = monitor.final_warnings()
    assert warning["kind"] == "collapse" and warning["at_end"] is None


def test_a_training_shorter_than_the_window_is_checked_at_its_end():
    monitor = PreferenceMonitor(SETTINGS)
    assert not [text for _ in range(5) for text in monitor.step(step(-0.5, -1.0))]
    assert {warning["kind"] for warning in monitor.final_warnings()} == {"collapse", "only_rejected"}
    assert "over steps 1 to 5" in monitor.final_warnings()[0]["text"]


def test_a_first_window_without_chosen_completions_causes_no_warning():
    none = {name: 0.0 for name in SUMS if name.startswith("chosen")}
    first = [step(0.0, -0.1) | none] * WINDOW
    assert not kinds(PreferenceLoss(loss="kto"), first + [step(-4.5, -4.9, logp=-45.0)] * WINDOW, from_zero=False)


@pytest.mark.parametrize(("settings", "from_zero"), [(REFERENCE_FREE, True), (SETTINGS, False)])
def test_a_policy_that_differs_from_its_reference_is_compared_with_its_first_window(settings, from_zero):
    first = [step(-4.0, -4.1, logp=-40.0)] * WINDOW
    assert not kinds(settings, first + [step(-4.0, -4.2, logp=-40.0)] * WINDOW, from_zero)
    worse = [step(-4.5, -4.9, logp=-45.0)] * WINDOW
    assert kinds(settings, first + worse, from_zero) == {"collapse", "only_rejected"}
    # Log-probabilities depend on lengths from the start.
    long = [step(-4.0, -4.1, follows=0.6)] * WINDOW
    assert not kinds(settings, long + [step(-4.0, -4.1, follows=0.7)] * WINDOW, from_zero)
    assert kinds(settings, long + [step(-4.0, -4.1, follows=0.9)] * WINDOW, from_zero) == {"length"}


@pytest.mark.parametrize(
    ("stop_if", "reason"),
    [
        ({"margin_below": 0.3}, "margin 0.2 over the last 4 steps is below 0.3"),
        ({"chosen_reward_below": 0.2}, "chosen_reward 0.1 over the last 4 steps is below 0.2"),
        ({"kl_above": 3}, "kl 5 over the last 4 steps is above 3"),
    ],
)
def test_a_threshold_is_compared_with_the_mean_of_its_window(stop_if, reason):
    monitor = PreferenceMonitor(PreferenceSettings(stop_if=StopIf(thresholds=stop_if, window=4, from_step=3)))
    for number in range(1, 5):
        assert monitor.early_stop() is None
        # One good step of four isn't enough for the mean.
        sums = step(0.4, -0.4) | {"kl": 0.0} if number == 1 else step(0.0, 0.0) | {"kl": 8 * 20 / 3}
        monitor.step(sums)
    assert monitor.early_stop() == {"step": 4, "reason": reason}
    well = PreferenceMonitor(PreferenceSettings(stop_if=StopIf(thresholds={"margin_below": -1}, window=1)))
    well.step(step(0.1, -0.1))
    assert well.early_stop() is None
