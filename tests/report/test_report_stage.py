"""The report as a whole: its pages, which are deterministic, safe, self-contained, and robust to missing values."""

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hostile_report import hostile_report

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.report.pages import pages_for, pages_of
from snaketune.stages.graph import JobGraph
from snaketune.stages.table import STAGES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HTML = ("index.html", "corpus.html", "packing.html", "samples.html", "preferences.html")


class Elements(HTMLParser):
    """The elements, attributes and text of a parsed page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text.append(data)


def names(pages: Path) -> set[str]:
    return {path.name for path in pages.iterdir() if path.is_file()}


def corpora_only(results):
    results.corpus("chat")
    results.tokenizer()


def packed_only(results):
    results.pack("chat-demo-128-aa", results.corpus("chat"), results.tokenizer())


def raw_only(results):
    tokenizer = results.tokenizer(adopt="org/model")
    pack = results.raw_pack("chat-demo-128-aa", results.corpus("chat"), tokenizer)
    results.sft("raw", pack, tokenizer, trl=True)


def no_eval(results):
    tokenizer = results.tokenizer()
    sft = results.sft("a", results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer), tokenizer)
    pairs = results.corpus("pairs", kind="preferences")
    results.dpo("a", sft, results.pack("pairs-demo-128-aa", pairs, tokenizer, kind="preference"))


def base_only(results):
    results.corpus("chat")
    results.evaluate("main/base-a", preferences=())


@pytest.mark.parametrize("fill", [corpora_only, packed_only, raw_only, no_eval, base_only])
def test_exactly_the_declared_pages_are_written(results, fill):
    fill(results)
    outcome, pages = results.report()
    assert names(pages) == set(pages_for(outcome.counts["results"]))
    assert all(path.stat().st_size for path in pages.iterdir())


def test_a_sweep_has_every_page(sweep_pages):
    assert names(sweep_pages) == set(pages_for(STAGES))


def test_the_pages_of_a_graph_follow_from_its_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").touch()
    config = {
        "corpora": {"chat": {"kind": "conversations", "sources": [{"files": ["chat.jsonl"]}]}},
        "tokenizers": {"demo": {"train": {"corpora": ["chat"], "model": "bpe", "vocab_size": 400}}},
    }
    assert list(pages_of(JobGraph(*load(config)))) == ["index.html", "data.csv", "corpus.html"]


def test_every_page_has_a_caption():
    captions = Path(__file__).parents[2] / "workflow" / "report"
    promised = {caption for _, caption in pages_for(STAGES, compared=True).values()}
    assert {path.stem for path in captions.glob("*.rst")} == promised
    assert all(len((captions / f"{name}.rst").read_text("utf-8").split()) > 30 for name in promised)


@pytest.mark.figures
def test_the_same_results_give_the_same_bytes_in_any_order(sweep, sweep_pages):
    _, again = sweep.report(title="A sweep", backwards=True)
    files = [
        {str(path.relative_to(pages)): path.read_bytes() for path in pages.rglob("*") if path.is_file()}
        for pages in (again, sweep_pages)
    ]
    assert files[0] == files[1]
    assert {"data.csv", "evaluation.json", "side_by_side/main/chat/blind.csv"} <= {*files[0]}


@pytest.mark.figures
def test_text_of_models_and_data_is_escaped(results):
    pages = hostile_report(results)
    for name in HTML:
        page = (pages / name).read_text("utf-8")
        elements = Elements(page)
        assert not {"script", "img", "link", "iframe", "object"} & elements.tags
        assert not [name for name in elements.attributes if name.startswith("on")]
        assert "<script>alert(1)</script>" in "".join(elements.text)
        assert not re.search("[\x00\x1b\u202e]", page)
        assert page.count("</style>") == page.count("<style")
        for figure in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            ElementTree.fromstring(figure.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))


def test_pages_load_no_external_resources(sweep_pages):
    for name in HTML:
        page = (sweep_pages / name).read_text("utf-8")
        assert not {"script", "link", "img"} & Elements(page).tags
        assert not re.search(r"@import|url\((?!#)|(?:src|href)=\"(?!#|[a-z]+\.(?:html|csv|json)\"|side_by_side/)", page)


def test_pages_lead_to_each_other(sweep_pages):
    index = (sweep_pages / "index.html").read_text("utf-8")
    for name in HTML[1:]:
        assert f'href="{name}"' in index
        assert 'href="index.html"' in (sweep_pages / name).read_text("utf-8")


def test_curves_and_samples_stand_before_the_data(sweep_pages):
    sections = re.findall(r'<section id="(\w+)"', (sweep_pages / "index.html").read_text("utf-8"))
    expected = ["verdict", "sft", "dpo", "races", "evaluation", "samples", "data", "tokenizer", "packing", "jobs"]
    assert [name for name in sections if name != "races"] == [name for name in expected if name != "races"]


def test_rows_over_the_limit_of_a_source_are_not_in_the_bar(results):
    results.corpus("chat", train=60, held_out=20, read=8080, dropped={"over_cap": 7990, "duplicate": 10})
    page = (results.report()[1] / "corpus.html").read_text("utf-8")
    bar = re.search(r'<div class="bar">.*?</div>', page, re.DOTALL)[0]
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%", bar)]
    assert widths == [66.667, 22.222, 11.111]
    assert "7,990 left out by <code>max_rows</code>" in page


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
@pytest.mark.figures
def test_nothing_overflows_and_figures_fill_their_page(sweep, tmp_path):
    """In a browser, whose policy is taken out so that a script can measure."""
    _, pages = sweep.report(title="A sweep")
    script = """<script>
const wide = document.documentElement.clientWidth;
const over = document.documentElement.scrollWidth > wide ? 1 : 0;
const hidden = [...document.querySelectorAll(".scroll")].filter(one => one.scrollWidth > one.clientWidth + 1);
const figures = [...document.querySelectorAll("figure")].map(
  one => one.querySelector("svg")?.getBoundingClientRect().width / one.getBoundingClientRect().width);
document.title = JSON.stringify({over, hidden: hidden.length, least: Math.min(...figures.filter(one => one))});
</script></body>"""
    for name in HTML:
        text = re.sub(r"<meta http-equiv[^>]*>", "", (pages / name).read_text("utf-8"))
        page = tmp_path / name
        page.write_text(text.replace("</body>", script), "utf-8")
        for width in (1300, 800):
            flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
            command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
            found = json.loads(unescape(re.search(r"<title>(.*?)</title>", shown)[1]))
            assert found["over"] == 0 and (width < 1300 or found["hidden"] == 0), (name, width, found)
            assert found["least"] is None or found["least"] > 0.85, (name, width, found)


def test_figures_in_the_page_follow_light_and_dark(sweep_pages):
    drawn = "".join(re.findall(r"<svg.*?</svg>", (sweep_pages / "index.html").read_text("utf-8"), re.DOTALL))
    assert "var(--sft-1)" in drawn
    assert not re.findall(r"(?:fill|stroke|color): ?#\w+", drawn)
    ids = re.findall(r'\bid="([^"]+)"', drawn)
    assert len(ids) == len(set(ids))


def test_an_axis_of_one_step_shows_it_once():
    from matplotlib.figure import Figure

    from snaketune.report.charts.style import whole_numbers

    ax = Figure().subplots()
    ax.plot([6], [1.0], marker="o")
    whole_numbers(ax, "x", 5)
    assert [f"{tick:,.0f}" for tick in ax.get_xticks() if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]] == ["6"]


def test_missing_run_files_leave_values_out(results):
    results.everything()
    for run in results.folder.glob("results/**/run.json"):
        run.unlink()
    outcome, pages = results.report()
    assert names(pages) == set(pages_for(outcome.counts["results"]))
    page = (pages / "index.html").read_text("utf-8")
    assert "Tokens per second" not in page


def test_a_damaged_run_file_stops_the_report_with_the_command_that_heals_it(results, monkeypatch):
    monkeypatch.setenv("SNAKETUNE_CONFIG", "mine.yaml")
    results.everything()
    next(results.folder.glob("results/sft/*/run.json")).write_text("garbage")
    with pytest.raises(SnaketuneError, match=r"rm \S*/run.json && snakemake --configfile mine.yaml"):
        results.report()


@pytest.mark.figures
def test_a_run_that_logged_nothing_is_drawn_so(results):
    raw_only(results)
    (results.folder / "results/sft/raw/run.json").unlink()
    _, pages = results.report()
    assert "No run logged anything" in (pages / "index.html").read_text("utf-8")


def test_throughput_is_shown_as_mfu(results):
    tokenizer = results.tokenizer()
    pack = results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer)
    share = {
        "mfu_median": 0.5213,
        "flops": {"counted": "6 x 6.82M parameters + attention"},
        "peak_flops_per_second": 171.3e9,
        "peak_flops_source": "measured matrix product, float32, 1 thread",
        "peak_memory_gb": 0.914,
        "peak_memory_is": "resident in the process",
    }
    results.sft("a", pack, tokenizer)
    path = results.folder / "results/sft/a/run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | share))
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    mfu = "MFU 52.1%: 6 x 6.82M parameters + attention, of 171 GFLOP/s (measured matrix product, float32, 1 thread)"
    assert f"22 k tokens/s, {mfu}, 0.914 GB resident in the process" in page


@pytest.mark.figures
def test_calibration_is_drawn_and_the_batch_plan_is_shown(results):
    tokenizer = results.tokenizer()
    pack = results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer)
    trials = [
        {"micro_batch_rows": rows, "gradient_checkpointing": False, "fits": True, "tokens_per_second": speed,
         "peak_bytes": rows * 10**9}
        for rows, speed in ((1, 5000.0), (2, 8000.0), (4, 10000.0))
    ]  # fmt: skip
    trials.append({"micro_batch_rows": 8, "gradient_checkpointing": False, "fits": False, "why": "CUDA out of memory."})
    curve = {"device": "a card", "memory_bytes": 6 * 10**9, "trials": trials, "best": trials[2]}
    facts = {
        "measured": {"micro_batch_rows": 2, "calibration": curve, "slower_than_best_percent": 20.0},
        "unmeasured": {"micro_batch_rows": 1, "calibration": None, "slower_than_best_percent": None},
    }
    for name, entries in facts.items():
        results.sft(name, pack, tokenizer)
        path = results.folder / f"results/sft/{name}/run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"gradient_checkpointing": False} | entries))
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert "micro-batches of 2 rows (20% slower than the best measured)" in page
    assert "micro-batches of 1 row" in page
    assert "Peak memory by micro-batch size: 2 GB at most (a card, 6 GB)" in page
    assert "8,000 tokens/s with 2 rows" in page
    assert "rows per micro-batch (x: out of memory, ring: used)" in page


def test_values_that_are_null_or_nan(results):
    tokenizer = results.tokenizer()
    pack = results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer)
    results.sft("a", pack, tokenizer)
    results.evaluate("main/sft-a", task_names=())
    path = results.folder / "results/sft/a/run.json"
    run = json.loads(path.read_text())
    run["history"][3]["loss"], run["history"][4]["loss"], run["history"][5] = float("nan"), None, {"step": 6}
    path.write_text(json.dumps(run))
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert ">nan<" not in page.lower()
    assert ">None<" not in page


@pytest.mark.figures
def test_empty_splits_and_packs_are_drawn(results):
    tokenizer, corpus = results.tokenizer(), results.corpus("chat", train=0, held_out=0)
    results.pack("chat-demo-128-aa", corpus, tokenizer, train=0, held_out=0)
    _, pages = results.report()
    assert "no rows to train on" in (pages / "packing.html").read_text("utf-8")


@pytest.mark.figures
@pytest.mark.parametrize("steps", [1, 20000])
def test_a_single_logged_step_and_many(results, steps):
    tokenizer = results.tokenizer()
    results.sft("a", results.pack("chat-demo-128-aa", results.corpus("chat"), tokenizer), tokenizer, steps=steps)
    _, pages = results.report()
    assert (pages / "index.html").stat().st_size < 600_000


@pytest.mark.figures
def test_sections_without_data_are_omitted(results):
    results.corpus("plain", characters=None)
    results.pack("plain-demo-128-aa", results.corpus("chat"), results.tokenizer())
    _, pages = results.report()
    corpus = (pages / "corpus.html").read_text("utf-8")
    for heading in ("Quarantined", "Near duplicates", "Contamination", "Changes and notes"):
        assert f">{heading}" not in corpus
    assert "the manifest has no lengths" in corpus
    packing = (pages / "packing.html").read_text("utf-8")
    for line in ("truncated to fit", "stored once", "split over", "rows by length"):
        assert line not in packing


def test_checks_without_matches_are_reported(results):
    results.corpus("chat", contamination={"ngram": 13, "hits": {}}, near_duplicates={"groups": 0, "largest": 0})
    _, pages = results.report()
    page = (pages / "corpus.html").read_text("utf-8")
    assert "there was no evaluation data to compare with" in page
    assert "No near duplicates" in page


def test_checks_of_finished_trainings_are_listed(results):
    results.corpus("chat")
    passed = {"name": "packed = alone", "compares": "loss", "status": "passed", "figure": 2e-6, "tolerance": 1e-3}
    failed = passed | {
        "name": "end of turn learned",
        "status": "failed",
        "figure": 0.01,
        "tolerance": 0.1,
        "at_least": True,
    }
    checks = [{"at_least": False, "reason": "<b>why</b>"} | check for check in (passed, failed)]
    results.payload("verification", "sft-demo", "verify.json").write_text(json.dumps({"checks": checks}))
    results.add("verification", "sft-demo")
    replayed = checks[0] | {"name": "first steps = record"}
    results.payload("reproduction", "sft-demo", "verify.json").write_text(json.dumps({"checks": [replayed]}))
    results.add("reproduction", "sft-demo")
    page = (results.report()[1] / "index.html").read_text("utf-8")
    assert page.count("<h3>sft-demo</h3>") == 1 and "first steps = record" in page
    assert "<b>failed</b>" in page and "≥ 0.1" in page and "2.0e-06" in page
    assert "&lt;b&gt;why" in page and "<b>why" not in page


def test_raw_rows_have_no_packing_figures(results):
    raw_only(results)
    _, pages = results.report()
    page = (pages / "packing.html").read_text("utf-8")
    assert "raw rows of at most 128 tokens" in page
    assert ">padding<" not in page
    assert "<figure>" not in page


def test_each_count_of_a_pack_has_its_line(results):
    counted = {"split": {"rows": 1002, "pieces": 2005}, "mismatched_tokens": 77}
    results.pack("chat-demo-128-aa", results.corpus("chat"), results.tokenizer(), long=3, cut=2, shared=50, **counted)
    page = (results.report()[1] / "packing.html").read_text("utf-8")
    for line in ("dropped: longer than row", "truncated to fit", "stored once", "repeated after other prompts"):
        assert line in page
    assert "1,002 into 2,005 parts" in page and "+ 77" in page


def test_the_parts_of_a_result_share_a_row_of_the_job_table(results):
    results.pack("chat-demo-128-aa", results.corpus("chat"), results.tokenizer(), tokenized={"parts": 12})
    _, pages = results.report()
    page = (pages / "index.html").read_text("utf-8")
    assert page.count("<td>tokenize</td><td>chat-tokens-aa</td>") == page.count("<td>write</td>") == 1
    assert "12 parts" in page


def test_rows_of_several_lengths_are_counted_by_length(sweep_pages):
    page = (sweep_pages / "packing.html").read_text("utf-8")
    assert "rows of 64, 128 tokens" in page
    assert re.search(r"<b>\d+</b> rows of 64 tokens", page)


def test_a_model_has_one_colour_everywhere(sweep_pages):
    page = (sweep_pages / "index.html").read_text("utf-8")
    colours = set(re.findall(r'background: var\(--([\w-]+)\)"></span>dpo:soft', page))
    assert colours == {"dpo-2"}
