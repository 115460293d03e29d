"""Runs of another time beside this config's: what differs, whose evaluation is whose, and what a foreign manifest can't do."""

import json
from pathlib import Path

import pytest
from invented_results import Results
from invented_sweeps import begun

from snaketune.errors import SnaketuneError
from snaketune.report.compare.other_results import Compared
from snaketune.report.data.results import Findings
from snaketune.report.pages import pages_for
from snaketune.stages.compared_results import compared_files

BEFORE = "../before/results/dpo/demo"
HOSTILE = "<script>alert(1)</script>\x1b"


@pytest.fixture
def before(tmp_path) -> Results:
    """Results of another checkout: an SFT run, a DPO run of another beta, and what evaluated it."""
    (tmp_path / "before").mkdir()
    results = Results(tmp_path / "before")
    ran(results, beta=0.5, right=0.2, seconds=40.0)
    edit(results.folder / "results/dpo/demo/run.json", mfu_median=0.25, peak_memory_gb=3.5)
    return results


@pytest.fixture
def now(tmp_path, monkeypatch) -> Results:
    (tmp_path / "now").mkdir()
    results = Results(tmp_path / "now")
    ran(results, beta=0.1, right=0.9, seconds=20.0)
    results.dpo("far", *begun(results), spec={"beta": 0.1, "lora": {"rank": 4}})
    monkeypatch.chdir(results.folder)
    return results


def ran(results: Results, *, beta: float, right: float, seconds: float) -> None:
    results.dpo("demo", *begun(results), spec={"beta": beta})
    results.payload("dpo", "demo", "weights").write_text(f"beta {beta}")
    results.dpo("demo", *begun(results), spec={"beta": beta})
    edit(results.folder / "results/dpo/demo/run.json", seconds=seconds)
    results.pairs("main/dpo-demo", {f"p{n}": 1.0 if n < 20 * right else -1.0 for n in range(20)})
    results.evaluate("main/dpo-demo", right=right)
    inputs = {"model": ["dpo/demo"], "corpora": [], "packs": ["pack/pairs-demo-128-bb"]}
    results.add("eval", "main/dpo-demo", spec={"samples": 3}, counts={"prompts": 12}, inputs=inputs)


def edit(path: Path, **entries) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def as_work(results: Results, stage: str, name: str, fingerprint: str) -> Path:
    """A published result as it is kept for others."""
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
    """The report with these entries, given what the plan gives it."""
    files = {role: [Path(path) for path in paths] for role, paths in compared_files(entries).items()}
    return results.report(compare=entries, **files)


def test_a_run_of_before_is_compared_with_the_nearest_of_now(before, now):
    outcome, pages = compare(now, BEFORE)
    assert {path.name for path in pages.iterdir()} == set(pages_for(outcome.counts["results"], compared=True))
    page = (pages / "compare.html").read_text("utf-8")
    # `far` differs in one key more.
    assert "dpo:demo against" in page.replace("</span>", "") and "dpo:far" not in page
    assert "<td>beta</td><td>0.1</td><td>0.5</td>" in page
    assert "<td>time</td><td>20.0 s</td><td>40.0 s</td>" in page
    assert "<td>MFU</td><td>–</td><td>25%</td>" in page
    assert "<td>most memory, GB</td><td>–</td><td>3.5</td>" in page
    # What is the same isn't among what differs.
    assert "<td>loss</td>" not in page
    assert '<td class="n">20%</td><td class="n">90%</td>' in page
    assert "+70 points" in page
    assert "dpo: Training loss" in (pages / "compare.svg").read_text("utf-8")
    assert outcome.about["compared"] == ["dpo-demo", "eval-main/dpo-demo"]


def test_without_it_there_is_no_such_page(now):
    outcome, pages = now.report()
    assert not list(pages.glob("compare.*"))
    assert "compared" not in outcome.about


def test_kept_work_is_found_by_the_beginning_of_its_fingerprint(now):
    now.dpo("old", *begun(now), spec={"beta": 0.7})
    as_work(now, "dpo", "old", "0123456789abcdef0123456789abcdef")
    outcome, pages = compare(now, "01234567")
    page = (pages / "compare.html").read_text("utf-8")
    assert "dpo:01234567" in page
    assert "no evaluation of it is there" in page
    assert outcome.about["compared"] == ["0123456789abcdef0123456789abcdef"]


def test_an_evaluation_is_known_by_the_model_that_it_read(before, now):
    """Also where a folder was renamed since, and of one that is kept as work and published, the work counts."""
    folder = before.folder / "results/dpo"
    (folder / "demo").rename(folder / "renamed")
    published = compared_files(["../before/results/dpo/renamed"])["compared_evals"]
    assert [Path(path).parent.name for path in published] == ["dpo-demo"]
    now.evaluate("main/dpo-other")
    assert len(compared_files(["results/dpo/demo"])["compared_evals"]) == 1
    kept = now.folder / "results/.work/eval/00ff"
    kept.mkdir(parents=True)
    for name in ("manifest.json",):
        (kept / name).write_bytes((now.folder / "results/eval/main/dpo-demo" / name).read_bytes())
    (path,) = compared_files(["results/dpo/demo"])["compared_evals"]
    assert Path(path).parent == kept


def test_of_other_held_out_rows_only_those_that_both_were_asked_about_count(before, now):
    for evaluated, same_packs in ((before, True), (now, True), (before, False)):
        path = evaluated.folder / "results/eval/main/dpo-demo/manifest.json"
        inputs = json.loads(path.read_text())["inputs"]
        edit(path, inputs=inputs | {"packs": ["the same" if same_packs else "others"]})
        files = {role: [Path(path) for path in paths] for role, paths in compared_files([BEFORE]).items()}
        found = Compared(Findings(now.named(), **now.files()), [BEFORE], *files.values())
        told = {one.measure.name: one.rows for one in found.comparisons[0].scores.get(f"dpo:{BEFORE}", [])}
        assert told["exact match"] == 12
        assert ("held-out loss" in told) == (evaluated is now)


def test_scores_of_rows_that_only_one_was_asked_about_are_not_compared(before, now):
    before.evaluate("main/dpo-demo", corpora=("elsewhere",), preferences=())
    before.add("eval", "main/dpo-demo", spec={"samples": 3}, counts={"prompts": 12}, inputs={"model": ["dpo/demo"]})
    _, pages = compare(now, BEFORE)
    page = (pages / "compare.html").read_text("utf-8")
    assert "dpo:demo wasn&#39;t asked about the same held-out rows" in page
    assert "points" not in page


def test_runs_of_two_stages_and_without_a_run_json(before, now):
    (before.folder / "results/dpo/demo/run.json").unlink()
    _, pages = compare(now, BEFORE, "results/sft/a")
    page = (pages / "compare.html").read_text("utf-8")
    assert page.index("Supervised fine-tuning") < page.index("Preference optimization")
    assert "Nothing: same spec, same inputs, same code, same versions." in page


def test_a_slow_machine_is_known_by_the_runs_of_before(before, now):
    names = []
    for n, name in enumerate(("demo", "more", "still-more")):
        if name != "demo":
            before.dpo(name, *begun(before), spec={"beta": 0.5})
        probe = {"copy_bytes_per_second": 4e12}
        edit(before.folder / f"results/dpo/{name}/run.json", host=f"node{n}", device="NVIDIA H200", probe=probe)
        names.append(f"../before/results/dpo/{name}")
    probe = {"copy_bytes_per_second": 3e12}
    edit(now.folder / "results/dpo/demo/run.json", host="node9", device="NVIDIA H200", probe=probe)
    _, pages = compare(now, *names)
    page = (pages / "index.html").read_text("utf-8")
    assert "<b>dpo:demo</b>: this run was on a slow node: copying memory at 3 TB/s" in page


def refused(*entries: str) -> str:
    with pytest.raises(SnaketuneError) as told:
        compared_files(entries)
    assert str(told.value).startswith(f"report.compare: {entries[-1]!r}") or repr(entries[-1]) in str(told.value)
    return str(told.value)


def test_entries_that_lead_nowhere_are_refused_by_name(before, now):
    assert "there is no folder" in refused("results/dpo/gone")
    assert "expected 8 digits or more" in refused("0123456")
    assert "no cached training" in refused("0123456789")
    assert "has no manifest.json" in refused("results/dpo")
    assert "is of stage 'eval'; expected sft or dpo" in refused("results/eval/main/dpo-demo")
    assert "braces" in refused("results/{dpo}")


def test_a_prefix_that_two_fit_is_refused_with_both(now):
    for name, fingerprint in (("old", "0123456789aa"), ("older", "0123456789bb")):
        now.dpo(name, *begun(now))
        as_work(now, "dpo", name, fingerprint)
    assert "fits results/.work/dpo/0123456789aa and results/.work/dpo/0123456789bb" in refused("0123456789")
    assert [Path(path).parent.name for path in compared_files(["0123456789b"])["compared"]] == ["0123456789bb"]
    unfinished = now.folder / "results/.work/sft/fedcba98"
    unfinished.mkdir(parents=True)
    assert "isn't finished" in refused("fedcba98")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"payload": {"../../../secret": {"digest": "0"}}}, "is outside its payload"),
        ({"spec": 3}, "spec, inputs, counts, versions, code or fingerprint are missing or malformed"),
        ({"inputs": {"model": "x"}}, "spec, inputs, counts, versions, code or fingerprint are missing or malformed"),
        ({"stage": ["dpo"]}, "spec, inputs, counts, versions, code or fingerprint are missing or malformed"),
        ({"stage": "../../etc"}, "is of stage"),
        ({"manifest_digest": "0"}, "is damaged"),
    ],
)
def test_manifests_that_no_stage_wrote_are_refused(before, now, entries, said):
    edit(before.folder / "results/dpo/demo/manifest.json", **entries)
    assert said in refused(BEFORE)


def test_links_out_of_a_result_are_not_followed(before, now, tmp_path):
    secret = tmp_path / "secret.json"
    result = before.folder / "results/dpo/demo"
    for name in ("run.json", "model/weights"):
        mine = (result / name).read_bytes()
        secret.write_bytes(mine)
        (result / name).unlink()
        (result / name).symlink_to(secret)
        assert "outside its result" in refused(BEFORE)
        (result / name).unlink()
        (result / name).write_bytes(mine)
    compared_files([BEFORE])


def test_a_changed_score_is_noticed(before, now):
    path = before.folder / "results/eval/main/dpo-demo/scores/scores.json"
    path.write_text(path.read_text().replace("0.2", "0.9"))
    with pytest.raises(SnaketuneError, match=r"scores\.json is damaged"):
        compare(now, BEFORE)


def test_what_others_wrote_stays_text(before, now):
    result = before.folder / "results/dpo/demo"
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
    _, pages = compare(now, BEFORE)
    for path in (*pages.glob("*.html"), *pages.glob("*.svg")):
        text = path.read_text("utf-8")
        assert "<script" not in text and "\x1b" not in text
    assert "&lt;script&gt;" in (pages / "compare.html").read_text("utf-8")


@pytest.mark.parametrize("entries", [{"history": 3}, {"history": {"a": 1}}])
def test_a_run_json_of_another_shape_is_refused(before, now, entries):
    edit(before.folder / "results/dpo/demo/run.json", **entries)
    with pytest.raises(SnaketuneError, match=r"report\.compare: .*run\.json isn't as a training writes it"):
        compare(now, BEFORE)
