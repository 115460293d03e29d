"""docs/security.md names a test for each line, and every test here is in it."""

import ast
import re
from pathlib import Path

from tests.workflow.conftest import ROOT

HERE = Path(__file__).parent


def test_every_line_has_its_test_and_every_test_its_line():
    listed = re.findall(r"`(test_\w+\.py::test_\w+)`", (ROOT / "docs/security.md").read_text(encoding="utf-8"))
    there = {
        f"{path.name}::{node.name}"
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert set(listed) == there
