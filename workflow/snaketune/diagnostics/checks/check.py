"""The result of one check."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from snaketune.engine.model.machine import is_out_of_memory
from snaketune.errors import SnaketuneError, first_line

Status = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: such as `packed = alone`.
        compares: what the figure measures, on what; of a check that couldn't be made, what it would compare.
        figure, tolerance: None if it wasn't checked.
        at_least: whether the tolerance is the smallest figure that passes, not the largest.
        reason: why it wasn't checked or where it fails; "" if there is nothing to say.
    """

    name: str
    compares: str
    status: Status
    figure: float | None = None
    tolerance: float | None = None
    at_least: bool = False
    reason: str = ""


def judged(
    name: str, compares: str, figure: float, tolerance: float, *, at_least: bool = False, reason: str = ""
) -> Check:
    """The check of a figure; NaN fails. Args: reason: shown if it fails."""
    # Negated, so that NaN fails too.
    passed = not (figure < tolerance if at_least else figure > tolerance) and not math.isnan(figure)
    # JSON has no NaN.
    known = figure if math.isfinite(figure) else None
    return Check(
        name=name,
        compares=compares,
        status="passed" if passed else "failed",
        figure=known,
        tolerance=tolerance,
        at_least=at_least,
        reason="" if passed else reason or ("" if known is not None else f"the figure is {figure}"),
    )


def not_checked(name: str, compares: str, reason: str) -> Check:
    return Check(name=name, compares=compares, status="not checked", reason=reason)


def attempted(name: str, compares: str, check: Callable[[], Check]) -> Check:
    """The result of `check`; not checked, with the reason, if something that it needs can't be had here."""
    try:
        return check()
    except SnaketuneError as error:
        return not_checked(name, compares, first_line(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return not_checked(name, compares, "memory ran out; lower verify.rows")
