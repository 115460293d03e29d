"""The parameters of a model: their number, and those that a training changes, chosen by a pattern of names."""

import torch

from snaketune.errors import SnaketuneError
from snaketune.patterns import TooSlow, fullmatch

# The name of the head of a reward model, as transformers has it in its classes for sequence classification.
REWARD_HEAD = "score"


def train_only(model: torch.nn.Module, pattern: str) -> None:
    """Freeze all parameters whose full names the pattern doesn't match.

    Tied parameters go by the first of their names.

    Raises:
        SnaketuneError: the pattern matches no parameter that can be trained, or takes too long.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    >>> train_only(model, r"1\\..*")
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = list(parameters)
    matches = matching_names(pattern, names, "training.trainable", "name of a parameter", [*names[:2], *names[-1:]])
    for name in parameters.keys() - set(matches):
        parameters[name].requires_grad_(False)


def matching_names(pattern: str, names: list[str], key: str, what: str, examples: list[str]) -> list[str]:
    """Return the names that a pattern of the config matches in full. Raises as `train_only`; `key`, `what` and `examples` are
    for the message."""
    try:
        matches = [name for name in names if fullmatch(pattern, name)]
    except TooSlow as error:
        raise SnaketuneError(f"{key}: {error}") from None
    if not matches:
        raise SnaketuneError(
            f"{key}: the pattern {pattern!r} matches no full {what}; examples of names: {', '.join(examples)}"
        )
    return matches


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters; tied ones count once, packed 4-bit ones by their unpacked size."""
    return sum(map(parameter_numel, model.parameters()))


def parameter_numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of a parameter; 4-bit weights store two per byte."""
    return parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" and parameter.dtype == torch.uint8 else 1)
