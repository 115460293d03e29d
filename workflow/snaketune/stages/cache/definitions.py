"""The definitions of a module, each by itself: what the names that a stage imports from a package of settings compute.

A stage imports models of settings for their values, which are in its spec. Only what is computed from the values is code that
shapes its result: the methods of these models, and constants and functions that it imports. So a field, its default, its
description and its validators count for no stage, and `PreferenceLoss.weights` for those whose spec has a preference loss.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple

from snaketune.stages.cache.syntax import Import, parsed, shape

# A name, the module that it is taken from, and whether it is only the type of a field.
Used = tuple[str, str, bool]


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
    waiting: list[Used] = [(one.name, one.module, False) for one in imports]
    seen: set[Used] = set()
    while waiting:
        used = name, module, as_type = waiting.pop()
        if used in seen or (source := source_of(module)) is None:
            continue
        seen.add(used)
        defined, imported = definitions_of(source)
        if name in imported:
            waiting.append((imported[name].name, imported[name].module, as_type))
        for one in defined.get(name, ()):
            is_model = bool(one.types)
            if one.digest and (is_model or not as_type):
                yield one.digest
            # An alias of types leads to them; its own text, such as the choices of a key, decides about values.
            waiting += [(other, module, as_type and not is_model) for other in one.names]
            waiting += [(other, module, True) for other in one.types]


@cache
def definitions_of(source: bytes) -> tuple[dict[str, list[Definition]], dict[str, Import]]:
    """Return the definitions at the top of a module by name, and its imports from the package by the names that it binds."""
    defined, imports = parsed(source, _define)
    definitions = {name: [Definition(*one) for one in some] for name, some in defined.items()}
    return definitions, {one[2]: Import(*one) for one in imports}


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
    """Return the names that a statement defines; for a loop or a call, all names in it."""
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
    """Return the definition of a class; one that has no bases or is decorated, such as a dataclass, is no model."""
    if node.decorator_list or not node.bases or ast.unparse(node.bases[0]) == "NamedTuple":
        return _of_code(node)
    fields = [
        one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation)
    ]
    computing = [one for one in node.body if one not in fields and not _reads_values(one)]
    return _of_code(*computing, types=[*node.bases, *(one.annotation for one in fields)])


def _reads_values(node: ast.stmt) -> bool:
    """Whether a part of a model decides how values are read, which the spec then holds; or is a docstring."""
    match node:
        case ast.FunctionDef(decorator_list=[*decorators]):
            return any("validator" in ast.unparse(one) for one in decorators)
        case ast.Assign(targets=[ast.Name(id="model_config")]) | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=ast.Call(func=ast.Call(func=ast.Name(id="field_validator")))):
            return True
    return False


def _names_in(nodes: Iterable[ast.AST]) -> list[str]:
    return sorted({one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)})
