"""What is used of libraries though it isn't documented: docs/upgrades.md lists it, and installed versions have it."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workflow/snaketune"
SNAKEMAKE = "snakemake_adapter"
# Documented, of the standard library.
PUBLIC = {"_replace", "_fields", "_field_defaults", "_asdict", "_exit"}
# What Snakemake calls its objects in the adapter and in Snakefiles, and methods of a dict.
OBJECTS, OF_DICT = {"workflow", "_dag_settings", "rules", "rules_folder", "RULES"}, {"get", "items"}


@cache
def tables() -> dict[str, list[list[str]]]:
    """The rows of docs/upgrades.md by the heading above them."""
    sections = re.split(r"^## ", (ROOT / "docs/upgrades.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = {
        section.partition("\n")[0]: re.findall(r"^\| (`.*) \|$", section, flags=re.MULTILINE) for section in sections
    }
    return {heading: [line.split(" | ") for line in lines] for heading, lines in rows.items() if lines}


def listed(heading: str) -> Iterator[tuple[str, str]]:
    """The listed names of a table, each with its owner: the first column, a module or a class."""
    for owner, names, *_ in tables()[heading]:
        yield from ((owner.strip("`"), name) for name in re.findall(r"`(\w+)`", names))


def trees(*folders: str) -> dict[Path, ast.Module]:
    paths = (path for folder in folders for path in (PACKAGE / folder).rglob("*.py"))
    return {path: ast.parse(path.read_bytes()) for path in paths}


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules and names that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


# Snakemake


def origin(node: ast.AST) -> ast.AST:
    """What an expression reads attributes of: `workflow` in `workflow.dag.needrun_jobs()`."""
    while True:
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in OBJECTS:
                return ast.Name(name)
            case ast.Attribute(value=inner) | ast.Call(func=ast.Attribute(value=inner)):
                node = inner
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, *_]):
                node = inner
            case _:
                return node


def attributes_of_snakemake(function: ast.AST) -> set[str]:
    """The attributes that a function reads of Snakemake's objects, and of names that it binds to what they hold."""
    known = set(OBJECTS)
    bindings = [
        (target, node.iter if isinstance(node, ast.comprehension | ast.For) else node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.comprehension | ast.For)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    for target, value in bindings * 2:
        pairs = (
            zip(target.elts, value.elts)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, bound in pairs:
            values = bound.values if isinstance(bound, ast.BoolOp) else [bound]
            if isinstance(name, ast.Name) and any(
                isinstance(start := origin(one), ast.Name) and start.id in known for one in values
            ):
                known.add(name.id)
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(start := origin(node), ast.Name) and start.id in known:
            # Those of `rules` are names of rules.
            found |= set() if ast.unparse(node.value) in ("self", "rules") else {node.attr}
    return found - OF_DICT


def read_of_snakemake() -> set[str]:
    found = set()
    for tree in [*trees(SNAKEMAKE).values(), ast.parse((ROOT / "workflow/rules/package.smk").read_bytes())]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found |= attributes_of_snakemake(node)
        outside = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
        found |= attributes_of_snakemake(outside)
        found |= {name for module, name in imports(tree) if module.startswith("snakemake")}
        # Members of its enumerations.
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("DeploymentMethod", "RerunTrigger")
        }
    for path in [ROOT / "Snakefile", ROOT / "workflow/Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]:
        found |= {*re.findall(r"\bworkflow\.(\w+)", path.read_text(encoding="utf-8"))}
    return found


def test_what_is_read_of_snakemake_is_listed():
    assert read_of_snakemake() == {name for _, name in listed("Snakemake")}


@pytest.mark.parametrize(("owner", "name"), [*listed("Snakemake"), *listed("Other libraries")])
def test_libraries_have_what_is_listed(owner, name):
    """After an upgrade, this names what is gone before anything runs."""
    # Its modules import each other in circles; the other registers operators.
    import_module("snakemake.api" if owner.startswith("snakemake") else "torch.nn.attention.varlen")
    if owner == "deepspeed":
        pytest.skip("an extra, which isn't pinned with the others")
    theirs: Any = resolve_name(owner)
    is_module = inspect.ismodule(theirs) and hasattr(theirs, "__path__")
    # Fields and attributes of instances.
    declared = re.compile(rf"^    {name}:|self\.{name}\b", re.MULTILINE)
    bases = [base for base in getattr(theirs, "__mro__", ()) if base is not object]
    assert (
        hasattr(theirs, name)
        or (is_module and find_spec(f"{owner}.{name}"))
        or any(declared.search(inspect.getsource(base)) for base in bases)
    )


# Other libraries


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC and name != "_"


def names_of_the_package() -> set[str]:
    """Private names that its modules define: functions, variables, fields, attributes of `self`."""
    found = set()
    for tree in trees(".").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def overridden() -> set[str]:
    """Private methods of libraries' classes that a class of the package replaces."""
    found = set()
    for path, tree in trees(".").items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.bases]
        methods = {
            part.name
            for node in classes
            for part in node.body
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if not any(map(is_private, methods)):
            continue
        module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                theirs = [base for base in kind.__mro__ if not base.__module__.startswith("snaketune")]
                found |= {
                    name for name in vars(kind) if is_private(name) and any(name in vars(base) for base in theirs)
                }
    return {name for name in found if not name.startswith(("_abc_", "_is_protocol"))}


def test_private_names_of_other_libraries_are_listed():
    ours, found = names_of_the_package(), overridden()
    for tree in trees(".").values():
        for module, name in imports(tree):
            if not module.startswith(("snaketune", "__future__")):
                found |= {part for part in (*module.split("."), name) if is_private(part)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                found |= {node.attr} if node.attr not in ours or ast.unparse(node.value) == "super()" else set()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
                found |= {
                    part.value
                    for part in node.args[1:2]
                    if isinstance(part, ast.Constant) and is_private(str(part.value))
                }
    assert found == {name for _, name in listed("Other libraries")}
