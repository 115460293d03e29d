"""Tests of the engine as Python alone uses it."""
