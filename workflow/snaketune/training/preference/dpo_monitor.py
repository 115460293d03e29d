"""How a preference training is going: the known ways in which one fails, with numbers, and whether `stop_if` ends it.

Both look at means over a window of optimizer steps, after every step and over all processes, whatever is logged and however
the training was cut off: the window is part of a checkpoint. Warnings look at WINDOW steps.

    collapse        chosen completions are less likely than under the reference, by FALL nats per token. By 0.1 their perplexity
                    is a tenth worse, about what separates a model from one of half its size; DPO lowers both completions and
                    nothing in its loss stops that (Pal et al., 2024; Razin et al., 2024)
    only_rejected   margins grow, and chosen completions lose at least SHARE of what rejected ones lose: probability goes to
                    what neither says. A lesser loss is what DPO mostly does, as completions of one prompt have much in common
    length          the margin follows the difference of the lengths, with a correlation of CORRELATION, so that a quarter of
                    its variance is told by length alone (Park et al., 2024)

A mean counts as changed where it lies SURE standard errors off, so a warning isn't the noise of a few pairs. Where a policy
doesn't start as its reference, or has none, it is held against its first window; for `length` the correlation must have risen
by RISEN since, as log-probabilities follow lengths from the beginning.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from snaketune.config.losses import WINDOW, PreferenceLoss
from snaketune.training.preference.metrics import Sums, added, length_correlation, means

FALL = 0.1
SHARE = 0.25
CORRELATION, RISEN = 0.5, 0.25
SURE = 3.0
# Nats by which margins must differ before what they follow means anything.
SPREAD = 1.0


class Course:
    """The windows of one training.

    Attributes:
        warned: by kind, the warning as it was first seen.
        stopped: the step after which `stop_if` ended the training, and why; None while it goes on.
    """

    def __init__(self, told: PreferenceLoss, from_zero: bool = True):
        """Args: from_zero: whether all log-ratios are zero at the beginning, as where the policy starts as its reference."""
        self.told, self.from_zero = told, from_zero and told.needs_reference
        self.window = max(WINDOW, told.stop_if.window if told.stop_if else 0)
        self.steps: deque[Sums] = deque(maxlen=self.window)
        self.first: list[Sums] = []
        self.done = 0
        self.warned: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """As JSON holds it, to the last bit."""
        return {"steps": list(self.steps), "first": self.first, "done": self.done, "warned": self.warned}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.steps = deque(state["steps"], maxlen=self.window)
        self.first, self.done, self.warned = state["first"], state["done"], state["warned"]

    def step(self, sums: Sums) -> list[str]:
        """After each optimizer step. Returns: what was seen for the first time, as warnings."""
        self.done += 1
        self.steps.append(sums)
        if len(self.first) < WINDOW:
            self.first.append(sums)
        if self.done < WINDOW:
            return []
        new = {kind: found for kind, found in self._seen().items() if kind not in self.warned}
        self.warned |= new
        return [f"step {found['step']}: {found['text']}" for found in new.values()]

    def verdict(self) -> dict[str, Any] | None:
        """Whether `stop_if` ends the training here: `{step, reason}` if it does."""
        asked = self.told.stop_if
        if not asked or self.done < max(asked.window, asked.from_step):
            return None
        found = means(added(list(self.steps)[-asked.window :]), self.told)
        for threshold, value in asked.thresholds.items():
            metric, _, side = threshold.rpartition("_")
            beyond = metric in found and (found[metric] < value if side == "below" else found[metric] > value)
            if beyond:
                reason = f"{metric} {found[metric]:.4g} over the last {asked.window} steps is {side} {value:g}"
                return {"step": self.done, "reason": reason}
        return None

    def at_end(self) -> list[dict[str, Any]]:
        """Every warning as it was first seen, with its numbers over the last steps where it still holds, else None."""
        last = self._seen()
        seen = self.warned | {kind: found for kind, found in last.items() if kind not in self.warned}
        return [found | {"kind": kind, "at_end": last.get(kind)} for kind, found in seen.items()]

    def _seen(self) -> dict[str, dict[str, Any]]:
        """The warnings of the newest WINDOW steps, or as many as there are."""
        newest = list(self.steps)[-WINDOW:]
        compared = self.from_zero or self.done > WINDOW
        if not newest or not compared:
            return {}
        sums, first = added(newest), None if self.from_zero else added(self.first)
        over = f"over steps {self.done - len(newest) + 1} to {self.done}"
        looks: dict[str, Callable[[Sums, Sums | None, PreferenceLoss], tuple[str, dict[str, float]] | None]] = {
            "collapse": _collapse,
            "only_rejected": _only_rejected,
            "length": _length,
        }
        found = {kind: look(sums, first, self.told) for kind, look in looks.items()}
        return {
            kind: {"step": self.done, "text": f"{what[0]}, {over}", "numbers": _rounded(what[1])}
            for kind, what in found.items()
            if what
        }


def _changed(sums: Sums, first: Sums | None, side: str) -> float:
    """By how much a side's mean reward has changed, since the first window or from the reference's zero."""
    before = first[f"{side}_reward"] / max(first[side], 1) if first else 0.0
    return sums[f"{side}_reward"] / max(sums[side], 1) - before


def _fell(sums: Sums, first: Sums | None) -> bool:
    """Whether the mean reward of chosen completions surely is lower than before."""
    error = math.sqrt(sum(_squared_error(some) for some in (sums, first) if some))
    return _changed(sums, first, "chosen") < -SURE * error


def _squared_error(sums: Sums) -> float:
    """Of the mean of chosen rewards."""
    number = max(sums["chosen"], 1)
    mean = sums["chosen_reward"] / number
    return max(sums["chosen_reward_squared"] / number - mean**2, 0.0) / number


def _per_token(sums: Sums, first: Sums | None, told: PreferenceLoss) -> float:
    """By how much the log-probability of a chosen token has changed, in nats."""
    tokens = max(sums["chosen_tokens"], 1)
    if first is None:
        return sums["chosen_reward"] / told.beta / tokens
    return sums["chosen_logp"] / tokens - first["chosen_logp"] / max(first["chosen_tokens"], 1)


def _collapse(sums: Sums, first: Sums | None, told: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    if first and not first["chosen"]:
        return None
    change, found = _per_token(sums, first, told), means(sums, told)
    if not change < -FALL or not _fell(sums, first):
        return None
    since = "than at the beginning" if first else "than under the reference"
    return (
        f"chosen completions are collapsing: {-change:.2f} nats per token less likely {since} "
        f"(log-probability {found['chosen_logp_per_token']:.2f} per token, reward {found['chosen_reward']:.3g})",
        {"nats_per_token": change, "chosen_reward": found["chosen_reward"]},
    )


def _only_rejected(sums: Sums, first: Sums | None, told: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    if first and not (first["chosen"] and first["rejected"]):
        return None
    chosen, rejected = _changed(sums, first, "chosen"), _changed(sums, first, "rejected")
    # Both below zero, rejected ones further.
    if not rejected < chosen or not chosen < SHARE * rejected or not _fell(sums, first):
        return None
    return (
        f"margins grow only by pushing rejected completions down: their reward changed by {rejected:.3g}, that of chosen ones "
        f"by {chosen:.3g}",
        {"chosen_reward_change": chosen, "rejected_reward_change": rejected},
    )


def _length(sums: Sums, first: Sums | None, told: PreferenceLoss) -> tuple[str, dict[str, float]] | None:
    correlation = None if told.unpaired else length_correlation(sums)
    if correlation is None or correlation < max(CORRELATION, SURE / math.sqrt(sums["pairs"])):
        return None
    before = length_correlation(first) if first else 0.0
    mean = sums["margin"] / sums["pairs"]
    spread = math.sqrt(sums["margin_squared"] / sums["pairs"] - mean**2) / told.beta
    if (first and correlation - (before or 0.0) < RISEN) or (first is None and spread < SPREAD):
        return None
    longer, tokens = sums["longer"] / sums["pairs"], sums["difference"] / sums["pairs"]
    return (
        f"margins follow length: their correlation with chosen tokens less rejected tokens is {correlation:.2f} (chosen ones "
        f"are longer in {longer:.0%} of the pairs, by {tokens:.1f} tokens in the mean)",
        {"correlation": correlation, "share_chosen_longer": longer, "mean_difference_tokens": tokens},
    )


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in numbers.items()}
