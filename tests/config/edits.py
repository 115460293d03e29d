"""A config with one key edited, and what is said where it is wrong."""

import copy

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError


def put(config: dict, dotted: str, value) -> dict:
    """A copy in which the key has this value."""
    config = copy.deepcopy(config)
    *folders, leaf = dotted.split(".")
    section = config
    for folder in folders:
        section = section[folder] if not isinstance(section, list) else section[int(folder)]
    section[leaf] = value
    return config


def refused(config: dict, said: list[str]) -> None:
    """By a message with all of these words."""
    with pytest.raises(SnaketuneError) as error:
        load(config)
    for words in said:
        assert words in str(error.value)
