"""Stores that tests read from."""

import pytest

from .stores import moto_server, object_store, web_server


@pytest.fixture(scope="module")
def moto():
    with moto_server() as url:
        yield url


@pytest.fixture
def store(moto, monkeypatch):
    return object_store(moto, monkeypatch)


@pytest.fixture
def web():
    with web_server() as server:
        yield server
