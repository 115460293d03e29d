"""The values of `training.schedule`, all schedule names of transformers, and their `training.schedule_options`.

This is a table because reading a config must not import transformers or torch. A test checks that it equals transformers'
SchedulerType and the signatures of its functions.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from snaketune.config.base import Fraction, PositiveFloat, PositiveInt
from snaketune.config.suggestions import unknown

Curve = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Properties of a schedule.

    Attributes:
        options: types of its options, by name.
        needs: options of which exactly one is required.
        warms_up: whether it uses `training.warmup_fraction`.
        refused: the reason if it isn't supported.
    """

    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    warms_up: bool = True
    refused: str | None = None


_METRIC = Schedule(refused="it needs a metric on held-out rows, and trainings here don't evaluate while they run")
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
# Default of `lr_end` in transformers.
POLYNOMIAL_END = 1e-7


def check_schedule(name: object) -> None:
    """Raise ValueError with the reason if `name` is a schedule that isn't supported."""
    if isinstance(name, str) and name in SCHEDULES and (reason := SCHEDULES[name].refused):
        raise ValueError(f"{name!r} isn't supported: {reason}")


def checked_options(name: str, options: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    """Validate the options of a schedule and convert each to its type.

    Raises:
        ValueError: an option is unknown or has an invalid value, a required one is missing, alternatives are given together, or
            the final learning rate isn't below the highest one.
    """
    known = SCHEDULES[name]
    checked = {option: _checked(name, option, value) for option, value in options.items()}
    given = [option for option in known.needs if option in options]
    if known.needs and len(given) != 1:
        given_keys = f"found {' and '.join(given)}" if given else "found none"
        raise ValueError(f"schedule {name} needs {' or '.join(known.needs)}; {given_keys}")
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
        # YAML reads yes, on and true as booleans, which pydantic would convert to 1.
        known_type = TypeAdapter(known[option], config=ConfigDict(allow_inf_nan=False))
        return known_type.validate_python(str(value) if isinstance(value, bool) else value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(f"{option}: found {value!r}; {message[:1].lower()}{message[1:]}") from None
