"""Monitor of a preference training: warnings of known failure modes, and the early stop of `stop_if`, from means over a window
of optimizer steps and all processes. The window is part of a checkpoint, so a resumed training warns and stops as another does.

    collapse        chosen completions are less likely than under the reference, by more than COLLAPSE_NATS nats per token. A
                    drop of 0.1 raises their perplexity by a tenth, about the difference between a model and one of half its
                    size. DPO lowers both completions, and its loss doesn't limit that (Pal et al., 2024; Razin et al., 2024)
    only_rejected   margins grow while chosen completions lose more than CHOSEN_SHARE of what rejected ones lose: probability
                    moves to completions that are neither. As those of a prompt share many tokens, a smaller drop is usual
    length          the margin correlates with the difference of the lengths by at least MIN_CORRELATION, so length alone
                    explains a quarter of its variance (Park et al., 2024)

Chosen rewards count as lower only by STANDARD_ERRORS standard errors of their mean. If a policy doesn't start as its reference,
or has none, it is compared with its first window; for `length` the correlation must also have risen by MIN_CORRELATION_RISE
since, as log-probabilities depend on lengths from the start.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from snaketune.engine.pair_metrics import Sums, add_steps
from snaketune.engine.preference_metrics import length_correlation, means
from snaketune.engine.preference_settings import WINDOW, PreferenceSettings

COLLAPSE_NATS = 0.1
CHOSEN_SHARE = 0.25
MIN_CORRELATION, MIN_CORRELATION_RISE = 0.5, 0.25
STANDARD_ERRORS = 3.0
# In nats. With a smaller standard deviation of the margins, their correlation with lengths isn't meaningful.
MIN_MARGIN_STD = 1.0
# Text and numbers of a warning.
Found = tuple[str, dict[str, float]]


class PreferenceMonitor:
    """The window of metrics of one training, its warnings and its early stop.

    Attributes:
        warned: the first warning of each kind.
        stopped: the step after which `stop_if` ended the training, and the reason; None if it didn't.
    """

    def __init__(self, settings: PreferenceSettings, from_zero: bool = True):
        """Args: from_zero: whether all log-ratios start at zero, as they do if the policy starts as its reference."""
        self.settings, self.from_zero = settings, from_zero and settings.needs_reference
        self.window = max(WINDOW, settings.stop_if.window if settings.stop_if else 0)
        self.restore({"steps": [], "first": [], "done": 0, "warned": {}})
        self.stopped: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as values that JSON stores exactly."""
        return {"steps": list(self.steps), "first": self.first, "done": self.done, "warned": self.warned}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.steps: deque[Sums] = deque(state["steps"], maxlen=self.window)
        self.first, self.done, self.warned = state["first"], state["done"], state["warned"]

    def step(self, sums: Sums) -> list[str]:
        """Add the sums of an optimizer step. Returns: texts of warnings of a kind that didn't occur before."""
        self.done += 1
        self.steps.append(sums)
        if len(self.first) < WINDOW:
            self.first.append(sums)
        current = self._current_warnings() if self.done >= WINDOW else {}
        new = {kind: warning for kind, warning in current.items() if kind not in self.warned}
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
            if metric in metrics and (metrics[metric] < value if side == "below" else metrics[metric] > value):
                reason = f"{metric} {metrics[metric]:.4g} over the last {stop_if.window} steps is {side} {value:g}"
                return {"step": self.done, "reason": reason}
        return None

    def final_warnings(self) -> list[dict[str, Any]]:
        """The first warning of each kind, with `at_end`: the warning over the last steps, or None if it no longer holds."""
        last = self._current_warnings()
        first = self.warned | last | self.warned
        return [warning | {"kind": kind, "at_end": last.get(kind)} for kind, warning in first.items()]

    def _current_warnings(self) -> dict[str, dict[str, Any]]:
        """The warnings over the last WINDOW steps, or over all steps if there are fewer."""
        newest = list(self.steps)[-WINDOW:]
        if not newest or not (self.from_zero or self.done > WINDOW):
            return {}
        change = _Change(add_steps(newest), None if self.from_zero else add_steps(self.first), self.settings)
        over = f"over steps {self.done - len(newest) + 1} to {self.done}"
        warnings = {}
        for check in (change.collapse, change.only_rejected, change.length):
            if found := check():
                numbers = {name: round(value, 6) for name, value in found[1].items()}
                warnings[check.__name__] = {"step": self.done, "text": f"{found[0]}, {over}", "numbers": numbers}
        return warnings


@dataclass(frozen=True)
class _Change:
    """The change of the metrics since the first window, or relative to the reference if `first` is None."""

    sums: Sums
    first: Sums | None
    settings: PreferenceSettings

    def _reward(self, side: str) -> float:
        """Change of a side's mean reward; that of the reference is 0."""
        now, before = (
            window[f"{side}_reward"] / max(window[side], 1) if window else 0.0 for window in (self.sums, self.first)
        )
        return now - before

    def _chosen_reward_fell(self) -> bool:
        """Whether the mean reward of chosen completions is lower by more than STANDARD_ERRORS standard errors."""
        squared_error = 0.0
        for window in filter(None, (self.sums, self.first)):
            number = max(window["chosen"], 1)
            mean = window["chosen_reward"] / number
            squared_error += max(window["chosen_reward_squared"] / number - mean**2, 0.0) / number
        return self._reward("chosen") < -STANDARD_ERRORS * math.sqrt(squared_error)

    def collapse(self) -> Found | None:
        sums, first, tokens = self.sums, self.first, max(self.sums["chosen_tokens"], 1)
        if first is None:
            nats = sums["chosen_reward"] / self.settings.beta / tokens
        elif first["chosen"]:
            nats = sums["chosen_logp"] / tokens - first["chosen_logp"] / max(first["chosen_tokens"], 1)
        else:
            return None
        if not nats < -COLLAPSE_NATS or not self._chosen_reward_fell():
            return None
        metrics, since = means(sums, self.settings), "than at the start" if first else "than under the reference"
        return (
            f"chosen completions are collapsing: {-nats:.2f} nats per token less likely {since} "
            f"(log-probability {metrics['chosen_logp_per_token']:.2f} per token, reward {metrics['chosen_reward']:.3g})",
            {"nats_per_token": nats, "chosen_reward": metrics["chosen_reward"]},
        )

    def only_rejected(self) -> Found | None:
        if self.first and not (self.first["chosen"] and self.first["rejected"]):
            return None
        chosen, rejected = self._reward("chosen"), self._reward("rejected")
        # Both changes must be negative, that of rejected completions more so.
        if not rejected < chosen or not chosen < CHOSEN_SHARE * rejected or not self._chosen_reward_fell():
            return None
        return (
            f"margins grow only by pushing rejected completions down: their reward changed by {rejected:.3g}, that of chosen "
            f"ones by {chosen:.3g}",
            {"chosen_reward_change": chosen, "rejected_reward_change": rejected},
        )

    def length(self) -> Found | None:
        sums, pairs = self.sums, self.sums["pairs"]
        correlation = None if self.settings.unpaired else length_correlation(sums)
        if correlation is None or correlation < max(MIN_CORRELATION, STANDARD_ERRORS / math.sqrt(pairs)):
            return None
        spread = math.sqrt(sums["margin_squared"] / pairs - (sums["margin"] / pairs) ** 2) / self.settings.beta
        if self.first is None and spread < MIN_MARGIN_STD:
            return None
        if self.first and correlation - (length_correlation(self.first) or 0.0) < MIN_CORRELATION_RISE:
            return None
        longer, tokens = sums["longer"] / pairs, sums["difference"] / pairs
        return (
            f"margins follow length: their correlation with chosen minus rejected tokens is {correlation:.2f} (chosen "
            f"completions are longer in {longer:.0%} of the pairs, by {tokens:.1f} tokens on average)",
            {"correlation": correlation, "share_chosen_longer": longer, "mean_difference_tokens": tokens},
        )
