"""Results that other users can write to: manifests that name other files, links that lead out, and permissions of new files."""

import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.numpy import save_file

from snaketune.artifacts.manifest import read_artifact, write_manifest
from snaketune.engine.checkpoints import mark_complete
from snaketune.engine.model import compiling
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import Claim, WorkFolder, publish
from snaketune.stages.job import result_at
from snaketune.stages.links import check_link, link_payload
from snaketune.stages.outcome import Outcome
from tests.stages.demo_jobs import SnapshotSpec
from tests.stages.test_build_once import run
from tests.workflow.conftest import wrong_modes

OUTSIDE = [
    "../secret",
    "../../../secret",
    "deep/../../secret",
    "/etc/passwd",
    "..",
    ".",
    "",
    "deep//secret",
    "deep/./x",
    "a\0b",
]


@pytest.fixture
def made(tmp_path):
    """A result and its work folder, beside a file and a folder that are none of their business."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    (tmp_path / "results/demo/secret").parent.mkdir(parents=True)
    (tmp_path / "results/demo/x").mkdir()
    (tmp_path / "results/demo/x/secret").write_text("a secret")
    manifest = run(tmp_path)
    (work,) = (tmp_path / "results/.work/demo").iterdir()
    yield tmp_path, manifest, work
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in (tmp_path / "precious").iterdir()) == ["thesis.txt"]


def rename_in(manifest: Path, name: str) -> None:
    content = json.loads(manifest.read_text())
    content["payload"][name] = content["payload"].pop("deep/rows.txt")
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_names_files_of_its_payload_alone(made, name):
    """A manifest that was tampered with: no file outside is read, linked or written."""
    folder, manifest, work = made
    rename_in(manifest, name)
    with pytest.raises(SnaketuneError, match=r"lists the file .* which is outside its payload"):
        read_artifact(manifest, "rows")
    rename_in(work / "manifest.json", name)
    # The cached result isn't trusted either, and is made again.
    built: list = []
    run(folder, built=built)
    assert len(built) == 1
    assert (manifest.parent / "rows/deep/rows.txt").read_text() == "rows"


def test_of_a_manifest_by_itself_only_the_stage_counts(made, mark):
    _, manifest, _ = made
    for stage in ("../../etc", "os", 5, None, {"a": 1}):
        write_manifest(manifest, json.loads(manifest.read_text()) | {"stage": stage})
        with pytest.raises(SnaketuneError, match="is no snaketune manifest"):
            result_at(manifest)


@pytest.mark.parametrize("name", [".rows.partial", "rows"])
def test_publishing_follows_no_link(made, name):
    folder, manifest, _ = made
    shutil.rmtree(manifest.parent / "rows")
    (manifest.parent / name).symlink_to(folder / "precious")
    run(folder)
    assert not (manifest.parent / "rows").is_symlink()
    assert (manifest.parent / "rows/deep/rows.txt").read_text() == "rows"


@pytest.mark.parametrize("name", ["manifest.json", ".manifest.json.partial", "run.json"])
def test_no_file_is_written_through_a_link(made, name):
    folder, manifest, _ = made
    for path in (manifest.parent / name, manifest.parent / "run.json"):
        path.unlink(missing_ok=True)
    (manifest.parent / name).symlink_to(folder / "precious/thesis.txt")
    run(folder)
    assert not manifest.is_symlink() and not (manifest.parent / "run.json").is_symlink()


@pytest.mark.parametrize("name", ["payload.partial", "payload", "state"])
def test_work_folders_follow_no_link(made, name):
    folder, _, work = made
    (work / "manifest.json").unlink()
    if (work / name).exists():
        shutil.rmtree(work / name)
    (work / name).symlink_to(folder / "precious")

    built: list = []
    run(folder, built=built)
    assert len(built) == 1
    WorkFolder(work).discard()


def test_a_file_of_a_payload_that_is_a_link_is_still_held_against_its_digest(made):
    folder, manifest, _ = made
    path = manifest.parent / "rows/deep/rows.txt"
    path.unlink()
    path.symlink_to(folder / "precious/thesis.txt")
    with pytest.raises(SnaketuneError, match="is damaged"):
        read_artifact(manifest, "rows").file("deep/rows.txt")


@pytest.mark.parametrize("remove", [False, True])
def test_cleaning_follows_no_link(made, remove, capsys):
    folder, _, work = made
    (folder / "elsewhere/precious").mkdir(parents=True)
    (folder / "elsewhere/precious/x").write_text("x")
    (folder / "results/.work/sft").symlink_to(folder / "elsewhere")
    (work.parent / "0123").symlink_to(folder / "precious")
    (work.parent / "4567").mkdir()
    (work.parent / "4567/inside").symlink_to(folder / "precious")
    clean(folder / "results/.work", remove=remove)
    assert (folder / "elsewhere/precious/x").exists()
    assert capsys.readouterr().out.count("is a link to a folder that isn't part of these results") == 2
    assert (work.parent / "4567").exists() != remove


def test_results_may_lie_elsewhere_as_a_whole(tmp_path):
    """A link to another disk is the user's own, and followed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    manifest = run(tmp_path)
    clean(tmp_path / "results/.work", remove=True)
    assert read_artifact(manifest, "rows").files()


@pytest.mark.parametrize("payload", ["../precious", "sft/../../precious", "/etc", "corpus/x/rows", "."])
def test_the_link_to_the_best_leads_to_a_result_alone(made, payload):
    folder, _, _ = made
    (folder / "results/report").mkdir()
    write_json(folder / "results/report/manifest.json", {"best": {"payload": payload}})
    with pytest.raises(SnaketuneError, match="which is no payload of sft or dpo"):
        link_payload(folder / "results/report", "best")
    assert not (folder / "results/best").exists()


def test_a_file_with_the_name_of_the_link_is_not_removed(made):
    folder, _, _ = made
    (folder / "results/best").mkdir()
    with pytest.raises(SnaketuneError, match="is no link"):
        check_link(folder / "results/best")
    (folder / "results/best").rmdir()
    (folder / "results/best").symlink_to(folder / "precious")
    check_link(folder / "results/best")


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_files_get_exactly_the_rights_that_the_user_gives(tmp_path, mask):
    """Also those that libraries write for their owner alone."""

    def build(work):
        checkpoint = work.state / "checkpoints/checkpoint-1"
        for folder in (checkpoint, work.payload / "adapter"):
            folder.mkdir(parents=True)
            save_file({"a": numpy.zeros(1)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
        mark_complete(checkpoint, work.check_held)
        RowStore(work.root, {}).add({b"sixteen bytes...": b"value"})
        return Outcome()

    before = os.umask(mask)
    try:
        run(tmp_path, build=build, spec=SnapshotSpec())
    finally:
        os.umask(before)
    # The checkpoint, the cached result and the published one.
    assert len([*tmp_path.glob("results/**/model.safetensors")]) == 3
    assert wrong_modes(tmp_path / "results", mask) == {}


@pytest.mark.workflow
def test_a_team_can_use_all_that_a_project_writes(finished):
    assert wrong_modes(finished.folder / "results", finished.umask) == {}


def test_a_foreign_result_is_read_as_data(made, mark):
    """A whole work folder put there: what it says is published, and none of it is run."""
    folder, _, work = made
    (work / "state").mkdir()
    for name in ("attempt.json", "outcome.json", "operation.json", "accelerate.yaml"):
        (work / "state" / name).write_bytes(mark.bomb())
    (work / "payload/deep/__init__.py").write_text(mark.code())
    run(folder)
    mark.check()
    artifact = read_artifact(work / "manifest.json", "payload")
    claim = Claim(folder / "results/demo/y", "0", folder / "results/.work")
    publish(artifact, WorkFolder(work), claim, "rows", {})
    assert not (folder / "results/demo/y/rows/deep/__init__.py").exists()


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_compiled_code_of_others_is_not_loaded(tmp_path, monkeypatch, mode):
    """torch caches compiled code in /tmp, in a folder whose name another user can guess and create first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    own = compiling._cache_error()
    assert bool(own) == (mode == 0o777)
    monkeypatch.setattr(compiling.os, "getuid", lambda: 12345)
    with pytest.raises(SnaketuneError, match=r"other users can write to .*, from which it loads code"):
        compiling.choose_compilation(True, 0.0, torch.device("cpu"))
    chosen = compiling.choose_compilation("auto", 1e30, torch.device("cpu"))
    assert not chosen.compiled and "TORCHINDUCTOR_CACHE_DIR" in chosen.reason


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [b"[]", b"3", b"{", NESTED, b'{"demo": 3}', b'{"demo": {"a": 3}}', b'{"payload": {"a": 3}, "records": {}}'],
)
@pytest.mark.parametrize("name", ["manifest.json", "state/attempt.json", "accepted_code.json"])
def test_a_file_of_the_workflow_with_other_content_is_an_error_or_made_again(made, name, content):
    from snaketune.stages.cache.attempt import read_attempt
    from snaketune.stages.cache.code_digest import accepted_codes

    _, manifest, work = made
    (path := work / name).parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name == "manifest.json":
        assert WorkFolder(work).result() is None
        manifest.write_bytes(content)
        with pytest.raises(SnaketuneError, match=r"manifest\.json .*run again"):
            result_at(manifest)
        return
    with pytest.raises(SnaketuneError, match=f"{path.name} .*remove"):
        read_attempt(path.parent) if path.parent.name == "state" else accepted_codes("demo", "a", work)


def test_an_outcome_has_no_room_for_code():
    assert set(Outcome.__dataclass_fields__) == {"counts", "about", "records", "run"}


def test_kept_rows_follow_no_link(tmp_path):
    from snaketune.stages.cache.row_store import RowStore

    elsewhere, work, row = tmp_path / "elsewhere", tmp_path / ".work", {b"sixteen bytes...": b"value"}
    work.mkdir()
    RowStore(elsewhere, {}).add(row)
    before = sorted(elsewhere.rglob("*"))
    (work / ".rows").symlink_to(elsewhere / ".rows")
    store = RowStore(work, {})
    store.add(row)
    assert store.find(row) == {}
    assert sorted(elsewhere.rglob("*")) == before
