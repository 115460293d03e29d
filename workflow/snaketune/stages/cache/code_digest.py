"""The digest of all code that shapes a stage's result.

Snakemake sees a rule's own text, but no module that the rule's command imports. So each job file carries this digest: of the
syntax trees of every module of the package that the stage can reach by imports (those inside functions too), without comments,
docstrings and names of modules. The shell prefix in workflow/rules/package.smk doesn't count: a test lists what it sets.
"""

import hashlib
from functools import cache
from importlib import import_module
from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.libraries import importing
from snaketune.stages.cache.syntax import PACKAGE, Import, syntax_of

PACKAGE_FOLDER = Path(__file__).parents[2]
# Packages that shape no result, each with the reason. All others count, and so do the modules directly below `snaketune`.
SHAPELESS = {
    # A spec holds every value resolved, and of this package a stage uses only the models that carry the values.
    "config": "what a key means is decided before the spec is made, and the spec is in the fingerprint",
    "artifacts": "describes results; what is read of them is digested by content",
    # `progress` yields the data that stages read; a test checks that it passes on exactly what it gets.
    "stages": "looks up, calls and publishes; the spec and the inputs of a stage are in the fingerprint",
    "cluster": "the resources that a job requests, and when it is preempted; a preempted training resumes exactly",
    "tracking": "draws the log of a training and returns nothing to it; a test checks that the weights are equal",
    "report": "draws results; in the report stage itself, it counts",
    # These count: training.launch.processes decides precision and processes, training.checkpoint holds the state that a
    # training resumes from, and models.selftest runs the model before it is trained.
}


def code_digest(entry: str) -> str:
    """Digest (16 hex digits) of all code that shapes the result of the stage whose module is `entry`.

    A module counts by its syntax, and each name that it imports by the syntax of the module that defines it. So renaming or
    moving a module changes no digest, and importing the same name from another module does.

    >>> code_digest("snaketune.corpus.corpus") == code_digest("snaketune.packing.plan")
    False
    """
    parts = sorted({f"{_syntax(module)[0]} {_imported(module, entry)}" for module in shaping_modules(entry)})
    parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in templates(entry)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def templates(entry: str) -> list[Path]:
    """Return the templates beside the module of a stage, which are read while it runs."""
    return sorted(PACKAGE_FOLDER.joinpath(*entry.split(".")[1:-1]).glob("templates/*.jinja"))


def check_code(entry: str, expected: str, stage: str) -> None:
    """Raise SnaketuneError unless the stage's code on disk has the expected digest."""
    try:
        current = code_digest(entry)
    except (SyntaxError, OSError) as error:
        current = f"unreadable ({error})"
    if current != expected:
        raise SnaketuneError(
            f"the code of the {stage} stage changed after this run was planned (digest {expected}, now {current}); run again"
        )


def import_checked(entry: str, expected: str, stage: str) -> None:
    """Import every module that shapes the stage's result, and raise SnaketuneError unless their digest is the expected one.

    The digest is compared before and after the imports, so the imported code is the digested code. Later edits on disk don't
    reach a training that runs for days.
    """
    check_code(entry, expected, stage)
    with importing():
        for module in sorted(shaping_modules(entry)):
            import_module(module)
    check_code(entry, expected, stage)


def shaping_modules(entry: str) -> set[str]:
    """Return the modules that the digest of `entry` covers: itself, and what it imports outside the shapeless packages."""
    reached: set[str] = set()
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in reached or not _counts(module, entry):
            continue
        reached.add(module)
        for imported in _syntax(module)[1]:
            waiting += [name for name in (imported.module, _defining(imported)) if _file(name)]
        package = module.rpartition(".")[0]
        if package != PACKAGE:
            # Its __init__.py runs too when the module is imported.
            waiting.append(package)
    return reached


def _counts(module: str, entry: str) -> bool:
    """Return whether the package of `module` shapes results. The stage's own package always does."""
    return _package(module) not in SHAPELESS or _package(module) == _package(entry)


def _package(module: str) -> str:
    """Return the package directly below `snaketune` that a module is in: `packing` for `snaketune.packing.plan`."""
    return module.split(".")[1]


def _imported(module: str, entry: str) -> str:
    """Return one entry for each name that a module imports from the package: the name here, there, and the module's syntax."""
    return " ".join(
        sorted(
            f"{one.bound}={'' if defining != one.module else one.name}@{_syntax(defining)[0]}"
            for one in _syntax(module)[1]
            if _counts(defining := _defining(one), entry)
        )
    )


def _defining(imported: Import) -> str:
    """Return the module that an import reads: `name` itself if that is a module, else the one that defines it."""
    module = f"{imported.module}.{imported.name}"
    return module if _file(module) else imported.module


def _syntax(module: str) -> tuple[str, tuple[Import, ...]]:
    return syntax_of(_file(module).read_bytes())


def _file(module: str) -> Path | None:
    return _find(PACKAGE_FOLDER.parent, module)


@cache
def _find(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
