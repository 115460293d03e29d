"""Which schedules `training.schedule` may name: all that transformers names; and what `training.schedule_options` may say.

A table, because neither transformers nor torch may be imported where a config is read; a test holds it equal to transformers'
SchedulerType and to the signatures of its functions.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from snaketune.config.base import Fraction, PositiveFloat, PositiveInt
from snaketune.config.suggestions import unknown

Curve = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is known of a schedule.

    Attributes:
        options: the type of each, by name.
        needs: options of which exactly one must be given.
        warms_up: whether it reads `training.warmup_fraction`.
        refused: why it can't be had.
    """

    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    warms_up: bool = True
    refused: str | None = None


_METRIC = Schedule(refused="it goes by a metric on held-out rows, and trainings here evaluate none while they run")
_FLOOR = {"num_cycles": PositiveFloat, "min_lr": PositiveFloat, "min_lr_rate": Fraction}

SCHEDULES: dict[str, Schedule] = {
    "linear": Schedule(),
    "cosine": Schedule(options={"num_cycles": PositiveFloat}),
    "cosine_with_restarts": Schedule(options={"num_cycles": PositiveInt}),
    "polynomial": Schedule(options={"lr_end": Annotated[float, Field(ge=0)], "power": PositiveFloat}),
    "constant": Schedule(warms_up=False),
    "constant_with_warmup": Schedule(),
    "inverse_sqrt": Schedule(options={"timescale": PositiveInt}),
    "reduce_lr_on_plateau": _METRIC,
    "cosine_with_min_lr": Schedule(options=_FLOOR, needs=("min_lr", "min_lr_rate")),
    "cosine_warmup_with_min_lr": Schedule(
        options=_FLOOR | {"warmup_lr_rate": Fraction}, needs=("min_lr", "min_lr_rate")
    ),
    "warmup_stable_decay": Schedule(
        options={
            "num_decay_steps": PositiveInt,
            "num_stable_steps": PositiveInt,
            "warmup_type": Curve,
            "decay_type": Curve,
            "min_lr_ratio": Fraction,
            "num_cycles": PositiveFloat,
        },
        needs=("num_decay_steps",),
    ),
    "greedy": _METRIC,
}

ScheduleName = Literal[tuple(name for name, schedule in SCHEDULES.items() if not schedule.refused)]
# What transformers takes where nothing is said.
POLYNOMIAL_END = 1e-7


def check_schedule(name: object) -> None:
    """Raise ValueError with the reason if `name` is a schedule that is refused."""
    if isinstance(name, str) and name in SCHEDULES and (reason := SCHEDULES[name].refused):
        raise ValueError(f"{name!r} can't be had: {reason}")


def checked_options(name: str, options: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    """The options of a schedule, each in its own type.

    Raises:
        ValueError: an option that the schedule doesn't have, one of a wrong value, one too many or too few.
    """
    known = SCHEDULES[name]
    checked = {option: _checked(name, option, value) for option, value in options.items()}
    given = [option for option in known.needs if option in options]
    if known.needs and len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "found none"
        raise ValueError(f"schedule {name} needs {' or '.join(known.needs)}; {found}")
    end = checked.get("min_lr", checked.get("lr_end", POLYNOMIAL_END if name == "polynomial" else 0.0))
    if end >= learning_rate:
        raise ValueError(f"schedule {name} falls to {end:g}, which isn't below learning_rate {learning_rate:g}")
    return checked


def _checked(name: str, option: str, value: Any) -> Any:
    known = SCHEDULES[name].options
    if option not in known:
        raise ValueError(
            f"schedule {name} has no option {option!r}{unknown(option, known)}"
            if known
            else f"schedule {name} has no options; found {option!r}"
        )
    try:
        # YAML reads yes, on and true alike, and pydantic would take them for 1.
        known_type = TypeAdapter(known[option], config=ConfigDict(allow_inf_nan=False))
        return known_type.validate_python(str(value) if isinstance(value, bool) else value)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ValueError(f"{option}: found {value!r}; {said[:1].lower()}{said[1:]}") from None
