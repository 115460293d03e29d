"""Monitor of a preference training: warnings of known failure modes, and the early stop of `stop_if`.

Both use means over a window of optimizer steps and all processes, and are evaluated after every step, independent of the
logging interval. The window is part of a checkpoint, so a resumed training warns and stops as an uninterrupted one. Warnings
use WINDOW steps:

    collapse        chosen completions are less likely than under the reference, by more than COLLAPSE_NATS nats per token. A
                    drop of 0.1 raises their perplexity by a tenth, about the difference between a model and one of half its
                    size. DPO lowers both completions, and its loss doesn't limit that (Pal et al., 2024; Razin et al., 2024)
    only_rejected   margins grow while chosen completions lose more than CHOSEN_SHARE of what rejected ones lose: probability
                    moves to completions that are neither. A smaller drop is usual for DPO, as the completions of a prompt share
                    many tokens
    length          the margin correlates with the difference of the lengths by at least MIN_CORRELATION, so length alone
                    explains a quarter of its variance (Park et al., 2024)

The mean of chosen rewards counts as lower only if it differs by STANDARD_ERRORS standard errors, so the noise of a few pairs
doesn't cause a warning. If a policy doesn't start as its reference, or has none, it is compared with its first window; for
`length` the correlation must also have risen by MIN_CORRELATION_RISE since, as log-probabilities depend on lengths from the
start.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from snaketune.config.losses import WINDOW, PreferenceLoss
from snaketune.training.preference.metrics import Sums, add_steps, length_correlation, means

COLLAPSE_NATS = 0.1
CHOSEN_SHARE = 0.25
MIN_CORRELATION, MIN_CORRELATION_RISE = 0.5, 0.25
STANDARD_ERRORS = 3.0
# In nats. With a smaller standard deviation of the margins, their correlation with lengths isn't meaningful.
MIN_MARGIN_STD = 1.0


class DpoMonitor:
    """The window of metrics of one training, its warnings and its early stop.

    Attributes:
        warned: the first warning of each kind.
        stopped: the step after which `stop_if` ended the training, and the reason; None if it didn't.
    """

    def __init__(self, settings: PreferenceLoss, from_zero: bool = True):
        """Args: from_zero: whether all log-ratios start at zero, as they do if the policy starts as its reference."""
        self.settings, self.from_zero = settings, from_zero and settings.needs_reference
        self.window = max(WINDOW, settings.stop_if.window if settings.stop_if else 0)
        self.steps: deque[Sums] = deque(maxlen=self.window)
        self.first: list[Sums] = []
        self.done = 0
        self.warned: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as values that JSON stores exactly."""
        return {"steps": list(self.steps), "first": self.first, "done": self.done, "warned": self.warned}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.steps = deque(state["steps"], maxlen=self.window)
        self.first, self.done, self.warned = state["first"], state["done"], state["warned"]

    def step(self, sums: Sums) -> list[str]:
        """Add the sums of an optimizer step. Returns: texts of warnings of a kind that didn't occur before."""
        self.done += 1
        self.steps.append(sums)
        if len(self.first) < WINDOW:
            self.first.append(sums)
        if self.done < WINDOW:
            return []
        new = {kind: warning for kind, warning in self._current_warnings().items() if kind not in self.warned}
        self.warned |= new
        return [f"step {warning['step']}: {warning['text']}" for warning in new.values()]

    def early_stop(self) -> dict[str, Any] | None:
        """Return `{step, reason}` if `stop_if` ends the training after this step, else None."""
        stop_if = self.settings.stop_if
        if not stop_if or self.done < max(stop_if.window, stop_if.from_step):
            return None
        metrics = means(add_steps(list(self.steps)[-stop_if.window :]), self.settings)
        for threshold, value in stop_if.thresholds.items():
            metric, _, side = threshold.rpartition("_")
            beyond = metric in metrics and (metrics[metric] < value if side == "below" else metrics[metric] > value)
            if beyond:
                reason = f"{metric} {metrics[metric]:.4g} over the last {stop_if.window} steps is {side} {value:g}"
                return {"step": self.done, "reason": reason}
        return None

    def final_warnings(self) -> list[dict[str, Any]]:
        """The first warning of each kind; its key `at_end` holds the warning over the last steps, or None if it no longer
        holds."""
        last = self._current_warnings()
        first = self.warned | {kind: warning for kind, warning in last.items() if kind not in self.warned}
        return [warning | {"kind": kind, "at_end": last.get(kind)} for kind, warning in first.items()]

    def _current_warnings(self) -> dict[str, dict[str, Any]]:
        """The warnings over the last WINDOW steps, or over all steps if there are fewer."""
        newest = list(self.steps)[-WINDOW:]
        compared = self.from_zero or self.done > WINDOW
        if not newest or not compared:
            return {}
        sums, first = add_steps(newest), None if self.from_zero else add_steps(self.first)
        over = f"over steps {self.done - len(newest) + 1} to {self.done}"
        checks: dict[str, Callable[[Sums, Sums | None, PreferenceLoss], tuple[str, dict[str, float]] | None]] = {
            "collapse": _collapse,
            "only_rejected": _only_rejected,
            "length": _length,
        }
        warnings = {kind: check(sums, first, self.settings) for kind, check in checks.items()}
        return {
            kind: {"step": self.done, "text": f"{warning[0]}, {over}", "numbers": _rounded(warning[1])}
            for kind, warning in warnings.items()
            if warning
        }


def _reward_change(sums: Sums, first: Sums | None, side: str) -> float:
    """Change of a side's mean reward since the first window, or from 0, the reference's, if `first` is None."""
    before = first[f"{side}_reward"] / max(first[side], 1) if first else 0.0
    return sums[f"{side}_reward"] / max(sums[side], 1) - before


def _chosen_reward_fell(sums: Sums, first: Sums | None) -> bool:
    """Whether the mean reward of chosen completions is lower by more than STANDARD_ERRORS standard errors."""
    error = math.sqrt(sum(_squared_error(window) for window in (sums, first) if window))
    return _reward_change(sums, first, "chosen") < -STANDARD_ERRORS * error


def _squared_error(sums: Sums) -> float:
    """Squared standard error of the mean of chosen rewards."""
    number = max(sums["chosen"], 1)
    mean = sums["chosen_reward"] / number
    return max(sums["chosen_reward_squared"] / number - mean**2, 0.0) / number


def _chosen_logp_change(sums: Sums, first: Sums | None, settings: PreferenceLoss) -> float:
    """Change of the mean log-probability of chosen tokens since the first window, or relative to the reference, in nats."""
    tokens = max(sums["chosen_tokens"], 1)
    if first is None:
        return sums["chosen_reward"] / settings.beta / tokens
    return sums["chosen_logp"] / tokens - first["chosen_logp"] / max(first["chosen_tokens"], 1)


def _collapse(sums: Sums, first: Sums | None, settings: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    if first and not first["chosen"]:
        return None
    change, metrics = _chosen_logp_change(sums, first, settings), means(sums, settings)
    if not change < -COLLAPSE_NATS or not _chosen_reward_fell(sums, first):
        return None
    since = "than at the start" if first else "than under the reference"
    return (
        f"chosen completions are collapsing: {-change:.2f} nats per token less likely {since} "
        f"(log-probability {metrics['chosen_logp_per_token']:.2f} per token, reward {metrics['chosen_reward']:.3g})",
        {"nats_per_token": change, "chosen_reward": metrics["chosen_reward"]},
    )


def _only_rejected(sums: Sums, first: Sums | None, settings: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    if first and not (first["chosen"] and first["rejected"]):
        return None
    chosen, rejected = _reward_change(sums, first, "chosen"), _reward_change(sums, first, "rejected")
    # Both changes must be negative, that of rejected completions more so.
    if not rejected < chosen or not chosen < CHOSEN_SHARE * rejected or not _chosen_reward_fell(sums, first):
        return None
    return (
        f"margins grow only by pushing rejected completions down: their reward changed by {rejected:.3g}, that of chosen ones "
        f"by {chosen:.3g}",
        {"chosen_reward_change": chosen, "rejected_reward_change": rejected},
    )


def _length(sums: Sums, first: Sums | None, settings: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    correlation = None if settings.unpaired else length_correlation(sums)
    if correlation is None or correlation < max(MIN_CORRELATION, STANDARD_ERRORS / math.sqrt(sums["pairs"])):
        return None
    before = length_correlation(first) if first else 0.0
    mean = sums["margin"] / sums["pairs"]
    spread = math.sqrt(sums["margin_squared"] / sums["pairs"] - mean**2) / settings.beta
    if (first and correlation - (before or 0.0) < MIN_CORRELATION_RISE) or (first is None and spread < MIN_MARGIN_STD):
        return None
    longer, tokens = sums["longer"] / sums["pairs"], sums["difference"] / sums["pairs"]
    return (
        f"margins follow length: their correlation with chosen minus rejected tokens is {correlation:.2f} (chosen completions "
        f"are longer in {longer:.0%} of the pairs, by {tokens:.1f} tokens on average)",
        {"correlation": correlation, "share_chosen_longer": longer, "mean_difference_tokens": tokens},
    )


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in numbers.items()}
