"""Fixture with the parsed default config."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.chdir(ROOT)
    return yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
