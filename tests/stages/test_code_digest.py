"""The code digest of each stage."""

import ast
import inspect
import re
from importlib import import_module
from itertools import permutations

import pytest

from snaketune import progress
from snaketune.snakemake_adapter.package import PREFIX
from snaketune.stages.cache import code_digest as code
from snaketune.stages.table import STAGES


def modules(stage: str) -> set[str]:
    return {module.removeprefix("snaketune.") for module in code.Modules().shaping(STAGES[stage].module)}


def test_each_stage_covers_what_shapes_it_and_nothing_that_only_follows_it():
    assert "corpus.layouts.canonical" in modules("corpus")
    assert modules("corpus") & (modules("sft") | modules("eval")) == {"errors", "patterns", "tables"}
    assert not {
        name for name in modules("filter") if name.startswith(("corpus.reading", "corpus.layouts", "corpus.values"))
    }
    assert "tokenization.chat" in modules("tokenize")
    assert {"packing.row_plan", "engine.packing.conversation_overflow"} <= modules("plan")
    assert "engine.packing.shards" in modules("write")
    assert not modules("tokenize") & {name for name in modules("plan") if name.startswith("packing.")}
    assert "packing.row_plan" not in modules("tokenize") | modules("write") | modules("sft")
    assert {"engine.trainer", "engine.model.attention", "engine.packing.segments"} <= modules("sft")
    assert "engine.preference_losses" in modules("dpo")
    for stage in ("sft", "ref_logps", "eval"):
        assert "engine.preference_losses" not in modules(stage)
    assert "engine.trainer" not in modules("ref_logps") | modules("eval")


@pytest.mark.parametrize("stage", STAGES)
def test_what_moves_describes_or_draws_counts_for_no_stage(stage):
    rooms = {module.split(".")[0] for module in modules(stage)}
    assert not rooms & {"config", "artifacts", "stages"}
    assert ("report" in rooms) == (stage == "report")


def test_what_decides_precision_resumes_or_tests_a_training_counts():
    for stage in ("sft", "dpo", "reward"):
        assert {"training.launch.processes", "engine.checkpoints", "engine.model.selftest", "tables"} <= modules(stage)
    assert "engine.model.selftest" in modules("ref_logps")
    assert {"training", "models"} <= modules("sft")  # what their __init__ would do


def test_a_training_covers_what_its_launched_process_runs():
    trainers = {"sft": "engine.sft", "dpo": "engine.dpo", "reward": "engine.reward"}
    for stage, other in permutations(trainers, 2):
        assert {"training.launch.worker", "training.pipeline", f"training.{stage}", trainers[stage]} <= modules(stage)
        launched = {
            name.removeprefix("snaketune.") for name in code.Modules().shaping("snaketune.training.launch.worker")
        }
        assert launched <= modules(stage)
        assert not {f"training.{other}", trainers[other]} & modules(stage)
    assert "training.trl_trainer" in modules("sft") - modules("dpo")


def test_a_template_counts_for_the_stages_beside_it():
    found = {stage: {path.name for path in code.templates(STAGES[stage].module)} for stage in STAGES}
    assert {stage for stage, names in found.items() if names} == {"card", "report"}
    assert found["card"] == {"card.md.jinja"} and "index.html.jinja" in found["report"]


def test_every_reason_is_of_something_that_is_there():
    for name in code.EXCLUDED_FROM_DIGEST:
        assert f"snaketune.{name}" in code.Modules().files, name


# Functions that stages call in packages without a digest, each reviewed: it describes, verifies, waits or prints. Those of
# tables and progress return the data that stages read, so tests check that they pass on exactly what they get.
CALLED = {
    "artifacts.digests": {"digest_json"},
    "locations": {"explained", "facts_of", "filesystem", "size_of"},
    "files": {"digest_file", "set_modes", "sync", "sync_folder", "sync_names", "write_json"},
    "suggestions": {"unknown"},
    "artifacts.plain_json": {"parse_json"},
    "artifacts.manifest": {"read_artifact", "read_json", "rebuild_command"},
    "artifacts.split_files": {"file_name", "read_split", "split_files"},
    "cluster.job_endings": {"ending_of", "job_end_time", "requeue_job"},
    # To signal the processes on other nodes.
    "cluster.slurm": {"run_slurm"},
    # To plan jobs and to declare a stage, which no digest covers.
    "stages.declaration": {"any_number", "exactly_one"},
    "stages.plan.published_jobs": {"card_jobs", "convert_jobs"},
    "stages.cache.attempt": {"check_files", "read_attempt"},
    "stages.cache.code_digest": {"code_digest", "import_checked"},
    "stages.host.disk_errors": {"disk_error_message"},
    "stages.host.threads": {"available_threads"},
    "stages.host.gpus": {"gpu_findings", "gpu_model", "visible_gpus"},
    "stages.job": {"result_at"},
    "stages.loaded_job": {"read_job"},
    "stages.cache.libraries": {"importing", "installed_version", "quiet_libraries"},
    "stages.host.launch_command": {"check_installed", "check_nodes", "command"},
    "servers.client": {"connection"},
    "stages.host.locks": {"locked"},
    "stages.findings": {"report_findings"},
    "stages.cache.fingerprint": {"cached_entries"},
    "progress": {"progress"},
    "stages.cache.status": {"differing"},
    "stages.cache.payload_files": {"place"},
    "stages.cache.work_folders": {"remove"},
    # Runs the training that a replay compares, whose code is in the record.
    "stages.run": {"build_once"},
}


def test_stages_call_no_function_of_a_room_that_counts_for_nothing_but_these():
    """Otherwise a function there could shape a result without being part of a digest."""
    called: dict[str, set[str]] = {}
    files = code.Modules().files
    for module in {module for stage in STAGES for module in code.Modules().shaping(STAGES[stage].module)}:
        for node in ast.walk(ast.parse(files[module].read_bytes())):
            name = (getattr(node, "module", None) or "").removeprefix("snaketune.")
            # Those of settings: test_code_edits.
            if name.split(".")[0] in code.EXCLUDED_FROM_DIGEST.keys() - {"report", "config"} and name != "stages.races":
                home = import_module(node.module)
                functions = {alias.name for alias in node.names if inspect.isfunction(getattr(home, alias.name, None))}
                called.setdefault(name, set()).update(functions)
    assert {name: functions for name, functions in called.items() if functions} == CALLED


def test_progress_hands_on_what_it_gets(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    items = [object() for _ in range(100)]
    handed = list(progress.progress(iter(items), "handing", "items", len(items)))
    assert len(handed) == len(items)
    assert all(one is other for one, other in zip(handed, items))


def test_the_shell_prefix_sets_nothing_that_shapes_a_result():
    """For a new variable it has to be decided whether it counts."""
    # Threads are what torch's sums depend on: in a training's manifest, and as many as at its first attempt.
    known = {"OMP_WAIT_POLICY", "RAYON_NUM_THREADS", "PYTHONPATH", "SNAKETUNE_CONFIG"}
    assert set(re.findall(r"\b([A-Z_]{4,})=", PREFIX)) == known


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A package of one module, whose text a test chooses."""
    package = tmp_path / "snaketune"
    (package / "pkg").mkdir(parents=True)
    (package / "pkg/__init__.py").write_text("")
    monkeypatch.setattr(code, "PACKAGE_FOLDER", package)

    def digest(text: str) -> str:
        (package / "pkg/stage.py").write_text(text)
        return code.code_digest("snaketune.pkg.stage")

    return digest


def test_comments_docstrings_and_layout_do_not_count_but_code_does(edited):
    plain = edited("def f(x):\n    return x + 1\n")
    assert plain == edited('"""Doc."""\n\n# why\ndef f(x):\n    """Says."""\n    return (x\n        + 1)\n')
    assert plain != edited("def f(x):\n    return x + 2\n")
    assert edited('class A:\n    """Doc."""\n') == edited("class A:\n    pass\n")


def test_a_declaration_does_not_count_and_what_it_imports_neither(edited):
    imported = "from snaketune.stages.declaration import Cost, Stage\n"
    declared = "STAGE = Stage(module=__name__, cost=Cost(mb={}))\n"
    build = "def build(spec, work):\n    return {}\n"
    plain = edited(imported + declared.format(1) + build.format(1))
    assert plain == edited(imported + declared.format(2) + build.format(1))
    assert plain == edited(imported.replace("Cost, ", "ModelCost, Cost, ") + declared.format(1) + build.format(1))
    assert plain != edited(imported + declared.format(1) + build.format(2))
    # Only the stage itself.
    assert edited("STAGES = 1\n") != edited("STAGES = 2\n")


def test_a_module_can_be_renamed_or_moved_but_not_exchanged(edited):
    """Names of modules don't count, and what is imported from where does."""
    package = code.PACKAGE_FOLDER / "pkg"
    (package / "sub").mkdir()
    (package / "sub/__init__.py").write_text("")
    for module, value in (("one", 1), ("other", 1), ("sub/moved", 1), ("two", 2)):
        (package / f"{module}.py").write_text(f"def f():\n    return {value}\n")

    build = "def build():\n    return f() + g()\n"
    one = edited(f"from snaketune.pkg.one import f\nfrom snaketune.pkg.two import f as g\n{build}")
    assert one == edited(f"from snaketune.pkg.other import f\nfrom snaketune.pkg.two import f as g\n{build}")
    assert one == edited(f"from snaketune.pkg.two import f as g\nfrom snaketune.pkg.sub.moved import f\n{build}")
    assert one != edited(f"from snaketune.pkg.one import f as g\nfrom snaketune.pkg.two import f\n{build}")
    whole = edited(f"from snaketune.pkg import one as m\n{build}")
    assert whole == edited(f"from snaketune.pkg import other as m\n{build}")
    assert whole != edited(f"from snaketune.pkg import two as m\n{build}")
