"""The parameters that a training changes, chosen by a pattern of names (`training.trainable`)."""

import torch

from snaketune.errors import SnaketuneError
from snaketune.patterns import TooSlow, fullmatch


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
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    try:
        matches = [name for name in parameters if fullmatch(pattern, name)]
    except TooSlow as error:
        raise SnaketuneError(f"training.trainable: {error}") from None
    if not matches:
        names = list(parameters)
        raise SnaketuneError(
            f"training.trainable: the pattern {pattern!r} matches no full name of a parameter; examples of names: "
            f"{', '.join([*names[:2], names[-1]])}"
        )
    for name in parameters.keys() - set(matches):
        parameters[name].requires_grad_(False)
