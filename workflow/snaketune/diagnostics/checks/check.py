"""The result of one check, and the table of several."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from snaketune.engine.model.machine import is_out_of_memory
from snaketune.errors import SnaketuneError, first_line

Status = Literal["passed", "failed", "not checked"]
COLUMNS = ("status", "check", "figure", "expected", "compared")


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


def table(checks: Iterable[dict[str, Any]]) -> list[list[str]]:
    """COLUMNS of each check, as text. Args: checks: as in verify.json."""
    return [
        [
            check["status"],
            check["name"],
            _number(check["figure"]),
            "" if check["tolerance"] is None else f"{'≥' if check['at_least'] else '≤'} {_number(check['tolerance'])}",
            "; ".join(filter(None, (check["compares"], check["reason"]))),
        ]
        for check in checks
    ]


def as_text(checks: Sequence[dict[str, Any]]) -> str:
    """A line for each check, with columns of equal width; failed ones are marked."""
    rows = [list(COLUMNS), *table(checks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
    return "\n".join(("! " if row[0] == "failed" else "  ") + line for row, line in zip(rows, lines))


def _number(value: float | None) -> str:
    """
    >>> _number(0.0), _number(1e-3), _number(0.93751), _number(3.14159e-6), _number(None)
    ('0', '0.001', '0.9375', '3.1e-06', '')
    """
    if value is None:
        return ""
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
