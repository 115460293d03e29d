"""A stage is built at most once per fingerprint, publishes whole results, and says what is wrong with a broken one."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import content_digest, read_artifact, rebuild_command
from snaketune.config.base import Model
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.fingerprint import Key, fingerprint, fingerprint_entries, read_files
from snaketune.stages.cache.status import Results
from snaketune.stages.host.locks import locked
from snaketune.stages.job import Job
from snaketune.stages.outcome import Outcome
from snaketune.stages.run import reset_future_times

from .demo_jobs import build_demo


def run(folder: Path, *, text: str = "rows", built: list | None = None, build=None, **job) -> Path:
    """A stage that writes one file and one record."""

    def writes(work):
        if built is not None:
            built.append(work.folder.name)
        (work.payload / "deep").mkdir()
        (work.payload / "deep/rows.txt").write_text(text)
        (work.payload / "notes.txt").write_text("notes")
        return Outcome(counts={"read": 1}, records=("notes.txt",), run={"speed": time.time()})

    return build_demo(folder, build or writes, **({"spec": {"a": 1}} | job))


def test_the_second_run_builds_nothing_and_gives_the_same_bytes(tmp_path):
    built: list = []
    manifest = run(tmp_path, built=built)
    first = manifest.read_bytes()
    manifest.unlink()
    run(tmp_path, built=built)
    assert len(built) == 1
    assert manifest.read_bytes() == first
    assert (manifest.parent / "rows/deep/rows.txt").read_text() == "rows"


def test_what_differs_from_run_to_run_is_in_no_manifest(tmp_path):
    one, other = run(tmp_path / "one"), run(tmp_path / "other")
    assert one.read_bytes() == other.read_bytes()
    assert "speed" in json.loads((one.parent / "run.json").read_text())
    assert str(tmp_path) not in one.read_text()


@pytest.mark.parametrize("change", [{"spec": {"a": 2}}, {"code": "d"}, {"stage": "other"}, {"device": "cuda"}])
def test_every_part_of_the_fingerprint_counts(tmp_path, change):
    built: list = []
    run(tmp_path, built=built)
    run(tmp_path, built=built, **change)
    assert len(built) == 2


KEY = Key(stage="s", spec={"a": 1}, code="c", device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        {"key": replace(KEY, stage="other")},
        {"key": replace(KEY, spec={"a": 2})},
        {"key": replace(KEY, code="d")},
        {"key": replace(KEY, device="cuda")},
        {"inputs": {"role": ["e"]}},
        {"inputs": {"other": ["d"]}},
        {"versions": {"torch": "3"}},
        {"versions": {}},
    ],
)
def test_each_argument_is_in_the_fingerprint(change):
    arguments = {"key": KEY, "inputs": {"role": ["d"]}, "versions": None}
    assert fingerprint(**arguments) != fingerprint(**(arguments | change))


def test_a_measurement_reuses_no_finished_result(tmp_path):
    built: list = []
    run(tmp_path, built=built)
    run(tmp_path, built=built, measures=True)
    assert len(built) == 2
    run(tmp_path, built=built)
    assert len(built) == 2


def test_a_reused_result_is_published_with_the_spec_that_asks_for_it(tmp_path):
    """A key may leave out parts of a spec."""
    built: list = []
    key = Key(stage="demo", spec={"a": 1}, code="c")
    for note in ("first", "second"):
        spec = {"a": 1, "note": note}
        manifest = run(tmp_path, built=built, spec=spec, keys=(key,))
        assert json.loads(manifest.read_text())["spec"] == spec
    assert len(built) == 1


def fingerprint_of(stage: str, files: dict[str, list[Path]]) -> tuple[str, dict[str, list[str]]]:
    """Return the inputs of these files as the manifest has them."""
    read = read_files(files, Path("results/.work"))
    inputs = {role: [entry for _, entry in fingerprint_entries(role, some)] for role, some in read.items()}
    return fingerprint(Key(stage=stage, spec={}, code="c"), inputs, None), inputs


def test_the_fingerprint_covers_file_contents_and_not_paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("same")
    digests = [fingerprint_of("s", {"files": [tmp_path / name / "f"]})[0] for name in ("a", "b")]
    (tmp_path / "b/f").write_text("edited")
    assert digests[0] == digests[1] != fingerprint_of("s", {"files": [tmp_path / "b/f"]})[0]


def in_folder(role: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The fingerprint of a folder's files, and what the plan's look at the same files calls changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    result, inputs = fingerprint_of("eval", {role: files})
    job = Job(stage="eval", name="x", spec=Model(), files={role: tuple(map(str, files))})
    assert not list(Results(code_of=str)._inputs(job, inputs))
    return result, inputs


@pytest.mark.parametrize(("role", "counts"), [("base", True), ("tasks", True), ("task_data", True), ("files", False)])
def test_names_count_where_files_are_read_as_a_folder(tmp_path, role, counts):
    folder = tmp_path / "one"
    (folder / "deep").mkdir(parents=True)
    for name in ("chat_template.jinja", "config.json", "deep/data.json"):
        (folder / name).write_text(name)
    before, inputs = in_folder(role, folder)
    moved = folder.rename(tmp_path / "other")
    assert in_folder(role, moved)[0] == before
    # Its place in the order stays.
    (moved / "chat_template.jinja").rename(moved / "chat_template_old.jinja")
    assert (in_folder(role, moved)[0] != before) == counts
    files = tuple(str(path) for path in sorted(moved.rglob("*")) if path.is_file())
    job = Job(stage="eval", name="x", spec=Model(), files={role: files})
    reasons = list(Results(code_of=str)._inputs(job, inputs))
    assert ["chat_template_old.jinja" in why for why in reasons] == ([True] if counts else [])


def test_the_content_digest_sees_the_payload_and_the_format_alone(tmp_path):
    manifest = json.loads(run(tmp_path).read_text())
    assert content_digest(manifest) == content_digest(manifest | {"counts": {}, "records": {}, "spec": {}, "code": "z"})
    changed = {"deep/rows.txt": {"digest": "xxh3:0"}}
    assert content_digest(manifest) != content_digest(manifest | {"payload": changed})
    # And what readers take from the manifest itself: shards are padded with it.
    assert content_digest(manifest) != content_digest(manifest | {"pad_id": 5})


def test_a_reader_names_the_damaged_file_and_the_command_that_heals_it(tmp_path):
    manifest = run(tmp_path)
    artifact = read_artifact(manifest, "rows")
    assert artifact.file("deep/rows.txt").read_text() == "rows"
    (manifest.parent / "rows/deep/rows.txt").write_text("other")
    with pytest.raises(SnaketuneError, match=r"deep/rows\.txt is damaged.*: rm .*manifest\.json && snakemake"):
        artifact.file("deep/rows.txt")
    (manifest.parent / "rows/deep/rows.txt").unlink()
    with pytest.raises(SnaketuneError, match=r"deep/rows\.txt is missing"):
        artifact.file("deep/rows.txt")


def test_a_failed_build_leaves_nothing_published_and_starts_afresh(tmp_path):
    def fails(work):
        (work.payload / "half").write_text("half")
        (work.state / "checkpoint").write_text("kept")
        raise SnaketuneError("no")

    with pytest.raises(SnaketuneError):
        run(tmp_path, build=fails)
    assert not (tmp_path / "results/demo/x").exists()
    seen: list = []

    def builds(work):
        seen.append(((work.payload / "half").exists(), (work.state / "checkpoint").read_text()))
        (work.payload / "rows.txt").write_text("rows")
        return Outcome()

    run(tmp_path, build=builds)
    assert seen == [(False, "kept")]


def _slow(folder: Path, log: Path) -> None:
    def build(work):
        with log.open("a") as file:
            file.write(f"{os.getpid()} begins\n")
            file.flush()
            time.sleep(1.0)
            file.write(f"{os.getpid()} ends\n")
        (work.payload / "rows.txt").write_text("rows")
        return Outcome()

    run(folder, build=build)


def test_the_command_that_heals_names_the_config_that_was_given(tmp_path, monkeypatch):
    monkeypatch.delenv("SNAKETUNE_CONFIG", raising=False)
    assert rebuild_command(Path("m.json")) == "rm m.json && snakemake"
    monkeypatch.setenv("SNAKETUNE_CONFIG", "my.yaml")
    assert rebuild_command(Path("m.json")) == "rm m.json && snakemake --configfile my.yaml"


def test_two_jobs_never_write_one_work_folder(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_slow, args=(tmp_path, log)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    # The first builds, and the others find its result.
    assert len(log.read_text().splitlines()) == 2


def test_clean_only_looks_at_locks_and_keeps_what_is_in_use(tmp_path, capsys):
    manifest = run(tmp_path)
    manifest.unlink()
    root = tmp_path / "results/.work"
    (lock,) = root.glob("demo/*/lock")
    # The lock of the last holder, maybe another user's file, or on a full disk.
    lock.write_text("process 1 on elsewhere\n", encoding="utf-8")
    clean(root, remove=False)
    assert "would remove" in capsys.readouterr().out
    assert lock.read_text(encoding="utf-8") == "process 1 on elsewhere\n"
    with locked(lock, "demo"):
        clean(root, remove=True)
    assert f"in use by process {os.getpid()} on " in capsys.readouterr().out
    assert lock.exists()


def test_clean_lists_first_and_retains_published_work(tmp_path, capsys):
    run(tmp_path)
    run(tmp_path, spec={"a": 2}, text="newer")
    root = tmp_path / "results/.work"
    clean(root, remove=False)
    assert "would remove" in capsys.readouterr().out
    assert len(list(root.glob("demo/*"))) == 2
    clean(root, remove=True)
    (retained,) = root.glob("demo/*")
    assert retained.name == json.loads((tmp_path / "results/demo/x/manifest.json").read_text())["fingerprint"]


def test_the_attempt_that_started_last_publishes(tmp_path):
    """The job of an older config outlives its driver, and ends when the newer one has published, or is still at work."""
    out = tmp_path / "results/demo/x/manifest.json"
    newer = []

    def run_newer(work):
        run(tmp_path, spec={"a": 2}, text="newer")
        newer.append(out.read_bytes())
        (work.payload / "rows.txt").write_text("older")
        return Outcome()

    with pytest.raises(SnaketuneError, match=r"a job that started later makes another result .* isn't published"):
        run(tmp_path, build=run_newer)
    assert [out.read_bytes()] == newer
    assert (out.parent / "rows/deep/rows.txt").read_text() == "newer"
    # Nothing is lost: when it is needed again, it is reused.
    built: list = []
    run(tmp_path, built=built)
    assert not built and (out.parent / "rows/rows.txt").read_text() == "older"


def test_a_finished_result_that_could_not_be_published_is_retained(tmp_path, capsys, monkeypatch):
    """A message about disk space names a command that frees some."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    root = tmp_path / "results/.work"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path)
    (work,) = (root / "demo").iterdir()
    clean(root, remove=True)
    assert f"kept {work}: a finished result that its config's next run publishes" in capsys.readouterr().out
    built: list = []
    manifest = run(tmp_path, built=built)
    assert not built and manifest.is_file()
    # Once published, and then replaced by another config's result, it is old work.
    manifest.unlink()
    clean(root, remove=True)
    assert not work.exists()


def test_a_manifest_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (order.append(to.name), replace(path, to)))
    write_json(tmp_path / "manifest.json", {"a": 1})
    # The file, its name, and the folder that has it.
    assert order == ["fsync", "manifest.json", "fsync"]


@pytest.mark.parametrize("which", ["published", "kept"])
def test_a_damaged_manifest_is_known_for_what_it_is(tmp_path, monkeypatch, which):
    """One digit of a count: still JSON, still the payload's digests, and not what was written."""
    built: list = []
    manifest = run(tmp_path, built=built)
    whole = manifest.read_bytes()
    (retained,) = tmp_path.glob("results/.work/demo/*/manifest.json")
    damaged = manifest if which == "published" else retained
    damaged.write_bytes(damaged.read_bytes().replace(b'"read": 1', b'"read": 3'))
    if which == "published":
        with pytest.raises(SnaketuneError, match=r"manifest\.json is damaged.*remove it and run again"):
            read_artifact(manifest, "rows")
        monkeypatch.chdir(tmp_path)
        status = Results(code_of=lambda stage: "c").of(Job(stage="demo", name="x", spec=Model()))
        assert status.why == ("its manifest.json is damaged",)
    manifest.unlink()
    run(tmp_path, built=built)
    assert manifest.read_bytes() == whole
    assert len(built) == (2 if which == "kept" else 1)


def test_a_manifest_without_its_digest_is_damaged(tmp_path):
    manifest = run(tmp_path)
    described = json.loads(manifest.read_text())
    del described["manifest_digest"]
    manifest.write_text(json.dumps(described))
    with pytest.raises(SnaketuneError, match=r"manifest\.json is damaged"):
        read_artifact(manifest, "rows")


def test_future_times_of_results_are_set_to_now(tmp_path):
    """After a clock was set back; Snakemake removes what is made of them."""
    manifest = run(tmp_path)
    past, future = time.time() - 86400, time.time() + 86400
    os.utime(manifest, (past, past))
    os.utime(manifest.parent / "rows", (future, future))
    waited_for = [tmp_path / name for name in ("preflight.json", "calibration.json")]
    for path in waited_for:
        path.touch()
        os.utime(path, (future, future))
    execution = Execution(preflight=str(waited_for[0]), calibration=str(waited_for[1]))
    reset_future_times([read_artifact(manifest, "rows")], execution)
    assert all(path.stat().st_mtime <= time.time() for path in waited_for)
    assert manifest.stat().st_mtime == past
    assert (manifest.parent / "rows").stat().st_mtime <= time.time()
