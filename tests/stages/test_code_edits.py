"""An edit of any module of the package, and the stages whose results it makes stale."""

import ast
import inspect
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from snaketune.config.operation import Execution
from snaketune.stages.cache import code_digest as code
from snaketune.stages.cache import syntax
from snaketune.stages.table import STAGES

MODULES = code.Modules().files
# What stages use of `config`, of specs and of races besides values: none of it counts, so none of it may shape a result.
COMPUTED = {
    "config.base.check_plain": "refuses paths",
    "config.base_models.RopeScaling.longest": "another class' in stages; the config compares it with row lengths",
    "config.corpora.PersonalData": "the kinds that a report lists",
    "config.corpus_sources.Reasoning": "a type",
    "config.corpus_sources.Source.entry": "the lines of a config to paste, in errors",
    "config.generation.Engine": "a type",
    "config.generation.Generation.decoding": "values of the spec under the same names",
    "config.held_out.Selection.selects": "refuses a training whose held-out rows can't be measured",
    "config.load.HUB_ID": "which names of a model card are links to the Hub",
    "config.lora.Lora.changes_base": "which adapter `verify` loads, which fails if it is the wrong one",
    "config.losses.PreferenceLoss.needs_reference": "refuses a training without reference log-probabilities",
    "config.losses.PreferenceLoss.unpaired": "the engine's own in stages",
    "config.losses.PreferenceLoss.weights": "the engine's own in stages",
    "config.model_files.check_index": "refuses models",
    "config.model_files.check_model_files": "refuses models",
    "config.model_files.model_files": "the keys of kept rows; a change of it computes these again",
    "config.model_files.texts": "refuses models",
    "config.operation.Operation.processes": "how many processes run, which shapes no result by contract",
    "config.operation.Operation.processes_per_node": "how many processes run, which shapes no result by contract",
    "config.optimizers.MUON": "a name",
    "config.optimizers.OPTIMIZERS": "estimates of memory, and refuses devices",
    "config.optimizers.missing_package": "refuses an optimizer",
    "config.packing.Packing.lengths": "another class' in stages; the spec of `plan` has the lengths",
    "config.packing.Packing.longest": "another class' in stages",
    "config.row_fields.LISTS": "the lines of a config to paste, in errors",
    "config.row_fields.MAPPINGS": "which layout reads mapped columns; another layout lacks some of them, and refuses the rows",
    "config.secrets.without_secrets": "masks messages",
    "config.training_runs.SaveDtype": "a type",
    "stages.races.FILE": "a name",
    "stages.races.PAYLOAD": "a name",
    "stages.races.ending_at": "the spec of a snapshot, in the fingerprint of what is replayed",
    "stages.races.paused_at": "reads the decision of an earlier race",
    "stages.specs.TrainingSpec": "a type",
}
# Modules of packages without a digest that stages import, and why an edit changes no result. What they pass on to stages is
# checked by the named tests.
EXCLUDED_FROM_DIGEST = {
    "artifacts.digests": "digests that are compared with others of the same run; a change of them makes everything stale",
    "artifacts.manifest": "files are verified and passed on by name, in order of names: test_inputs, test_build_once",
    "artifacts.split_files": "the files of a split in order of their numbers: test_parts",
    "artifacts.plain_json": "parses manifests, or refuses them",
    "cluster.job_endings": "when a training is preempted, which resumes exactly (test_resume); how SLURM ended an attempt, and "
    "micro-batches shape no result by contract",
    "cluster.slurm": "commands that signal processes",
    "servers.client": "sends requests again until they are answered; what is asked and read is in sampling.completions",
    "servers.usage": "counts requests, and ends a job",
    "stages.cache.attempt": "refuses files that changed; threads are in the manifest",
    "stages.cache.code_digest": "digests in keys of kept rows; a change of them computes these again",
    "stages.cache.fingerprint": "digests in keys of kept rows; a change of them computes these again",
    "stages.cache.libraries": "versions in manifests",
    "stages.cache.payload_files": "copies, links and flushes files; what they hold is digested",
    "stages.cache.row_store": "rows are passed on as they were stored: test_row_store",
    "stages.cache.status": "how the report words a difference of specs",
    "stages.cache.work_folders": "paths, and files flushed to disk",
    "stages.declaration": "declares stages; spec and inputs are in the fingerprint",
    "stages.findings": "prints and refuses",
    "stages.graph": "a type",
    "stages.host.disk_errors": "words of errors",
    "stages.host.gpus": "which GPUs a job has; their kind is in the fingerprint",
    "stages.host.launch_command": "how many processes run, which shapes no result by contract",
    "stages.host.locks": "waits",
    "stages.host.threads": "how many threads there are; the number used is in the manifest",
    "stages.job": "reads the manifest of a path",
    "stages.job_files": "the fields of a job file",
    "stages.loaded_job": "reads the job file; spec, inputs and code are in the fingerprint",
    "stages.outcome": "carries counts and entries",
    "stages.plan.published_jobs": "plans jobs",
    "locations": "lists and identifies files; their identity is in the fingerprint: tests/corpus/reading/test_remote_stores.py",
    "files": "writes files and describes them; what they hold is digested",
    "progress": "passes on what it iterates over: test_code_digest",
    "suggestions": "near names in errors",
    "stages.races": "see COMPUTED",
    "stages.run": "runs a training as its own job does; what it computes is in the record, with its code",
    "stages.specs": "the fields of specs",
    "stages.table": "finds the declaration of a stage",
    "tracking.curves": "draws logs; the weights are the same without: test_tracking",
}
FLIPPED = {ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.In: ast.NotIn, ast.Is: ast.IsNot}
FLIPPED |= {other: one for one, other in FLIPPED.items()}


@pytest.fixture(autouse=True)
def edits_are_not_cached(monkeypatch):
    """The cache on disk holds no edited modules."""
    cache_of_edits = dict(syntax._cache())
    monkeypatch.setattr(syntax, "_cache", lambda: cache_of_edits)


def edited(source: bytes, everything: bool) -> bytes:
    """Return a module with one comparison flipped or one constant changed, or all of them; without any, with one more."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not _is_docstring(node)]
    kept = [node for node in tree.body if "STAGE" not in ast.unparse(node).partition("=")[0]]
    edits = 0
    for node in (below for top in kept for below in ast.walk(top)):
        if edits and not everything:
            break
        if isinstance(node, ast.Compare):
            node.ops = [FLIPPED[type(op)]() for op in node.ops]
        elif isinstance(node, ast.BoolOp) and everything:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and everything:
            node.value += "x"
        else:
            continue
        edits += 1
    if not edits:
        tree.body.append(ast.parse("ADDED = 1").body[0])
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def digests() -> dict[str, str]:
    modules = code.Modules()
    return {name: modules.digest(stage.module) for name, stage in STAGES.items()}


def stale_after(module: str, source: bytes, folder: Path) -> set[str]:
    """Return the stages whose results are stale after a module is changed to `source`."""
    (folder / "edited.py").write_bytes(source)
    modules = code.Modules()
    modules.files[f"snaketune.{module}"] = folder / "edited.py"
    return {name for name, stage in STAGES.items() if modules.digest(stage.module) != digests()[name]}


@cache
def imports(module: str) -> list[str]:
    """Return the modules that a module imports from the package, with those that hold them."""
    found = {module.rpartition(".")[0]}
    for node in ast.walk(ast.parse(MODULES[module].read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snaketune."):
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return [one for one in found if one in MODULES and one != "snaketune"]


@cache
def reached(stage: str, through_all: bool = False) -> set[str]:
    """Return the modules that a stage can import; those of packages without a digest only if `through_all`."""
    declared = STAGES[stage]
    found: set[str] = set()
    waiting = [declared.module, declared.code, *filter(None, (declared.launcher,))]
    while waiting:
        module = waiting.pop()
        if module in found or not (through_all or counts(module, stage)):
            continue
        found.add(module)
        waiting += imports(module)
    return found


def counts(module: str, stage: str) -> bool:
    package = module.split(".")[1]
    return package not in code.EXCLUDED_FROM_DIGEST or package == STAGES[stage].module.split(".")[1]


@pytest.mark.parametrize("module", sorted(one.removeprefix("snaketune.") for one in MODULES if one != "snaketune"))
def test_an_edit_makes_stale_what_the_module_shapes(module, tmp_path):
    name = f"snaketune.{module}"
    counted = {stage for stage in STAGES if name in reached(stage)}
    source = edited(MODULES[name].read_bytes(), everything=not counted)
    assert stale_after(module, source, tmp_path) == counted


def test_every_module_whose_edit_makes_nothing_stale_has_a_reason():
    imported = {
        one for stage in STAGES for module in reached(stage) for one in imports(module) if not counts(one, stage)
    }
    names = {one.removeprefix("snaketune.") for one in imported if MODULES[one].name != "__init__.py"}
    names -= {one for one in names if one.startswith(("report.", "config."))}
    assert names == EXCLUDED_FROM_DIGEST.keys()


def test_what_stages_use_of_settings_besides_their_values_has_a_reason():
    """Whatever shapes a result is computed in a package that counts, from the values of the spec."""
    trees = [ast.parse(MODULES[one].read_bytes()) for one in set().union(*map(reached, STAGES))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found = {f"{home}.{name}" for home, name in computed_by_models() if name in read}
    for node in nodes:
        module = (getattr(node, "module", None) or "").removeprefix("snaketune.")
        if module.startswith("config.") or module in ("stages.specs", "stages.races"):
            defined = vars(import_module(node.module))
            found |= {f"{module}.{one.name}" for one in node.names if not inspect.isclass(defined[one.name])}
    assert found == COMPUTED.keys()


def computed_by_models() -> set[tuple[str, str]]:
    """What models in specs and in `Execution` compute: their methods and properties, validators excepted."""
    waiting: list[Any] = [Execution, *(stage.spec for stage in STAGES.values())]
    models: set[type] = set()
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind not in models:
            models.add(kind)
            waiting += [field.annotation for field in kind.model_fields.values()] + list(kind.__bases__)
    return {
        (f"{model.__module__.removeprefix('snaketune.')}.{model.__name__}", name)
        for model in models
        if model.__module__.startswith("snaketune.")
        for name, value in vars(model).items()
        if isinstance(value, FunctionType | property | cached_property) and not name.startswith("__")
    }


def test_nothing_that_counts_is_reached_by_what_does_not_alone():
    hidden = {m for s in STAGES for m in reached(s, through_all=True) - reached(s) if counts(m, s)}
    # By the function that counts the rows of a published table; and by the config, which reads what losses need.
    assert hidden == {"snaketune.tables", "snaketune.engine", "snaketune.engine.preference_settings"}


PREFERENCES = {"calibrate", "dpo", "timing", "verification"}


@pytest.mark.parametrize(
    ("module", "before", "after", "stale"),
    [
        ("engine.preference_settings", "else {loss: 1.0}", "else {loss: -1.0}", PREFERENCES),
        ("engine.preference_settings", '"kto": Needs(unpaired=True', '"kto": Needs(unpaired=False', PREFERENCES),
        ("training.prepared_dpo", '"chosen_reward_below", "kl_above"}', '"kl_above"}', PREFERENCES),
        # What a key means is in the spec: defaults, descriptions, validators, and the names that are refused.
        ("config.losses", "beta: PositiveFloat = 0.1", "beta: PositiveFloat = 0.2", set()),
        ("config.losses", "Alpha of `f_", "The alpha of `f_", set()),
        ("config.losses", "None if alpha == 1", "None if alpha == 2", set()),
        ("config.losses", '"dpo": "it is `sigmoid`"', '"dpo": "`sigmoid`"', set()),
        ("training.calibrate", "(rows * ", "(2 * rows * ", {"calibrate"}),
    ],
)
def test_what_is_computed_from_settings_counts_and_how_they_are_read_does_not(module, before, after, stale, tmp_path):
    source = MODULES[f"snaketune.{module}"].read_text(encoding="utf-8")
    assert source.count(before) == 1
    assert stale_after(module, source.replace(before, after).encode(), tmp_path) == stale
