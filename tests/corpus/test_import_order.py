"""Imports within the corpus package follow the rows: reading, values, layouts, selecting, then the stage; never back."""

import ast
from pathlib import Path

import snaketune

PACKAGE = Path(snaketune.__file__).parent / "corpus"
ORDER = ("reading", "values", "layouts", "selecting", "")
# Modules that every sub-package may import: raw and canonical rows, and how messages quote them.
SHARED = {"rows", "excerpts"}


def test_no_sub_package_imports_from_a_later_one():
    for path in PACKAGE.rglob("*.py"):
        package, module = path.parent.relative_to(PACKAGE).name, path.stem
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snaketune.corpus."):
                imported, _, name = node.module.removeprefix("snaketune.corpus.").rpartition(".")
                if not imported and name in ORDER:
                    imported = name
                if not imported and name in SHARED:
                    continue
                assert not (not package and module in SHARED), f"{path} imports {node.module}"
                assert ORDER.index(imported) <= ORDER.index(package), f"{path} imports {node.module}"
