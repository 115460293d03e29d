"""The tests of `make torture`: a chain that is killed and resumes, and what counts as a failure."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.torture import trials
from benchmarks.torture.chain import STAGES, Chain, Said
from benchmarks.torture.faults import FAULTS
from benchmarks.torture.processes import kill_chain
from benchmarks.torture.trials import Failed, Reference, Trial, check, differences, two_writers
from benchmarks.torture.written import as_markdown

CORPUS = "results/corpus/chat/manifest.json"


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """Run up to the first result."""
    return Reference.make(tmp_path_factory.mktemp("torture") / "undisturbed", "--", CORPUS)


def of(reference: Reference | None, folder: Path) -> Trial:
    return Trial(reference=reference, folder=folder, point="", drawn=random.Random(0))


@pytest.mark.slow
@pytest.mark.workflow
def test_a_chain_killed_before_its_manifest_comes_to_the_undisturbed_results(reference, tmp_path):
    assert list(reference.state) == ["corpus/chat/manifest.json"]
    trial = of(reference, tmp_path / "killed")
    chain = trial.before("corpus")
    assert not chain.manifests()
    chain.order(kill_before=["os.rename", r"results/\.work/corpus/.*/manifest\.json$", 1])
    chain.start(*trial.targets).wait(60)
    assert (chain.folder / "killed").read_text().endswith("/manifest.json")
    kill_chain(chain.folder)
    assert not chain.manifests()
    trial.recover(unlock=True)
    # A result that differs from the undisturbed one is reported.
    rows = chain.results / "corpus/chat/rows/train-00000.arrow"
    rows.chmod(0o644)
    rows.write_bytes(rows.read_bytes()[:-1] + b"!")
    with pytest.raises(Failed, match=r"corpus/chat/manifest\.json: not as it says: train-00000\.arrow"):
        trial.compare()
    trial.chain.remove()


def test_two_concurrent_attempts_in_a_work_folder_are_detected(tmp_path):
    chain = Chain(tmp_path)

    def wrote(*events: str) -> str:
        lines = [
            {"at": at, "who": who, "did": "open", "path": f"results/.work/sft/abc/{name}"}
            for at, (who, name) in enumerate(event.split() for event in events)
        ]
        # Lines come as processes are scheduled.
        chain.events.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
        return two_writers(chain)

    assert not wrote("a state/x", "a payload.partial/rows", "b state/x", "b manifest.json")
    assert not wrote("a state/x", "b lock", "b .lock.lease.asked-1", "a manifest.json")
    assert "a wrote results/.work/sft/abc/manifest.json after b" in wrote("a state/x", "b state/x", "a manifest.json")


def test_a_traceback_fails_a_trial_and_a_hang(monkeypatch):
    frame = 'Traceback (most recent call last):\n  File "{}", line 1, in run\n    run()\nKeyboardInterrupt\n'
    check(Said(status=1, text="error: no room"))
    for folder in ("/chain/workflow/snaketune/stages/run.py", "/lib/snakemake/cli.py"):
        with pytest.raises(Failed, match="a traceback"):
            check(Said(status=1, text=frame.format(folder)))
    check(Said(status=1, text=frame.format("/lib/snakemake/cli.py")), ours_alone=True)
    with pytest.raises(Failed, match="a traceback"):
        check(Said(status=1, text=frame.format("/chain/workflow/snaketune/stages/run.py")), ours_alone=True)
    with pytest.raises(Failed, match="no end within"):
        check(Said(status=None, text=""))


def test_what_differs_is_named():
    wanted = {"a": {"wrong": [], "manifest": {"counts": 1}}, "b": {"wrong": [], "manifest": {}}}
    there = {"a": {"wrong": [], "manifest": {"counts": 2}}, "c": {"wrong": [], "manifest": {}}}
    assert differences(wanted, wanted) == []
    assert differences(wanted, there) == ["b is missing", "c was made besides", "a: counts differs"]


@pytest.mark.parametrize(
    "said",
    [
        "error: x is damaged; rebuild it with: rm results/b/manifest.json && snakemake",
        "error: the file changed; run again",
        "error: results/b/manifest.json is damaged: its content doesn't match its digest; remove it and run again",
        "error: results/b/manifest.json lists the file '../x'; no stage writes that: remove the manifest and run again",
        "error: weights don't fit the model; remove results/b/manifest.json to begin again",
        "error: results/b/manifest.json: the entry isn't as written; remove the file's folder and run again",
    ],
)
def test_what_a_message_says_is_removed(tmp_path, said):
    trial = of(None, tmp_path)
    trial.chain = Chain(tmp_path)
    removed = tmp_path / "results/b/manifest.json"
    removed.parent.mkdir(parents=True)
    removed.touch()
    trial.follow(Said(status=1, text=said))
    assert trial.instructions
    assert removed.is_file() is not ("remove" in said or "rm " in said)
    assert removed.parent.is_dir() is ("folder" not in said)
    with pytest.raises(Failed, match="no word of what to do"):
        trial.follow(Said(status=1, text="error: something"))


def test_the_page_has_a_row_for_each_fault_and_point():
    entry = {"passed": True, "ended": "identical results", "strikes": 1, "code": "now", "seconds": 30.0}
    made = {
        f"{name}/{point}/0": entry | {"fault": name, "point": point} for name in FAULTS for point in FAULTS[name].points
    }
    page = as_markdown(made, SimpleNamespace(seconds=50.0, code="now"))
    assert f"{len(made)} of {len(made)} trials passed. " in page
    before = dict.fromkeys(made, made[next(iter(made))] | {"code": "before"})
    page_before = as_markdown(before, SimpleNamespace(seconds=50.0, code="now"))
    assert f"trials passed ({len(made)} of them with earlier code)" in page_before
    assert page.count("\n| ") == len(made) + 1
    assert set(STAGES) <= {point for fault in FAULTS.values() for point in fault.points}
    assert trials.SECONDS == 300
