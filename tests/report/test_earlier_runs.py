"""Comparison with earlier runs: differences, assignment of evaluations, and protection against hostile manifests."""

import json
from pathlib import Path

import pytest
from invented_results import Results
from invented_sweeps import sft_and_pairs

from snaketune.artifacts.manifest import write_manifest
from snaketune.errors import SnaketuneError
from snaketune.report.compare.earlier_results import compared_files
from snaketune.report.compare.earlier_runs import EarlierRuns
from snaketune.report.data.results import ResultSet
from snaketune.report.pages import pages_for

BEFORE = "../before/results/dpo/demo"
HOSTILE = "<script>alert(1)</script>\x1b"


@pytest.fixture
def earlier(tmp_path) -> Results:
    """Results of another checkout: an SFT run, a DPO run with another beta, and its evaluation."""
    (tmp_path / "before").mkdir()
    results = Results(tmp_path / "before")
    ran(results, beta=0.5, right=0.2, seconds=40.0)
    edit(results.folder / "results/dpo/demo/run.json", mfu_median=0.25, peak_memory_gb=3.5)
    return results


@pytest.fixture
def current(tmp_path, monkeypatch) -> Results:
    (tmp_path / "now").mkdir()
    results = Results(tmp_path / "now")
    ran(results, beta=0.1, right=0.9, seconds=20.0)
    results.dpo("far", *sft_and_pairs(results), spec={"beta": 0.1, "lora": {"rank": 4}})
    monkeypatch.chdir(results.folder)
    return results


def ran(results: Results, *, beta: float, right: float, seconds: float) -> None:
    results.dpo("demo", *sft_and_pairs(results), spec={"beta": beta})
    results.payload("dpo", "demo", "weights").write_text(f"beta {beta}")
    results.dpo("demo", *sft_and_pairs(results), spec={"beta": beta})
    edit(results.folder / "results/dpo/demo/run.json", seconds=seconds)
    results.pairs("main/dpo-demo", {f"p{n}": 1.0 if n < 20 * right else -1.0 for n in range(20)})
    results.evaluate("main/dpo-demo", right=right)
    inputs = {"model": ["dpo/demo"], "corpora": [], "packs": ["pack/pairs-demo-128-bb"]}
    results.add("eval", "main/dpo-demo", spec={"samples": 3}, counts={"prompts": 12}, inputs=inputs)


def edit(path: Path, **entries) -> None:
    write_manifest(path, json.loads(path.read_text()) | entries)


def as_work(results: Results, stage: str, name: str, fingerprint: str) -> Path:
    """Move a published result to a work folder, as a stage leaves it."""
    published = results.folder / "results" / stage / name
    work = results.folder / "results/.work" / stage / fingerprint
    work.parent.mkdir(parents=True, exist_ok=True)
    published.rename(work)
    payload = {"dpo": "model", "eval": "scores"}[stage]
    (work / payload).rename(work / "payload")
    edit(work / "manifest.json", fingerprint=fingerprint)
    results.jobs.pop(f"{stage}/{name}")
    return work


def compare(results: Results, *entries: str):
    """Build the report with these entries of `report.compare`, with the files that the planner passes."""
    files = {role: [Path(path) for path in paths] for role, paths in compared_files(entries).items()}
    return results.report(compare=entries, **files)


@pytest.mark.figures
def test_an_earlier_run_is_compared_with_the_most_similar_current_one(earlier, current):
    outcome, pages = compare(current, BEFORE)
    assert {path.name for path in pages.iterdir()} == set(pages_for(outcome.counts["results"], compared=True))
    page = (pages / "compare.html").read_text("utf-8")
    # `far` differs in another key as well.
    assert "dpo:demo against" in page.replace("</span>", "") and "dpo:far" not in page
    assert "<td>beta</td><td>0.1</td><td>0.5</td>" in page
    assert "<td>time</td><td>20.0 s</td><td>40.0 s</td>" in page
    assert "<td>MFU</td><td>–</td><td>25%</td>" in page
    assert "<td>peak memory, GB</td><td>–</td><td>3.5</td>" in page
    # Equal keys aren't listed.
    assert "<td>loss</td>" not in page
    assert '<td class="n">20%</td><td class="n">90%</td>' in page
    assert "+70 points" in page
    assert "dpo: Training loss" in page
    assert 'href="compare.html"' in (pages / "index.html").read_text("utf-8")
    assert outcome.about["compared"] == ["dpo-demo", "eval-main/dpo-demo"]


def test_without_compared_runs_there_is_no_compare_page(current):
    outcome, pages = current.report()
    assert not list(pages.glob("compare.*"))
    assert "compared" not in outcome.about


def test_a_work_folder_is_found_by_a_prefix_of_its_fingerprint(current):
    current.dpo("old", *sft_and_pairs(current), spec={"beta": 0.7})
    as_work(current, "dpo", "old", "0123456789abcdef0123456789abcdef")
    outcome, pages = compare(current, "01234567")
    page = (pages / "compare.html").read_text("utf-8")
    assert "dpo:01234567" in page
    assert "it has no evaluation" in page
    assert outcome.about["compared"] == ["0123456789abcdef0123456789abcdef"]


def test_an_evaluation_is_matched_by_the_content_of_its_model(earlier, current):
    """Also if a folder was renamed. If an evaluation is both in a work folder and published, the work folder is used."""
    folder = earlier.folder / "results/dpo"
    (folder / "demo").rename(folder / "renamed")
    published = compared_files(["../before/results/dpo/renamed"])["compared_evals"]
    assert [Path(path).parent.name for path in published] == ["dpo-demo"]
    current.evaluate("main/dpo-other")
    assert len(compared_files(["results/dpo/demo"])["compared_evals"]) == 1
    work = current.folder / "results/.work/eval/00ff"
    work.mkdir(parents=True)
    for name in ("manifest.json",):
        (work / name).write_bytes((current.folder / "results/eval/main/dpo-demo" / name).read_bytes())
    (path,) = compared_files(["results/dpo/demo"])["compared_evals"]
    assert Path(path).parent == work


def test_with_different_held_out_rows_only_common_rows_are_compared(earlier, current):
    for evaluated, same_packs in ((earlier, True), (current, True), (earlier, False)):
        path = evaluated.folder / "results/eval/main/dpo-demo/manifest.json"
        inputs = json.loads(path.read_text())["inputs"]
        edit(path, inputs=inputs | {"packs": ["the same" if same_packs else "others"]})
        files = {role: [Path(path) for path in paths] for role, paths in compared_files([BEFORE]).items()}
        compared = EarlierRuns(ResultSet(current.named(), **current.files()), [BEFORE], *files.values())
        rows = {one.measure.name: one.rows for one in compared.comparisons[0].scores.get(f"dpo:{BEFORE}", [])}
        assert rows["exact match"] == 12
        assert ("held-out loss" in rows) == (evaluated is current)


def test_scores_without_common_rows_are_not_compared(earlier, current):
    earlier.evaluate("main/dpo-demo", corpora=("elsewhere",), preferences=())
    earlier.add("eval", "main/dpo-demo", spec={"samples": 3}, counts={"prompts": 12}, inputs={"model": ["dpo/demo"]})
    _, pages = compare(current, BEFORE)
    page = (pages / "compare.html").read_text("utf-8")
    assert "dpo:demo wasn&#39;t evaluated on the same held-out rows" in page
    assert "points" not in page


def test_runs_of_two_stages_and_without_a_run_json(earlier, current):
    (earlier.folder / "results/dpo/demo/run.json").unlink()
    _, pages = compare(current, BEFORE, "results/sft/a")
    page = (pages / "compare.html").read_text("utf-8")
    assert page.index("Supervised fine-tuning") < page.index("Preference optimization")
    assert "None: same spec, same inputs, same code, same versions." in page


def test_earlier_runs_reveal_a_slow_host(earlier, current):
    names = []
    for n, name in enumerate(("demo", "more", "still-more")):
        if name != "demo":
            earlier.dpo(name, *sft_and_pairs(earlier), spec={"beta": 0.5})
        probe = {"copy_bytes_per_second": 4e12}
        edit(earlier.folder / f"results/dpo/{name}/run.json", host=f"node{n}", device="NVIDIA H200", probe=probe)
        names.append(f"../before/results/dpo/{name}")
    probe = {"copy_bytes_per_second": 3e12}
    edit(current.folder / "results/dpo/demo/run.json", host="node9", device="NVIDIA H200", probe=probe)
    _, pages = compare(current, *names)
    page = (pages / "index.html").read_text("utf-8")
    assert "<b>dpo:demo</b>: ran on a slow node: memory copy at 3 TB/s" in page


def refused(*entries: str) -> str:
    with pytest.raises(SnaketuneError) as error:
        compared_files(entries)
    assert str(error.value).startswith(f"report.compare: {entries[-1]!r}") or repr(entries[-1]) in str(error.value)
    return str(error.value)


def test_unknown_entries_are_refused_by_name(earlier, current):
    assert "there is no folder" in refused("results/dpo/gone")
    assert "expected 8 digits or more" in refused("0123456")
    assert "no cached training" in refused("0123456789")
    assert "has no manifest.json" in refused("results/dpo")
    assert "is of stage 'eval'; expected sft or dpo" in refused("results/eval/main/dpo-demo")
    assert "braces" in refused("results/{dpo}")


def test_an_ambiguous_prefix_is_refused_with_both_matches(current):
    for name, fingerprint in (("old", "0123456789aa"), ("older", "0123456789bb")):
        current.dpo(name, *sft_and_pairs(current))
        as_work(current, "dpo", name, fingerprint)
    assert "fits results/.work/dpo/0123456789aa and results/.work/dpo/0123456789bb" in refused("0123456789")
    assert [Path(path).parent.name for path in compared_files(["0123456789b"])["compared"]] == ["0123456789bb"]
    unfinished = current.folder / "results/.work/sft/fedcba98"
    unfinished.mkdir(parents=True)
    assert "isn't finished" in refused("fedcba98")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"payload": {"../../../secret": {"digest": "0"}}}, "is outside its payload"),
        ({"spec": 3}, "manifest.json isn't in the form that a stage writes: spec: "),
        ({"inputs": {"model": "x"}}, "inputs.model: Input should be a valid list"),
        ({"stage": ["dpo"]}, "stage: Input should be a valid string, found"),
        ({"stage": "../../etc"}, "is of stage"),
        ({"manifest_digest": "0"}, "is damaged"),
    ],
)
def test_manifests_that_no_stage_wrote_are_refused(earlier, current, entries, message):
    path = earlier.folder / "results/dpo/demo/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    assert message in refused(BEFORE)


def test_links_out_of_a_result_are_not_followed(earlier, current, tmp_path):
    secret = tmp_path / "secret.json"
    result = earlier.folder / "results/dpo/demo"
    for name in ("run.json", "model/weights"):
        mine = (result / name).read_bytes()
        secret.write_bytes(mine)
        (result / name).unlink()
        (result / name).symlink_to(secret)
        assert "outside its result" in refused(BEFORE)
        (result / name).unlink()
        (result / name).write_bytes(mine)
    compared_files([BEFORE])


def test_a_changed_score_is_refused(earlier, current):
    path = earlier.folder / "results/eval/main/dpo-demo/scores/scores.json"
    path.write_text(path.read_text().replace("0.2", "0.9"))
    with pytest.raises(SnaketuneError, match=r"scores\.json is damaged"):
        compare(current, BEFORE)


@pytest.mark.figures
def test_text_of_compared_runs_is_escaped(earlier, current):
    result = earlier.folder / "results/dpo/demo"
    manifest = json.loads((result / "manifest.json").read_text())
    edit(
        result / "manifest.json",
        spec=manifest["spec"] | {HOSTILE: HOSTILE, "beta": HOSTILE},
        versions={HOSTILE: HOSTILE},
        code=HOSTILE,
        stopped={"step": 1, "reason": HOSTILE},
    )
    edit(
        result / "run.json",
        device=HOSTILE,
        history=[{"step": 1, "loss": HOSTILE}, HOSTILE, {"loss": 1.0, HOSTILE: 2}, {"loss": 2.0}],
        seconds=HOSTILE,
        probe={"copy_bytes_per_second": HOSTILE},
    )
    _, pages = compare(current, BEFORE)
    for path in pages.glob("*.html"):
        text = path.read_text("utf-8")
        assert "<script" not in text and "\x1b" not in text
    assert "&lt;script&gt;" in (pages / "compare.html").read_text("utf-8")


@pytest.mark.parametrize("entries", [{"history": 3}, {"history": {"a": 1}}])
def test_a_run_json_of_another_shape_is_refused(earlier, current, entries):
    edit(earlier.folder / "results/dpo/demo/run.json", **entries)
    with pytest.raises(SnaketuneError, match=r"run\.json isn't in the form that a stage writes: history: "):
        compare(current, BEFORE)


@pytest.mark.parametrize("stopped", [3, {"step": "x", "reason": "y"}])
def test_an_early_stop_of_another_shape_is_refused(earlier, current, stopped):
    edit(earlier.folder / "results/dpo/demo/manifest.json", stopped=stopped)
    with pytest.raises(SnaketuneError, match=r"manifest\.json isn't in the form that a stage writes: stopped"):
        compare(current, BEFORE)
