"""Manual changes to a project, and the exact rules that must run again, with Snakemake's records and without them."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import write_manifest

from .conftest import Project, rules_in
from .reruns import CARD, CORPUS, DPO, EVAL, REPORT, SFT, TOKENIZER

pytestmark = pytest.mark.workflow
LONG_AGO = time.mktime((2020, 1, 1, 0, 0, 0, 0, 0, 0))


def put(dotted: str, value) -> Callable[[Project], None]:
    """An edit of the config."""

    def edit(project: Project) -> None:
        *folders, leaf = dotted.split(".")
        section = project.config
        for folder in folders:
            section = section[folder]
        section[leaf] = value

    return edit


def remove(*patterns: str) -> Callable[[Project], None]:
    def edit(project: Project) -> None:
        for pattern in patterns:
            (path,) = project.folder.glob(pattern)
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def replace_by_an_older_file(how: Callable[[Path, Path], object]) -> Callable[[Project], None]:
    """Other rows of the same size, written years ago."""

    def edit(project: Project) -> None:
        data = project.folder / "data/chat.jsonl"
        other = project.folder / "other.jsonl"
        text = data.read_text(encoding="utf-8")
        # Two letters are swapped, so that the size stays the same.
        other.write_text(text.replace("the ", "hte ", 1), encoding="utf-8")
        assert other.stat().st_size == data.stat().st_size
        os.utime(other, (LONG_AGO, LONG_AGO))
        how(other, data)
        assert data.stat().st_mtime == LONG_AGO

    return edit


def keep_its_time(project: Project) -> None:
    """Like an editor that restores the time, or a copy within one tick of a coarse clock."""
    data = project.folder / "data/preferences.jsonl"
    result = data.stat()
    text = data.read_text(encoding="utf-8")
    data.write_text(text.replace("the ", "hte ", 1), encoding="utf-8")
    os.utime(data, ns=(result.st_atime_ns, result.st_mtime_ns))


def touch_all(when: float) -> Callable[[Project], None]:
    def edit(project: Project) -> None:
        for number, path in enumerate(sorted(project.folder.rglob("*"), reverse=True)):
            if ".snakemake" not in path.parts and ".work" not in path.parts:
                os.utime(path, (when + number, when + number))

    return edit


def copy_over_itself(project: Project) -> None:
    """A file of the same content under the same name: another inode, another time."""
    for path in project.folder.glob("data/*"):
        shutil.copyfile(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)


def results_in_another_project(project: Project) -> None:
    """Only data and results go elsewhere, file by file in any order and with new times; no links, no work folders."""
    elsewhere = project.folder.with_name("elsewhere")
    for part in ("results", "data"):
        shutil.copytree(
            project.folder / part,
            elsewhere / part,
            copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns(".work"),
        )
    project.folder = elsewhere


def cut(pattern: str) -> Callable[[Project], None]:
    """A file loses its last byte."""

    def edit(project: Project) -> None:
        (path,) = project.folder.glob(pattern)
        path.chmod(0o644)
        os.truncate(path, path.stat().st_size - 1)

    return edit


def damage_manifest(project: Project) -> None:
    (project.folder / "results/dpo/run/manifest.json").write_text("{", encoding="utf-8")


def spell_paths_otherwise(project: Project) -> None:
    project.config["corpora"]["chat"]["sources"][0]["files"] = ["./data//chat.jsonl"]
    project.config["corpora"]["pairs"]["sources"][0]["files"] = [str(project.folder / "data/preferences.jsonl")]
    project.config["tokenizers"]["small"]["chat_template"] = "data/../data/chatml.jinja"


def both(*edits: Callable[[Project], None]) -> Callable[[Project], None]:
    def edit(project: Project) -> None:
        for one in edits:
            one(project)

    return edit


# The change, how it is made, which rules must run again, and what is logged.
BY_HAND: dict[str, tuple[Callable[[Project], None], set[str], str]] = {
    "nothing": (both(), set(), ""),
    "learning rate": (put("sft.run.training.learning_rate", 0.004), SFT, "sft/run: spec differs (training.learning_rate: 0.002 → 0.004)"),
    "vocabulary": (put("tokenizers.small.train.vocab_size", 410), TOKENIZER, "tokenizer/small: spec differs (vocab_size: 400 → 410)"),
    "a prettier report": (put("report", {"title": "other"}), REPORT, "report: spec differs (title"),
    "paths spelled otherwise": (spell_paths_otherwise, set(), ""),
    "an older file by cp -p": (replace_by_an_older_file(shutil.copy2), CORPUS, "corpus/chat: changed input (data/chat.jsonl)"),
    "an older file by mv": (replace_by_an_older_file(os.replace), CORPUS, "corpus/chat: changed input (data/chat.jsonl)"),
    "a file that keeps its time": (keep_its_time, CORPUS, "corpus/pairs: changed input (data/preferences.jsonl)"),
    "all is touched": (touch_all(time.time() + 60), set(), ""),
    "all is from tomorrow, and a learning rate": (both(touch_all(time.time() + 86400), put("sft.run.training.learning_rate", 0.004)), SFT, "sft/run: spec differs"),
    "all is old": (touch_all(LONG_AGO), set(), ""),
    "data copied over themselves": (copy_over_itself, set(), ""),
    "results elsewhere": (results_in_another_project, set(), ""),
    "results elsewhere, then a learning rate": (both(results_in_another_project, put("dpo.run.training.learning_rate", 0.5)), DPO, "dpo/run: spec differs"),
    "a result removed": (remove("results/dpo/run"), DPO, "eval/both/dpo-run: missing input (dpo/run)"),
    "shards removed": (remove("results/pack/chat-*/shards"), {"pack"} | SFT, "files are missing or of another size (documents.arrow"),
    "a manifest removed": (remove("results/tokenizer/small/manifest.json"), TOKENIZER, ""),
    "one file of a model removed": (remove("results/dpo/run/model/config.json"), DPO, "dpo/run: files are missing or of another size (config.json)"),
    "a record removed": (remove("results/corpus/chat/rows/quarantine.jsonl"), CORPUS, "files are missing or of another size (quarantine.jsonl)"),
    "a page removed": (remove("results/report/pages/index.html"), REPORT, "report: files are missing or of another size (index.html)"),
    "a model cut short": (cut("results/dpo/run/model/model.safetensors"), DPO, "files are missing or of another size (model.safetensors)"),
    "a manifest damaged": (damage_manifest, DPO, "dpo/run: its manifest.json can't be read"),
    "an evaluation removed": (remove("results/eval/both/sft-run"), EVAL, ""),
}  # fmt: skip

# Of these, rows or settings change, which preflight checks before anything trains on them.
CHECKED_AGAIN = {
    "learning rate", "all is from tomorrow, and a learning rate", "vocabulary", "an older file by cp -p", "an older file by mv", "a file that keeps its time",
    "results elsewhere, then a learning rate", "shards removed", "a manifest removed", "a record removed",
}  # fmt: skip

# With its notes, Snakemake sees most of this by itself; here it must not see more.
WITH_NOTES = [
    "nothing",
    "learning rate",
    "all is from tomorrow, and a learning rate",
    "paths spelled otherwise",
    "an older file by mv",
    "all is touched",
    "a result removed",
]
CASES = [*((done, False) for done in BY_HAND), *((done, True) for done in WITH_NOTES)]


@pytest.mark.parametrize(
    ("done", "notes"), CASES, ids=[f"{done}, {'with' if notes else 'without'} notes" for done, notes in CASES]
)
def test_what_is_done_by_hand_reruns_exactly_its_rules(project, done, notes):
    edit, expected, said = BY_HAND[done]
    if not notes:
        shutil.rmtree(project.folder / ".snakemake")
    edit(project)
    shown = project.snakemake("--dry-run")
    assert rules_in(shown) == expected | ({"preflight"} if done in CHECKED_AGAIN else set())
    assert said in shown
    if not expected:
        assert "stale: " not in shown


def computed(said: str) -> set[str]:
    return set(re.findall(r"^(\w+): made ", said, re.MULTILINE))


def test_a_removed_result_comes_back_at_once_from_its_work_folder(project):
    target = "results/dpo/run/manifest.json"
    before = project.read(target)
    shutil.rmtree(project.folder / "results/dpo")
    said = project.snakemake(target)
    assert "dpo: nothing to compute" in said
    assert computed(said) == set()
    assert project.read(target) == before
    assert (project.folder / "results/dpo/run/model/model.safetensors").is_file()


def test_force_still_means_everything_below(project):
    assert project.stale("--forcerun", "dpo") == DPO
    assert project.stale("--forcerun", "results/sft/run/manifest.json") == SFT
    assert project.stale("results/sft/run/manifest.json", "--force") == {"sft"}


def test_only_what_a_target_needs_is_run_and_logged(project):
    project.config["dpo"]["run"]["beta"] = 0.2
    assert project.stale("results/sft/run/manifest.json") == set()
    shown = project.snakemake("--dry-run", "results/sft/run/manifest.json")
    assert "stale: " not in shown


LOSS = "workflow/snaketune/engine/preference_losses.py"


@pytest.mark.slow
def test_a_code_change_is_seen_without_notes_and_can_be_accepted(own_code):
    shutil.rmtree(own_code.folder / ".snakemake")
    path = own_code.code / LOSS
    original = path.read_text(encoding="utf-8")
    path.write_text(f"{original}\nNEW = 1\n", encoding="utf-8")
    shown = own_code.snakemake("--dry-run")
    assert rules_in(shown) == DPO
    assert "stale: dpo/run: the code of stage dpo has changed" in shown
    # Touching accepts nothing: what the manifest says is still so.
    own_code.snakemake("--touch")
    assert own_code.stale() == DPO
    manifest = own_code.read("results/dpo/run/manifest.json")
    assert "dpo/run" in own_code.snakemake("accept_code")
    assert own_code.stale() == set()
    # A result that is brought back, or published under a new name, isn't computed again either.
    shutil.rmtree(own_code.folder / "results/dpo/run")
    own_code.config["dpo"]["run"]["beta"] = 0.2
    assert own_code.stale() == DPO
    own_code.config["dpo"]["run"]["beta"] = 0.1
    assert computed(own_code.snakemake("results/dpo/run/manifest.json")) == set()
    assert own_code.read("results/dpo/run/manifest.json") == manifest
    # Only this change was accepted, not the next.
    path.write_text(f"{original}\nNEW = 2\n", encoding="utf-8")
    assert own_code.stale() == DPO
    path.write_text(original, encoding="utf-8")
    assert own_code.stale() == set()


def made_with(project: Project, stage: str, **versions: str) -> None:
    for path in project.folder.glob(f"results/{stage}/**/manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["versions"] |= versions
        write_manifest(path, manifest)


def test_other_versions_are_logged_and_rerun_only_if_configured(project):
    here = version("torch")
    made_with(project, "sft", torch="2.0.0")
    made_with(project, "dpo", torch="2.0.0", peft=None)
    shown = project.snakemake("--dry-run")
    # The report and the cards show the versions, and have to be made again for what was done to the manifests.
    assert rules_in(shown) == CARD | REPORT
    assert f"made with torch 2.0.0, here is {here}: 2 results (sft/run, dpo/run)" in shown
    project.config["reruns_on"] = {"dpo": "versions"}
    shown = project.snakemake("--dry-run")
    assert rules_in(shown) == DPO
    assert f"stale: dpo/run: other versions (torch 2.0.0 → {here})" in shown
    assert f"made with torch 2.0.0, here is {here}: 1 result (sft/run)" in shown


def test_a_variant_that_equals_its_parent_is_not_computed_again(project):
    project.config["dpo"]["sweep"] = {"extends": "run", "grid": {"beta": [0.1]}}
    project.config["eval"]["both"]["models"].append("dpo:sweep")
    assert project.stale() == EVAL | {"dpo"}
    assert computed(project.snakemake("results/dpo/sweep-beta0.1/manifest.json")) == set()
    assert project.read("results/dpo/sweep-beta0.1/manifest.json") == project.read("results/dpo/run/manifest.json")


def test_a_killed_run_resumes_without_snakemakes_records(project):
    # The state that Snakemake leaves of a killed job: its outputs are gone, and nothing is recorded.
    shutil.rmtree(project.folder / "results/corpus/pairs")
    shutil.rmtree(project.folder / ".snakemake")
    said = project.snakemake("results/tokenizer/small/manifest.json")
    assert computed(said) == set()
    assert rules_in(said) == {"corpus", "tokenizer"}
