"""Rows of a dataset of the Hub."""

import sys
from types import SimpleNamespace

import pytest

from snaketune.config.corpus_sources import HubDataset
from snaketune.corpus.reading.sources import read_hub
from snaketune.errors import SnaketuneError


def test_hub(monkeypatch):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": ""}]
    arguments = {}

    def load_dataset(path, name, **rest):
        arguments.update(path=path, name=name, **rest)
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    hub = HubDataset(path="openai/gsm8k", name="main", split="test", revision="abc")
    assert [raw[:3] for raw in read_hub(hub)] == [("row", n, row) for n, row in enumerate(rows, start=1)]
    assert arguments == {"path": "openai/gsm8k", "name": "main", "split": "test", "revision": "abc"}


def test_rows_of_the_hub_have_no_nulls_inside(monkeypatch):
    rows = [{"messages": [{"role": "user", "tool_calls": None, "arguments": {"a": "1", "b": None}}], "label": None}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    (raw,) = read_hub(HubDataset(path="openai/gsm8k", revision="abc"))
    assert raw.value == {"messages": [{"role": "user", "arguments": {"a": "1"}}], "label": None}


def test_nan_in_rows_of_the_hub_is_null(monkeypatch):
    rows = [
        {"score": 0.5, "turns": [{"x": float("nan"), "y": 1}]},
        {"score": float("nan"), "turns": []},
        {"score": 1.0},
    ]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    raws = list(read_hub(HubDataset(path="openai/gsm8k", revision="abc")))
    assert [raw.value for raw in raws] == [
        {"score": 0.5, "turns": [{"y": 1}]},
        {"score": None, "turns": []},
        {"score": 1.0},
    ]
    assert [raw.notes for raw in raws] == [("nan_as_null",), ("nan_as_null",), ()]


def test_hub_dataset_that_cannot_be_loaded(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(SnaketuneError, match=r"openai/gsm8k \(train\) at abc can't be loaded.*no route to host"):
        list(read_hub(HubDataset(path="openai/gsm8k", revision="abc")))
