"""Names of speakers and their roles."""

import pytest

from snaketune.corpus.values.roles import ROLES
from tests.corpus.row_spelling import read, turns


@pytest.mark.parametrize("name, role", ROLES.items())
@pytest.mark.parametrize("spelling", [str, str.upper, str.title])
def test_names_of_roles(name, role, spelling):
    exchange = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
    at = {"system": 0, "user": 2, "assistant": 3, "tool": 2}[role]
    tail = {"user": turns("A z"), "tool": turns("A z"), "assistant": [], "system": []}[role]
    before = exchange + turns("U y") if role == "assistant" else exchange
    messages = [*before[:at], {"role": spelling(name), "content": "y"}, *before[at:], *tail]
    assert read({"messages": messages})[1].messages[at] == {"role": role, "content": "y"}
