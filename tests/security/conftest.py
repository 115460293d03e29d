"""Fixtures of hostile inputs, and the micro project of the workflow's tests."""

from tests.workflow.conftest import finished, fresh, project

from .hostile import mark

__all__ = ["finished", "fresh", "mark", "project"]
