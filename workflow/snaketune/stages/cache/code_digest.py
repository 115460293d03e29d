"""The digest of all code that shapes a stage's result.

Snakemake sees a rule's own text, but no module that the rule's command imports. So each job file carries this digest: of the
syntax trees of every module of the package that the stage can reach by imports (those inside functions too), without comments,
docstrings and names of modules. Packages that only move, describe or draw results are excluded, by the list below.

The shell prefix in workflow/rules/package.smk doesn't count: it sets the path of the package (whose code this digests), the
config's name for messages, and the wait policy of idle threads.
"""

import hashlib
from functools import cache
from importlib import import_module
from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.libraries import importing
from snaketune.stages.cache.syntax import PACKAGE, Import, syntax_of

PACKAGE_FOLDER = Path(__file__).parents[2]
# Packages that shape no result, each with the reason. All others count, and so do the modules directly below `snaketune`
# (`tables` writes and reads the rows).
SHAPELESS = {
    # A spec holds every value resolved, and of this package a stage uses only the models that carry the values.
    "config": "what a key means is decided before the spec is made, and the spec is in the fingerprint",
    "artifacts": "describes results; what is read of them is digested by content",
    # `progress` yields the data that stages read; a test checks that it passes on exactly what it gets.
    "stages": "looks up, calls and publishes; the spec and the inputs of a stage are in the fingerprint",
    "cluster": "the resources that a job requests, and when it is preempted; a preempted training resumes exactly",
    "tracking": "draws the log of a training and returns nothing to it; a test checks that the weights are equal",
    "report": "draws results; in the report stage itself, it counts",
    # Not in this list, though it may seem so: training.launch.processes decides precision and processes; training.checkpoint
    # holds the state that a training resumes from, which other code mustn't read; models.selftest decides which results are
    # possible, and runs the model before it is trained.
}


def code_digest(entry: str) -> str:
    """Digest (16 hex digits) of all code that shapes the result of the stage whose module is `entry`.

    A module counts by its syntax, and each name that it imports by the syntax of the module that defines it. So renaming or
    moving a module changes no digest, and importing the same name from another module does.

    >>> code_digest("snaketune.corpus.corpus") == code_digest("snaketune.packing.plan")
    False
    """
    parts = sorted({f"{_syntax(module)} {_imported(module, entry)}" for module in shaping_modules(entry)})
    # The templates that the stage renders.
    for template in templates(entry):
        parts.append(f"{template.name} {hashlib.sha256(template.read_bytes()).hexdigest()}")
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
        for imported in _imports(module):
            waiting += [name for name in (imported.module, _defining(imported)) if _file(name)]
        package = module.rpartition(".")[0]
        if package != PACKAGE:
            # Its __init__.py runs too when the module is imported.
            waiting.append(package)
    return reached


def _counts(module: str, entry: str) -> bool:
    """Return whether the package of `module` shapes results. The stage's own package always does."""
    package = _package(module)
    return package not in SHAPELESS or package == _package(entry)


def _package(module: str) -> str:
    """Return the package directly below `snaketune` that a module is in.

    >>> _package("snaketune.packing.plan")
    'packing'
    """
    return module.split(".")[1]


def _imported(module: str, entry: str) -> str:
    """Return one entry for each name that a module imports from the package: the name here, there, and the module's syntax."""
    return " ".join(
        sorted(
            f"{one.bound}={'' if defining != one.module else one.name}@{_syntax(defining)}"
            for one in _imports(module)
            if _counts(defining := _defining(one), entry)
        )
    )


def _defining(imported: Import) -> str:
    """Return the module that an import reads: `name` itself if that is a module, else the one that defines it."""
    module = f"{imported.module}.{imported.name}"
    return module if _file(module) else imported.module


def _file(module: str) -> Path | None:
    return _find(PACKAGE_FOLDER.parent, module)


@cache
def _find(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _syntax(module: str) -> str:
    return syntax_of(_file(module).read_bytes())[0]


def _imports(module: str) -> tuple[Import, ...]:
    return syntax_of(_file(module).read_bytes())[1]
