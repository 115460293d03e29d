"""The syntax of a module's source as a digest, and what the module imports from the package.

Comments, docstrings, the declaration of a stage and the names of modules don't count, so that a module can be renamed or moved
without making results stale. Parsing all modules takes half a second, at every start of Snakemake and of each job, so CACHE
holds by digest of a source the digest of its syntax, and its imports. It is beside what Python compiled of this module, so that
results from elsewhere can't hide a change of the code.

A stage imports models of settings for their values, which are in its spec. So of modules of settings only counts, by each name
that a stage imports, what is computed from the values: the methods of these models, and constants and functions. A field, its
default, its description and its validators count for no stage.
"""

import ast
import atexit
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
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
# A name, the module that it is taken from, and whether it is only the type of a field.
Used = tuple[str, str, bool]


class Import(NamedTuple):
    """One name that a module imports from the package: `from module import name as bound`."""

    module: str
    name: str
    bound: str


@cache
def syntax_of(source: bytes) -> tuple[str, tuple[Import, ...]]:
    """The digest of a module's syntax tree, without its imports from the package, and these imports."""
    digest, imports = parsed(source, _parse)
    return digest, tuple(Import(*fields) for fields in imports)


def parsed(source: bytes, parse: Callable[[bytes], Any]) -> Any:
    """The result of `parse(source)`, a JSON value, from the cache if it is there."""
    key = f"{_parser_version()}-{parse.__name__}-{xxhash.xxh3_128_hexdigest(source)}"
    cached = _cache()
    if key not in cached:
        cached[key] = parse(source)
        atexit.unregister(_write_cache)
        atexit.register(_write_cache)
    return cached[key]


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


class Definition(NamedTuple):
    """What a module defines under one name.

    Attributes:
        digest: of its syntax; of a model, that of its methods, "" if it has none.
        names: names of the module in this code.
        types: of a model, the names of its bases and in the annotations of its fields.
    """

    digest: str
    names: list[str]
    types: list[str]


def computing(imports: Iterable[Import], source_of: Callable[[str], bytes | None]) -> Iterator[str]:
    """Yield the digests of all that imported names compute, and of what that uses in other modules.

    Args:
        source_of: the source of a module that is counted by its definitions; None for any other.
    """
    waiting: list[Used] = [(entry.name, entry.module, False) for entry in imports]
    seen: set[Used] = set()
    while waiting:
        used = name, module, as_type = waiting.pop()
        if used in seen or (source := source_of(module)) is None:
            continue
        seen.add(used)
        defined, imported = definitions_of(source)
        if name in imported:
            waiting.append((imported[name].name, imported[name].module, as_type))
        for definition in defined.get(name, ()):
            is_model = bool(definition.types)
            if definition.digest and (is_model or not as_type):
                yield definition.digest
            # An alias of types leads to them; its own text, such as the choices of a key, decides about values.
            waiting += [(other, module, as_type and not is_model) for other in definition.names]
            waiting += [(other, module, True) for other in definition.types]


@cache
def definitions_of(source: bytes) -> tuple[dict[str, list[Definition]], dict[str, Import]]:
    """The definitions at the top of a module by name, and its imports from the package by the names that it binds."""
    defined, imports = parsed(source, _define)
    definitions = {name: [Definition(*fields) for fields in entries] for name, entries in defined.items()}
    return definitions, {fields[2]: Import(*fields) for fields in imports}


def _define(source: bytes) -> tuple[dict[str, list[Definition]], list[Import]]:
    tree = ast.parse(source)
    imports: list[Import] = []
    defined: dict[str, list[Definition]] = {}
    shape(tree, imports)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ClassDef):
            names, definition = [node.name], _of_class(node)
        else:
            names, definition = _bound(node), _of_code(node)
        for name in names:
            defined.setdefault(name, []).append(definition)
    return defined, imports


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines; for a loop or a call, all names in it."""
    match node:
        case ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return _names_in(targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return _names_in([target])
    return _names_in([node])


def _of_code(*nodes: ast.AST, types: Iterable[ast.AST] = ()) -> Definition:
    text = " ".join(shape(node, []) for node in nodes)
    digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
    return Definition(digest, _names_in(nodes), _names_in(types))


def _of_class(node: ast.ClassDef) -> Definition:
    """The definition of a class; one that has no bases or is decorated, such as a dataclass, is no model."""
    if node.decorator_list or not node.bases or ast.unparse(node.bases[0]) == "NamedTuple":
        return _of_code(node)
    fields = [
        statement
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)
    ]
    computing = [statement for statement in node.body if statement not in fields and not _reads_values(statement)]
    return _of_code(*computing, types=[*node.bases, *(statement.annotation for statement in fields)])


def _reads_values(node: ast.stmt) -> bool:
    """Whether a part of a model decides how values are read, which the spec then holds; or is a docstring."""
    match node:
        case ast.FunctionDef(decorator_list=[*decorators]):
            return any("validator" in ast.unparse(decorator) for decorator in decorators)
        case ast.Assign(targets=[ast.Name(id="model_config")]) | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=ast.Call(func=ast.Call(func=ast.Name(id="field_validator")))):
            return True
    return False


def _names_in(nodes: Iterable[ast.AST]) -> list[str]:
    return sorted({part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)})
