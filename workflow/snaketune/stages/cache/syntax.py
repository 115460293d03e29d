"""The syntax of a module's source as a digest, and what the module imports from the package.

Comments, docstrings, the declaration of a stage and the names of modules don't count, so that a module can be renamed or moved
without making results stale. Parsing all modules takes half a second, at every start of Snakemake and of each job, so CACHE
holds by digest of a source the digest of its syntax, and its imports. It is beside what Python compiled of this module, so that
results from elsewhere can't hide a change of the code.
"""

import ast
import atexit
import contextlib
import hashlib
import json
import os
import sys
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from snaketune.artifacts.manifest import read_json

PACKAGE = "snaketune"
CACHE = Path(cache_from_source(__file__)).with_suffix(".json")
# What may have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Import(NamedTuple):
    """One name that a module imports from the package: `from module import name as bound`."""

    module: str
    name: str
    bound: str


@cache
def syntax_of(source: bytes) -> tuple[str, tuple[Import, ...]]:
    """The digest of a module's syntax tree, without its imports from the package, and these imports; from the cache if they are
    there."""
    key, cached = f"{_parser_version()}-{xxhash.xxh3_128_hexdigest(source)}", _cache()
    if key not in cached:
        cached[key] = _parse(source)
        atexit.unregister(_write_cache)
        atexit.register(_write_cache)
    digest, imports = cached[key]
    return digest, tuple(Import(*fields) for fields in imports)


@cache
def _parser_version() -> str:
    """Digest of this module and of the version of Python, which both decide what the trees look like."""
    return xxhash.xxh3_64_hexdigest(Path(__file__).read_bytes() + repr(sys.version_info[:2]).encode())


@cache
def _cache() -> dict[str, Any]:
    return read_json(CACHE, {})


def _write_cache() -> None:
    """Write the cache if Python writes what it compiles there."""
    if not CACHE.parent.is_dir():
        return
    partial = CACHE.with_suffix(f".{os.getpid()}.partial")
    current = {key: value for key, value in _cache().items() if key.startswith(_parser_version())}
    # Without the cache, the next start takes half a second longer; that is no reason to fail.
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(current), encoding="utf-8")
        partial.replace(CACHE)


def _parse(source: bytes) -> tuple[str, list[Import]]:
    tree = ast.parse(source)
    # Costs and groups shape no result; a declaration's spec and inputs do, and they are in the fingerprint.
    declaration = [node for node in tree.body if _declares_stage(node)]
    tree.body = [node for node in tree.body if node not in declaration]
    imports = [module for node in declaration for module in _declared_modules(node)]
    return hashlib.sha256(shape(tree, imports).encode()).hexdigest(), imports


def _is_from_package(node: Any, imports: list[Import]) -> bool:
    """Whether it is `from snaketune.package.module import name`, and add its names to `imports`. Refuse other ways to import
    from the package: `import snaketune.package.module` names the module wherever it is used."""
    if isinstance(node, ast.Import) and any(alias.name.startswith(f"{PACKAGE}.") for alias in node.names):
        raise SyntaxError(f"line {node.lineno}: write `from {PACKAGE}.package import module`")
    if not isinstance(node, ast.ImportFrom):
        return False
    if node.level or node.module == PACKAGE:
        raise SyntaxError(f"line {node.lineno}: write `from {PACKAGE}.package.module import name`")
    module = node.module or ""
    if not module.startswith(f"{PACKAGE}."):
        return False
    imports += [Import(module, alias.name, alias.asname or alias.name) for alias in node.names]
    return True


def _declares_stage(node: ast.stmt) -> bool:
    """Whether it is `STAGE = Stage(...)`, or one of the imports that it needs."""
    match node:
        case ast.Assign(targets=[ast.Name(id="STAGE")]) | ast.ImportFrom(module="snaketune.stages.declaration"):
            return True
    return False


def _declared_modules(declaration: ast.stmt) -> list[Import]:
    """The modules that a declaration names, such as the launcher of a stage, which are imported when a job runs."""
    keywords = [node for node in ast.walk(declaration) if isinstance(node, ast.keyword)]
    return [
        Import(str(node.value.value), str(node.arg), "STAGE")
        for node in keywords
        if isinstance(node.value, ast.Constant) and str(node.value.value).startswith(f"{PACKAGE}.")
    ]


def shape(node: Any, imports: list[Import]) -> str:
    """A tree as text that is the same under every Python: without positions and fields that only newer versions have.
    Without docstrings and imports from the package too, which are added to `imports`.

    >>> shape(ast.parse("from snaketune.tables import read\\n1"), imports := [])
    '(Module body=[(Expr value=(Constant value=1))])'
    >>> imports
    [Import(module='snaketune.tables', name='read', bound='read')]
    """
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or name in ("type_params", "kind"):
            continue
        if isinstance(value, list):
            items = [item for item in value if not _is_from_package(item, imports)]
            if name == "body" and isinstance(node, DOCUMENTED) and items and _is_text(items[0]):
                items = items[1:] or [ast.Pass()]
            if items:
                parts.append(f"{name}=[{' '.join([shape(item, imports) for item in items])}]")
        else:
            parts.append(f"{name}={shape(value, imports)}")
    return f"({' '.join(parts)})"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
