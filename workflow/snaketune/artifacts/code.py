"""What code shapes a stage's result, as one digest.

Snakemake sees a rule's own text but no module that the rule's command imports. So each rule carries this digest among its
params: over the syntax trees of every module of the package that the stage can reach by imports (those inside functions
too), without comments and docstrings. Rooms that only move, describe or draw are left out.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "snaketune"
PACKAGE_FOLDER = Path(__file__).parent.parent
# They move bytes, describe settings, start processes or draw: none of it shapes what a stage makes.
SHAPELESS = {
    "artifacts",
    "config",
    "report",
    "errors",
    "progress",
    "stages",
    "models.gpus",
    "training.checkpoints",
    "training.launch",
}


def code_digest(entry: str) -> str:
    """Digest (16 hex digits) of all code that shapes the result of the stage whose module is `entry`.

    >>> code_digest("snaketune.corpus.stage") == code_digest("snaketune.packing.plan_rows")
    False
    """
    parts = [f"{module} {_syntax(module)[0]}" for module in sorted(shaping_modules(entry))]
    # What the stage's own room draws with.
    for template in sorted(_file(entry).parent.glob("*.jinja")):
        parts.append(f"{template.name} {hashlib.sha256(template.read_bytes()).hexdigest()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def shaping_modules(entry: str) -> set[str]:
    """The modules that the digest of `entry` covers: itself, and what it imports outside the shapeless rooms."""
    reached: set[str] = set()
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in reached or (module != entry and _shapeless(module, entry)):
            continue
        reached.add(module)
        waiting.extend(_syntax(module)[1])
    return reached


def _shapeless(module: str, entry: str) -> bool:
    """Whether `module`, or the room that it is in, shapes nothing. In a stage's own room, everything counts."""
    name = module.removeprefix(f"{PACKAGE}.")
    room, own_room = name.split(".")[0], entry.split(".")[1]
    return name in SHAPELESS or (room in SHAPELESS and room != own_room)


def _file(module: str) -> Path | None:
    path = PACKAGE_FOLDER.parent.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@cache
def _syntax(module: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a module's code and the modules of the package that it imports."""
    tree = ast.parse(_file(module).read_bytes())
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from snaketune.packing import plan` names a module, `from snaketune.packing.plan import pack` its content.
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    ours = {name for name in imports if name.startswith(f"{PACKAGE}.") and _file(name)}
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest(), tuple(sorted(ours))


def _shape(node: Any) -> Any:
    """A tree as nested lists, the same under every Python: no positions, and no fields that only newer ones have."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in ("type_params", "kind"))
        return [type(node).__name__, *([name, _shape(value)] for name, value in fields if value not in (None, []))]
    return [_shape(item) for item in node] if isinstance(node, list) else repr(node)


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            node.body = rest or [ast.Pass()]
