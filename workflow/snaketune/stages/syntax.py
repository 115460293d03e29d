"""What a module's source says, as a digest, whatever its comments and docstrings and the stage that it declares; and which
modules of the package it imports.

Taking all modules apart costs half a second, at every start of Snakemake and of each job. So what came out is noted below the
results, by the very bytes that were read, which is as good as looking again.

    results/.work/.code.json    by digest of a source: the digest of its syntax, and the imports
"""

import ast
import atexit
import contextlib
import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

PACKAGE = "snaketune"
NOTES = Path("results/.work/.code.json")


@cache
def syntax_of(source: bytes) -> tuple[str, list[str]]:
    """Digest of the syntax tree without comments, docstrings and the declaration of a stage, and the names below the package
    that are imported."""
    key = f"{_taken_apart_by()}-{xxhash.xxh3_128_hexdigest(source)}"
    known = _notes()
    if key not in known:
        known[key] = _taken_apart(source)
        atexit.unregister(_keep)
        atexit.register(_keep)
    digest, imports = known[key]
    return digest, imports


@cache
def _taken_apart_by() -> str:
    """This very module, and the Python whose trees they are."""
    own = Path(__file__).read_bytes() + repr(sys.version_info[:2]).encode()
    return xxhash.xxh3_64_hexdigest(own)


@cache
def _notes() -> dict[str, Any]:
    try:
        found = json.loads(NOTES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep() -> None:
    """Where there are results; a plan alone leaves nothing behind."""
    if not NOTES.parent.is_dir():
        return
    partial = NOTES.with_name(f".code.{os.getpid()}.partial")
    current = {key: value for key, value in _notes().items() if key.startswith(_taken_apart_by())}
    # A folder that can't be written to costs half a second, and nothing else.
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(current), encoding="utf-8")
        partial.replace(NOTES)


def _taken_apart(source: bytes) -> tuple[str, list[str]]:
    tree = ast.parse(source)
    # Costs and groups shape no result; what of a declaration does (spec, inputs) is in the fingerprint.
    tree.body = [node for node in tree.body if not _declares_stage(node)]
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from snaketune.packing import plan` names a module, `from snaketune.packing.plan import build` its content.
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    ours = {name for name in imports if name.startswith(f"{PACKAGE}.")}
    return hashlib.sha256(_shape(tree).encode()).hexdigest(), sorted(ours)


def _declares_stage(node: ast.stmt) -> bool:
    """Whether it is `STAGE = Stage(...)`, or imports what that is made of."""
    match node:
        case ast.Assign(targets=[ast.Name(id="STAGE")]):
            return True
        case ast.ImportFrom(module="snaketune.stages.declaration"):
            return True
    return False


def _shape(node: Any) -> str:
    """A tree as text, the same under every Python: no positions, and no fields that only newer ones have.

    >>> _shape(ast.parse("x = 1").body[0].value)
    '(Constant value=1)'
    """
    if isinstance(node, list):
        return f"[{' '.join([_shape(item) for item in node])}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if value is not None and value != [] and name not in ("type_params", "kind"):
            parts.append(f"{name}={_shape(value)}")
    return f"({' '.join(parts)})"


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            node.body = rest or [ast.Pass()]
