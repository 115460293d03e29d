"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import snaketune

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(snaketune.__path__, "snaketune.") if "__main__" not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    namespace = vars(module) | {"torch": importlib.import_module("torch"), "np": importlib.import_module("numpy")}
    assert doctest.testmod(module, extraglobs=namespace).failed == 0
