"""Rows go from reading to layouts to selecting and then to the stage, and imports never go back up."""

import ast
from pathlib import Path

import snaketune

ROOM = Path(snaketune.__file__).parent / "corpus"
ORDER = ("reading", "layouts", "selecting", "")
# Whatever every sub-room may use: rows as they are found and made, and how messages quote them.
BELOW = {"rows", "raw", "excerpts"}


def test_no_sub_room_imports_upward():
    for path in ROOM.rglob("*.py"):
        here, module = path.parent.relative_to(ROOM).name, path.stem
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snaketune.corpus."):
                room, _, name = node.module.removeprefix("snaketune.corpus.").rpartition(".")
                if not room and name in BELOW:
                    continue
                assert not (not here and module in BELOW), f"{path} imports {node.module}"
                assert ORDER.index(room) <= ORDER.index(here), f"{path} imports {node.module}"
