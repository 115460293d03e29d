"""Files of finished results: whatever happens to one, the result isn't computed again while there is an intact copy."""

import errno
import multiprocessing
import os
import shutil
import stat
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from snaketune.stages.cache.payload_files import place
from snaketune.stages.outcome import Outcome

from .demo_jobs import SnapshotSpec, build_demo

SETTINGS, WEIGHTS, DEEP = "generation_config.json", "model.safetensors", "adapter/adapter_config.json"
CONTENT = {SETTINGS: "temperature 0.6", WEIGHTS: "weights", DEEP: "rank 4"}


def run(folder: Path, built: list, out: str = "results/sft/run") -> Path:
    """A stage that writes a small model, its weights as safetensors does, whatever the umask. Return the published folder."""

    def build(work):
        built.append(out)
        (work.payload / "adapter").mkdir()
        for name, text in CONTENT.items():
            (work.payload / name).write_text(text)
        (work.payload / WEIGHTS).chmod(0o600)
        return Outcome()

    build_demo(folder, build, stage="sft", out=folder / out, payload="model")
    return folder / out / "model"


def edit(path: Path) -> None:
    """In place, with the same size, as users do who find a file read-only."""
    path.chmod(0o644)
    path.write_text(path.read_text()[:-1] + "9")


def replace(path: Path) -> None:
    """As editors do that write a new file."""
    (new := path.with_name("new")).write_text("temperature 0.75")
    new.replace(path)


def cut(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 3)


def hide(path: Path) -> None:
    path.chmod(0)


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture(params=["hard links", "no hard links"])
def links(request, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, "no")

    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", refused)
    return request.param == "hard links"


@pytest.mark.parametrize("damage", [edit, replace, cut, hide, remove])
@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("where", ["published", "cached"])
def test_a_file_never_costs_a_training_if_there_is_an_intact_copy(tmp_path, links, where, name, damage, capsys):
    built: list = []
    published = run(tmp_path, built)
    (cached,) = tmp_path.glob("results/.work/sft/*/payload")
    damage((published if where == "published" else cached) / name)
    if where == "published":
        # Snakemake removes the outputs of a job before it runs.
        shutil.rmtree(published.parent)
    run(tmp_path, built)
    all_are_damaged = links and name == WEIGHTS and damage in (edit, cut)
    assert len(built) == (2 if all_are_damaged else 1)
    assert ("is made again" in capsys.readouterr().out) == all_are_damaged
    for folder in (published, cached):
        assert {file: (folder / file).read_text() for file in CONTENT} == CONTENT
        assert [stat.S_IMODE((folder / file).stat().st_mode) for file in CONTENT] == [0o644, 0o444, 0o644]
    assert (published / WEIGHTS).samefile(cached / WEIGHTS) == links
    assert not (published / SETTINGS).samefile(cached / SETTINGS)


def test_intact_copies_are_those_of_any_result_and_a_restored_file_says_so(tmp_path, capsys):
    built: list = []
    published, other = run(tmp_path, built), run(tmp_path, built, "results/sft/other")
    (cached,) = tmp_path.glob("results/.work/sft/*/payload")
    shutil.rmtree(published.parent)
    shutil.rmtree(cached)
    run(tmp_path, built)
    assert built == ["results/sft/run"]
    said = capsys.readouterr().out
    assert f"{cached / DEEP} is missing; it is restored from {other / DEEP}\n" in said
    assert (published / WEIGHTS).samefile(other / WEIGHTS)


def test_a_file_that_is_damaged_everywhere_is_made_again_from_the_unfinished_work(tmp_path):
    seen: list = []

    def build(work):
        seen.append((work.state / "checkpoint").exists())
        (work.state / "checkpoint").touch()
        (work.payload / WEIGHTS).write_text("weights")
        return Outcome()

    for _ in range(2):
        out = tmp_path / "results/sft/run"
        build_demo(tmp_path, build, stage="sft", spec=SnapshotSpec(), out=out, payload="model")
        edit(tmp_path / "results/sft/run/model" / WEIGHTS)
    assert seen == [False, True]


def test_no_file_is_restored_through_a_link(tmp_path):
    published = run(tmp_path, [])
    (cached,) = tmp_path.glob("results/.work/sft/*/payload")
    (tmp_path / "precious").mkdir()
    for folder in (cached / "adapter", cached):
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "precious", target_is_directory=True)
        built: list = []
        run(tmp_path, built)
        assert built and not list((tmp_path / "precious").iterdir())
    assert (published / DEEP).read_text() == "rank 4"


def test_weights_of_an_earlier_version_are_linked_read_only_and_small_files_are_copied(tmp_path):
    """It linked all files, writable."""
    built: list = []
    published = run(tmp_path, built)
    (cached,) = tmp_path.glob("results/.work/sft/*/payload")
    (cached / WEIGHTS).chmod(0o600)
    (published / SETTINGS).unlink()
    os.link(cached / SETTINGS, published / SETTINGS)
    run(tmp_path, built)
    assert len(built) == 1
    assert stat.S_IMODE((published / WEIGHTS).stat().st_mode) == 0o444
    assert not (published / SETTINGS).samefile(cached / SETTINGS)


def _member(user: int, group: int, folder: Path, out: str, built: int | None) -> None:
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.umask(0o002)
    calls: list = []
    with nullcontext() if built is not None else pytest.raises(PermissionError):
        run(folder, calls, out)
    assert len(calls) == (built or 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_members_of_a_team_reuse_replace_and_restore_each_others_results():
    group, first, second = 60000, 60001, 60002
    # pytest's own folders are its user's alone.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, -1, group)
        folder.chmod(0o2775)

        def member(user: int, out: str, built: int | None) -> None:
            process = multiprocessing.get_context("fork").Process(
                target=_member, args=(user, group, folder, out, built)
            )
            process.start()
            process.join()
            assert process.exitcode == 0

        member(first, "results/sft/run", 1)
        member(second, "results/sft/run", 0)
        member(second, "results/sft/other", 0)
        (cached,) = folder.glob("results/.work/sft/*/payload")
        cut(cached / SETTINGS)
        (cached / WEIGHTS).unlink()
        member(second, "results/sft/run", 0)
        member(first, "results/sft/run", 0)
        for published in folder.glob("results/sft/*/model"):
            assert {file: (published / file).read_text() for file in CONTENT} == CONTENT
        assert {path.stat().st_gid for path in folder.rglob("*")} == {group}
        # What another member may not read isn't damaged: it is neither made again nor removed.
        for published in folder.glob("results/sft/*"):
            shutil.rmtree(published)
        (cached / WEIGHTS).chmod(0o600)
        os.chown(cached / WEIGHTS, first, group)
        member(second, "results/sft/run", None)
        member(first, "results/sft/run", 0)


@pytest.mark.parametrize(("mode", "linked"), [(0o444, True), (0o644, False)])
def test_a_table_that_can_be_written_to_is_copied(tmp_path, mode, linked):
    """A write through one link would change the other."""
    source, target = tmp_path / "a.arrow", tmp_path / "b.arrow"
    source.write_bytes(b"rows")
    source.chmod(mode)
    place(source, target)
    assert source.samefile(target) == linked
    assert not target.stat().st_mode & 0o222
