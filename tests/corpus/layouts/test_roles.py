"""Names of speakers and their roles."""

import pytest

from snaketune.corpus.values.roles import NAMES
from tests.corpus.row_spelling import read, turns


@pytest.mark.parametrize("role", NAMES)
def test_names_of_roles(role):
    exchange = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
    at = {"system": 0, "user": 2, "assistant": 3, "tool": 2}[role]
    tail = {"user": turns("A z"), "tool": turns("A z"), "assistant": [], "system": []}[role]
    before = exchange + turns("U y") if role == "assistant" else exchange
    for name in NAMES[role]:
        for spelling in (name, name.upper(), name.title()):
            messages = [*before[:at], {"role": spelling, "content": "y"}, *before[at:], *tail]
            assert read({"messages": messages})[1].messages[at] == {"role": role, "content": "y"}
