"""The digest of all code that shapes a stage's result.

Snakemake sees a rule's own text, but no module that the rule's command imports. So each job file carries this digest: of the
syntax trees of every module of the package that the stage can reach by imports (those inside functions too), without comments,
docstrings and names of modules. The shell prefix of jobs doesn't count (`snakemake_adapter.package`):
a test lists what it sets.
"""

import hashlib
import os
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.libraries import importing
from snaketune.stages.cache.syntax import PACKAGE, Import, syntax_of
from snaketune.stages.cache.work_folders import published_results

# Below the results: by stage and code, the digests of other code whose results count as made with it.
RECORD = "accepted_code.json"
PACKAGE_FOLDER = Path(__file__).parents[2]
# Packages that shape no result, each with the reason. All others count, and so do the modules directly below `snaketune`.
EXCLUDED_FROM_DIGEST = {
    # What is computed from these values is in the packages that use them; a test lists what config and stages still compute.
    "config": "what a key means is decided before the spec is made, and the spec holds every value resolved",
    "artifacts": "describes results; what is read of them is digested by content",
    "stages": "looks up, calls and publishes; the spec and the inputs of a stage are in the fingerprint",
    "cluster": "the resources that a job requests, and when it is preempted; a preempted training resumes exactly",
    "tracking": "draws the log of a training and returns nothing to it; a test checks that the weights are equal",
    "servers": "sends what it is given and returns what a server answers; a response that was paid for stays",
    "report": "draws results; in the report stage itself, it counts",
    "files": "writes, flushes and digests files; what they hold is digested",
    "data_folders": "selects the files of a folder before the spec is made, and the spec names them",
    "locations": "lists files and says what identifies their content, which is in the fingerprint",
    # `progress` yields the data that stages read; a test checks that it passes on exactly what it gets.
    "progress": "prints how far work has come",
    "suggestions": "near names in errors",
    # These count: training.launch.processes decides precision and processes, engine.checkpoints holds the state that a
    # training resumes from, and engine.model.selftest runs the model before it is trained.
}


def revision() -> str | None:
    """The git commit of the package; None if there is none, or files of the package differ from it."""
    answers = []
    # Without a lock on git's index, since many jobs ask at once.
    for question in (("--no-optional-locks", "status", "--porcelain", "--", "."), ("rev-parse", "HEAD")):
        try:
            done = subprocess.run(["git", *question], cwd=PACKAGE_FOLDER, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        answers.append(done.stdout.strip())
    changed, commit = answers
    return None if changed else commit


def code_digest(entry: str) -> str:
    """Digest (16 hex digits) of all code that shapes the result of the stage whose module is `entry`.

    A module counts by its syntax, and each name that it imports by the syntax of the module that defines it. So renaming or
    moving a module changes no digest, and importing the same name from another module does.

    >>> code_digest("snaketune.corpus.corpus") == code_digest("snaketune.packing.plan")
    False
    """
    return Modules().digest(entry)


def templates(entry: str) -> list[Path]:
    """The templates beside the module of a stage, which are read while it runs."""
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
    """Import what the stage's module imports, and raise SnaketuneError unless the digest of its code is the expected one.

    The digest is compared before and after the imports, so the imported code is the digested code. Later edits on disk don't
    reach a training that runs for days. Modules that only some jobs import, in a function of another module, are those of
    peft in jobs that don't train, and of TRL: seconds.
    """
    check_code(entry, expected, stage)
    with importing():
        for module in sorted(Modules().imported_by(entry)):
            import_module(module)
    check_code(entry, expected, stage)


class Modules:
    """The modules of the package as they are on disk now, each read once: for digests of several stages.

    Attributes:
        files: By the name of the module.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        for folder, _, names in os.walk(PACKAGE_FOLDER):
            package = ".".join((PACKAGE, *Path(folder).relative_to(PACKAGE_FOLDER).parts))
            for name in names:
                if name == "__init__.py":
                    self.files.setdefault(package, Path(folder, name))
                elif name.endswith(".py"):
                    self.files[f"{package}.{name.removesuffix('.py')}"] = Path(folder, name)
        self._syntax = cache(self._read)
        self._part = cache(self._describe)

    def digest(self, entry: str) -> str:
        """See `code_digest`."""
        shapeless = _shapeless(entry)
        parts = sorted({self._part(module, shapeless) for module in self.shaping(entry)})
        parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in templates(entry)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def imported_by(self, entry: str) -> set[str]:
        """The modules that shape the result of the stage and that its own module names, also in its functions."""
        named = {name for imported, defining in self._syntax(entry)[1] for name in (imported.module, defining)}
        return {entry, *named & self.shaping(entry)}

    def shaping(self, entry: str) -> set[str]:
        """The modules that the digest of `entry` covers: itself, and what it imports outside the shapeless packages."""
        shapeless = _shapeless(entry)
        reached: set[str] = set()
        waiting = [entry]
        while waiting:
            module = waiting.pop()
            if module in reached or _package(module) in shapeless:
                continue
            reached.add(module)
            for imported, defining in self._syntax(module)[1]:
                waiting += [name for name in (imported.module, defining) if name in self.files]
            package = module.rpartition(".")[0]
            if package != PACKAGE:
                # Its __init__.py runs too when the module is imported.
                waiting.append(package)
        return reached

    def _read(self, module: str) -> tuple[str, list[tuple[Import, str]]]:
        """The digest of a module's syntax, and its imports, each with the module that it reads: `name` itself if that is
        a module, else the one that defines it."""
        digest, imports = syntax_of(self.files[module].read_bytes())
        submodules = ((imported, f"{imported.module}.{imported.name}") for imported in imports)
        return digest, [(imported, name if name in self.files else imported.module) for imported, name in submodules]

    def _describe(self, module: str, shapeless: frozenset[str]) -> str:
        """A module's syntax, and one entry for each name that it imports from the package: the name here, there, and
        the other module's syntax."""
        digest, imports = self._syntax(module)
        names = sorted(
            f"{imported.bound}={'' if defining != imported.module else imported.name}@{self._syntax(defining)[0]}"
            for imported, defining in imports
            if _package(defining) not in shapeless
        )
        return f"{digest} {' '.join(names)}"


def _shapeless(entry: str) -> frozenset[str]:
    """The packages that shape no result of a stage; its own always does."""
    return frozenset(EXCLUDED_FROM_DIGEST) - {_package(entry)}


def _package(module: str) -> str:
    """The package directly below `snaketune` that a module is in: `packing` for `snaketune.packing.plan`."""
    return module.split(".", 2)[1]


def accepted_codes(stage: str, code: str, results: Path) -> tuple[str, ...]:
    """The digests of other code of the stage that is accepted for the results below `results`, in place of `code`."""
    return tuple(_read_accepted(results / RECORD).get(stage, {}).get(code, ()))


def accept(code_of: Callable[[str], str | None], results: Path) -> None:
    """Accept the code that every result below `results` was made with, and print which results that affects.

    Args:
        code_of: the digest of a stage's code, by the stage's name; None for an unknown stage.
    """
    accepted = _read_accepted(results / RECORD)
    results_by_code: dict[tuple[str, str], list[str]] = {}
    for result in published_results(results):
        made_by = result.manifest["stage"], result.manifest["code"]
        results_by_code.setdefault(made_by, []).append(str(result.manifest_path.parent.relative_to(results)))
    count = 0
    for (stage, made_with), names in results_by_code.items():
        now = code_of(stage)
        known = accepted.setdefault(stage, {})
        if now is None or made_with == now or made_with in known.get(now, ()):
            continue
        # Code that was accepted in place of that code is accepted in place of the current code too.
        known[now] = sorted({made_with, *known.get(now, ()), *known.get(made_with, ())} - {now})
        print(f"accepted, though made with other code of stage {stage}: {', '.join(names)}")
        count += len(names)
    if count:
        write_json(results / RECORD, {stage: known for stage, known in accepted.items() if known})
        print(f"{count} results count as made with the current code; recorded in {results / RECORD}")
    else:
        print("nothing to accept: all results count as made with the current code")


def _read_accepted(record: Path) -> dict[str, dict[str, list[str]]]:
    try:
        return TypeAdapter(dict[str, dict[str, list[str]]]).validate_json(record.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise SnaketuneError(
            f"{record} can't be read ({problem}); remove it, and accept again what you want to reuse"
        ) from None
