"""Edit one key of a config, check the error message of an invalid one, and what docs/write_config.py generates."""

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError

described = spec_from_file_location("write_config", Path(__file__).parents[2] / "docs/write_config.py")
generated = module_from_spec(described)
described.loader.exec_module(generated)


def put(config: dict, dotted: str, value) -> dict:
    """Return a copy in which the key has this value."""
    config = copy.deepcopy(config)
    *folders, leaf = dotted.split(".")
    section = config
    for folder in folders:
        section = section[folder] if not isinstance(section, list) else section[int(folder)]
    section[leaf] = value
    return config


def refused(config: dict, messages: list[str]) -> None:
    """Check that the config is refused with a message that contains all of these texts."""
    with pytest.raises(SnaketuneError) as error:
        load(config)
    for words in messages:
        assert words in str(error.value)
