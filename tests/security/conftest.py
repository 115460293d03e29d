"""Fixtures of hostile inputs, and the micro project of the workflow's tests."""

import sys

from tests.workflow.conftest import ROOT, finished, fresh, project

from .hostile import mark

# The folder of the report's tests, which invent results.
sys.path.insert(0, str(ROOT / "tests/report"))

__all__ = ["finished", "fresh", "mark", "project"]
