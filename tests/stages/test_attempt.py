"""Changes during a stage: external files, the stage's code, the number of threads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from snaketune.__main__ import main
from snaketune.config.operation import Execution, Operation
from snaketune.errors import SnaketuneError
from snaketune.stages import run as stages
from snaketune.stages.cache import fingerprint
from snaketune.stages.cache.attempt import Attempt, check_files, read_attempt, stamps_of
from snaketune.stages.cache.code_digest import accept
from snaketune.stages.host import threads
from snaketune.stages.host.locks import locked
from snaketune.stages.job_files import JobFile, write_job_file
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.stages.table import STAGES
from snaketune.training.launch.processes import environment

from .demo_jobs import build_demo

ROOT = Path(__file__).parents[2]


def reading(source: Path, built: list | None = None):
    """A build whose payload is what it read."""

    def build(work):
        (work.payload / "rows.txt").write_bytes(source.read_bytes())
        (work.state / "half").write_text("half")
        if built is not None:
            built.append(source.read_text())
        return Outcome()

    return build


def run(folder: Path, source: Path, build, **job) -> Path:
    build_demo(folder, build, files={"files": [source]}, **job)
    return folder / "results/demo/x/rows/rows.txt"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    return path


def nothing_is_kept_under_the_old_content(tmp_path: Path, source: Path) -> None:
    """After it is put back, the old file is built from again; nothing cached is reused."""
    assert not list(tmp_path.glob("results/demo/**/*"))
    assert not list(tmp_path.glob("results/.work/demo/*/manifest.json"))
    assert not list(tmp_path.glob("results/.work/demo/*/state"))
    source.write_text("old")
    built: list = []
    assert run(tmp_path, source, reading(source, built)).read_text() == "old"
    assert built == ["old"]


def test_a_file_that_changes_while_it_is_built_from(tmp_path, source):
    def build(work):
        source.write_text("new")
        return reading(source)(work)

    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed while the demo stage read it; run again"):
        run(tmp_path, source, build)
    nothing_is_kept_under_the_old_content(tmp_path, source)


def test_a_file_that_changes_while_its_digest_is_computed(tmp_path, source, monkeypatch):
    real = fingerprint.compute_digest

    def slow(path, work_root):
        digest = real(path, work_root)
        path.write_text("new")
        return digest

    monkeypatch.setattr(fingerprint, "compute_digest", slow)
    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed"):
        run(tmp_path, source, reading(source))
    monkeypatch.setattr(fingerprint, "compute_digest", real)
    nothing_is_kept_under_the_old_content(tmp_path, source)


def test_a_file_that_changes_while_another_process_holds_the_folder(tmp_path, source, monkeypatch):
    def held(lock, what):
        # The fingerprint is computed, and the file changes while this waits for the lock.
        source.write_text("new")
        return locked(lock, what)

    monkeypatch.setattr(stages, "locked", held)
    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed"):
        run(tmp_path, source, reading(source))
    monkeypatch.setattr(stages, "locked", locked)
    nothing_is_kept_under_the_old_content(tmp_path, source)


@pytest.mark.parametrize("code", ["c", "accepted"])
def test_a_cached_result_is_not_published_for_a_file_that_changed_meanwhile(tmp_path, source, monkeypatch, code):
    published = run(tmp_path, source, reading(source))
    accept({"demo": "accepted"}.get, tmp_path / "results")
    shutil.rmtree(tmp_path / "results/demo")

    def held(lock, what):
        source.write_text("new")
        return locked(lock, what)

    monkeypatch.setattr(stages, "locked", held)
    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed"):
        run(tmp_path, source, reading(source), code=code)
    assert not published.exists()


def test_a_file_replaced_by_an_older_one_of_the_same_size_and_time_is_seen(source, tmp_path):
    attempt = Attempt(stage="demo", code="c", stamps=stamps_of([source]))
    attempt.check_files()
    other = tmp_path / "other"
    other.write_text("new")
    times = source.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(source)
    assert source.stat().st_mtime_ns == times.st_mtime_ns
    with pytest.raises(SnaketuneError):
        attempt.check_files()


def test_a_hard_link_to_a_file_is_no_change_of_it(tmp_path, source):
    """A hard link, as `cp -al` makes for a backup; permissions don't count either."""

    def build(work):
        os.link(source, tmp_path / "backup")
        source.chmod(0o600)
        check_files(work.state)
        return reading(source)(work)

    assert run(tmp_path, source, build).read_text() == "old"


def test_an_edit_in_place_that_sets_the_times_back_is_a_change(tmp_path, source):
    def build(work):
        times = source.stat()
        source.write_text("new")
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        return reading(source)(work)

    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed"):
        run(tmp_path, source, build)
    nothing_is_kept_under_the_old_content(tmp_path, source)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_result_records_the_versions_that_it_was_started_with(tmp_path, source, monkeypatch, capsys, checkpoint):
    installed = {"torch": "2", "numpy": "1"}
    monkeypatch.setattr(stages, "installed_version", installed.get)

    def killed(work):
        if checkpoint:
            (work.state / "checkpoints/checkpoint-1").mkdir(parents=True, exist_ok=True)
            (work.state / "checkpoints/checkpoint-1/complete").touch()
        raise SnaketuneError("killed")

    # Also over a further attempt that got nowhere.
    for version in ("2", "3"):
        installed["torch"] = version
        with pytest.raises(SnaketuneError, match="killed"):
            run(tmp_path, source, killed, libraries=tuple(installed))
    installed["torch"] = "4"
    capsys.readouterr()
    run(tmp_path, source, reading(source), libraries=tuple(installed))
    manifest = json.loads((tmp_path / "results/demo/x/manifest.json").read_text())
    assert manifest["versions"] == {"torch": "4", "numpy": "1"}
    assert manifest.get("resumed_from_versions") == ({"torch": "2"} if checkpoint else None)
    assert ("started with other versions: torch 2, now 4\n" in capsys.readouterr().out) == checkpoint
    # If versions count, it isn't reused as one made with the current ones.
    built: list = []
    run(tmp_path, source, reading(source, built), libraries=tuple(installed), reruns_on="versions")
    assert len(built) == checkpoint


def test_a_failure_because_of_the_change_is_reported_as_the_change(tmp_path, source):
    def build(work):
        source.unlink()
        raise ValueError("a JSON error, say")

    with pytest.raises(SnaketuneError, match=r"rows\.jsonl changed"):
        run(tmp_path, source, build)


def test_a_launched_process_checks_the_same_files(tmp_path, source):
    def build(work):
        assert read_attempt(work.state).code == "c"
        check_files(work.state)
        source.write_text("new")
        with pytest.raises(SnaketuneError, match="changed"):
            check_files(work.state)
        return Outcome()

    with pytest.raises(SnaketuneError):
        run(tmp_path, source, build)


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), (" 4,2", 4), ("4 ,2", 4), ("", 5), ("many", 5), ("0", 5), ("-1", 5), (",2", 5)]
)
def test_threads_are_those_of_the_outermost_level(monkeypatch, value, expected):
    """OMP_NUM_THREADS is a list for nested parallel regions."""
    monkeypatch.setattr(threads, "cores", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads.available_threads() == expected
    variables = environment(Operation(gpus=2))
    assert variables["OMP_NUM_THREADS"] == str(max(1, expected // 2))


@pytest.mark.parametrize("device", ["cpu", "cuda", ""])
def test_a_later_attempt_computes_with_the_threads_of_the_first(tmp_path, source, monkeypatch, device):
    seen: list = []

    def killed(work):
        seen.append(os.environ["OMP_NUM_THREADS"])
        raise SnaketuneError("killed")

    def build(work):
        seen.append(os.environ["OMP_NUM_THREADS"])
        (work.payload / "rows.txt").write_text("")
        return Outcome()

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(SnaketuneError, match="killed"):
        run(tmp_path, source, killed, device=device)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run(tmp_path, source, build, device=device)
    assert seen == (["3", "3"] if device else ["3", "1"])
    manifest = json.loads((tmp_path / "results/demo/x/manifest.json").read_text())
    assert manifest.get("threads") == (3 if device == "cpu" else None)


@pytest.fixture
def own_code(tmp_path) -> Path:
    shutil.copytree(
        ROOT / "workflow/snaketune", tmp_path / "code/snaketune", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "code"


def by_hand(own_code: Path, script: str) -> str:
    """Return the output of Python with the copied package."""
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(own_code)}, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_code_that_changed_after_the_plan_is_refused(own_code, tmp_path):
    digest = "from snaketune.stages.cache.code_digest import code_digest; print(code_digest('snaketune.packing.plan'))"
    planned = by_hand(own_code, digest).strip()
    module = own_code / "snaketune/packing/plan.py"
    text = module.read_text()
    run_it = (
        "from snaketune.stages.cache.code_digest import import_checked; "
        f"import_checked('snaketune.packing.plan', '{planned}', 'plan'); print('imported')"
    )
    module.write_text(text + "\n# A comment is no change.\n")
    assert by_hand(own_code, run_it) == "imported\n"
    module.write_text(text + "\nNEW = 1\n")
    assert "the code of the plan stage changed after this run was planned" in by_hand(own_code, run_it)
    module.write_text(text + "\ndef half(\n")
    assert "the code of the plan stage changed after this run was planned" in by_hand(own_code, run_it)


def test_code_that_changes_while_it_is_imported_is_refused(own_code):
    # A module that edits another one on import simulates an edit at that moment.
    editor = own_code / "snaketune/packing/plan.py"
    editor.write_text(
        editor.read_text()
        + "\nfrom pathlib import Path\nother = Path(__file__).with_name('plan.py')\nother.write_text('NEW = 1')\n"
    )
    said = by_hand(
        own_code,
        "from snaketune.stages.cache.code_digest import code_digest, import_checked\n"
        "import_checked('snaketune.packing.plan', code_digest('snaketune.packing.plan'), 'plan')",
    )
    assert "the code of the plan stage changed after this run was planned" in said


DATA = ("corpus", "tokenizer", "tokenize", "plan", "write", "pack", "card", "report", "race", "bottleneck")
# Imported where a model has adapters, since they import peft.
ADAPTERS = {"snaketune.engine.model.adapters", "snaketune.engine.model.adapter_targets", "snaketune.models.lora"}


@pytest.mark.parametrize(
    ("stages", "without", "later"),
    [
        (DATA, {"torch", "transformers"}, set()),
        pytest.param(
            ("eval", "ref_logps", "ref_pass"),
            {"transformers.trainer", "peft", "bitsandbytes", "trl", "lm_eval"},
            ADAPTERS,
            marks=pytest.mark.slow,
        ),
        (("sft", "dpo"), {"trl", "lm_eval"}, {"snaketune.training.trl_trainer"}),
    ],
)
def test_a_job_imports_at_once_all_that_it_needs_and_no_library_besides(stages, without, later):
    """A training of days isn't lost because of edits: nothing else of the package is imported later."""
    code = f"""
        import sys
        from snaketune.stages.cache.code_digest import Modules, code_digest, import_checked
        from snaketune.stages.table import STAGES
        for name in {stages}:
            module = STAGES[name].module
            import_checked(module, code_digest(module), name)
        print({without} & set(sys.modules))
        print(sorted({{one for name in {stages} for one in Modules().shaping(STAGES[name].module)}} - set(sys.modules)))
        """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", str(sorted(later))]


def test_a_job_refuses_to_run_other_code_than_was_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = {"kind": "sft", "lengths": [8], "strategy": "best-fit-decreasing", "overflow": "drop"}
    job = JobFile(stage="plan", spec=spec, code="0" * 16, out="results/plan/x", inputs={})
    write_job_file(Path("plan.json"), job, None)
    assert main(["plan", "plan.json"]) == 1
    assert "error: the code of the plan stage changed after this run was planned" in capsys.readouterr().err
    assert not list(tmp_path.glob("results/**/manifest.json"))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_held_to_the_code_that_was_planned(tmp_path, monkeypatch, stage):
    """Before its module is so much as imported."""
    monkeypatch.setattr(stages, "build_once", lambda job, build: build(None))
    monkeypatch.setattr(stages, "import_module", None)
    job = LoadedJob(
        path=tmp_path, stage=STAGES[stage], spec=None, code="0" * 16, out=tmp_path, operation=Execution(gpus=0)
    )
    with pytest.raises(SnaketuneError, match=f"the code of the {stage} stage changed"):
        stages.run(job)
