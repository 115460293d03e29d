"""What code shapes a stage's result, as one digest.

Snakemake sees a rule's own text but no module that the rule's command imports. So each rule carries this digest among its
params: over the syntax trees of every module of the package that the stage can reach by imports (those inside functions
too), without comments and docstrings. What only moves, describes or draws is left out, room by room, by the list below.

Of the shell prefix in workflow/rules/package.smk nothing counts: it says where this package is (whose code this digest is of),
which config messages name, and that idle threads sleep.
"""

import hashlib
from importlib import import_module
from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.libraries import importing
from snaketune.stages.syntax import PACKAGE, syntax_of

PACKAGE_FOLDER = Path(__file__).parent.parent
# Rooms that shape no result, each with its reason; what isn't in one of them counts, so do the modules above
# them (`tables` writes and reads the rows).
SHAPELESS = {
    # A spec holds every value resolved, and a stage takes nothing else from here than the models that carry them.
    "config": "what a key means is decided before the spec is made, and the spec is in the fingerprint",
    "artifacts": "describes what was made; what readers go by is digested by content",
    # progress is in the path of the data, so a test holds it to hand on exactly what it gets.
    "stages": "looks up, calls and publishes; what a stage is told and reads is in the fingerprint",
    "cluster": "what a job asks of a scheduler, and when it has to leave; a training that leaves goes on exactly where it was",
    "tracking": "draws the log of a training, which hands it over and takes nothing back; a test holds the weights equal",
    "report": "draws what was made; in the report itself, everything counts",
    # These count, though they might seem to serve only: training.launch decides precision and processes. training.checkpoints
    # is what a resumed training goes on with, and its old states mustn't be read by other code. models.selftest decides
    # which results there may be, and has the model in its hands before it is trained.
}


def code_digest(entry: str) -> str:
    """Digest (16 hex digits) of all code that shapes the result of the stage whose module is `entry`.

    >>> code_digest("snaketune.corpus.corpus") == code_digest("snaketune.packing.plan")
    False
    """
    parts = [f"{module} {_syntax(module)[0]}" for module in sorted(shaping_modules(entry))]
    # What the stage's own room draws with.
    for template in templates(entry):
        parts.append(f"{template.name} {hashlib.sha256(template.read_bytes()).hexdigest()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def templates(entry: str) -> list[Path]:
    """The templates in the room of a stage, which are read while it works."""
    return sorted(_file(entry).parent.glob("*.jinja"))


def check_code(entry: str, expected: str, stage: str) -> None:
    """Raise SnaketuneError unless the stage's code on disk is the expected one."""
    try:
        found = code_digest(entry)
    except (SyntaxError, OSError) as error:
        found = f"unreadable ({error})"
    if found != expected:
        raise SnaketuneError(
            f"the code of the {stage} stage changed since this run was planned (digest {expected} then, {found} now); run again"
        )


def import_checked(entry: str, expected: str, stage: str) -> None:
    """Import every module that shapes the stage's result, and raise SnaketuneError unless that is the expected code.

    Compared before and after: so what has been imported is what the digest is of, and what is edited on disk later, while
    a training runs for days, isn't what it runs.
    """
    check_code(entry, expected, stage)
    with importing():
        for module in sorted(shaping_modules(entry)):
            import_module(module)
    check_code(entry, expected, stage)


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
        room = module.rpartition(".")[0]
        if room != PACKAGE:
            # Run as well, when the module is imported.
            waiting.append(room)
    return reached


def _shapeless(module: str, entry: str) -> bool:
    """Whether the room that `module` is in shapes nothing. In a stage's own room, everything counts."""
    room, own_room = module.split(".")[1], entry.split(".")[1]
    return room in SHAPELESS and room != own_room


def _file(module: str) -> Path | None:
    path = PACKAGE_FOLDER.parent.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _syntax(module: str) -> tuple[str, list[str]]:
    """Digest of a module's code and the modules of the package that it imports."""
    digest, imports = syntax_of(_file(module).read_bytes())
    return digest, [name for name in imports if _file(name)]
