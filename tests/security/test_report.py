"""The report of hostile data, in a real browser where there is one, and by a parser: no element of a page is the data's."""

import csv
import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import write_manifest
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file

OWN_FILES = (
    r"(index|corpus|packing|samples|preferences)\.html|(data|evaluation|variants)\.csv|evaluation\.json"
    r"|side_by_side(/[\w-]+)+\.csv"
)
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
RUN = "document.documentElement.setAttribute('hacked','1');document.title='HACKED'"
# Each would run in a page that took it for markup, some out of an attribute, a style or a title.
MARKUP = "".join(
    (
        f"</title></style></textarea></svg>--><script>{RUN}</script>",
        f'<img src=x onerror="{RUN}">',
        f'"\'><svg onload="{RUN}"><animate onbegin="{RUN}"/></svg>',
        f'<a href="javascript:{RUN}">x</a><iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
        f"<details open ontoggle=\"{RUN}\"><b id=theirs class=theirs style='color:red'>x</b>",
        "<base href=//theirs/><link rel=stylesheet href=//theirs/x><form action=//theirs><meta http-equiv=refresh content=0>",
        f"]]><![CDATA[<script>{RUN}</script>{{{{ 7 * 7 }}}} $\\frac{{1}}{{2}}$ =HYPERLINK(1)",
    )
)
ELEMENTS = {
    "script",
    "img",
    "iframe",
    "object",
    "embed",
    "form",
    "input",
    "base",
    "link",
    "animate",
    "textarea",
    "foreignobject",
}


class Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.metas = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.metas += tag == "meta"
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    from hostile_report import hostile_report
    from invented_results import Results

    return hostile_report(Results(tmp_path_factory.mktemp("hostile")), MARKUP)


def test_no_element_and_no_attribute_of_a_page_comes_from_the_data(pages):
    result = sorted(pages.glob("*.html"))
    assert len(result) == 5
    for path in result:
        page = Page(path.read_text("utf-8"))
        assert not page.elements & ELEMENTS, path
        assert page.metas == 3
        for name, value in page.attributes:
            assert not name.startswith("on") and name not in ("src", "srcdoc", "action", "formaction", "theirs"), path
            assert "theirs" not in value and "HACKED" not in value and "javascript" not in value.lower(), (
                path,
                name,
                value,
            )
            ours = value.startswith("#") or re.fullmatch(OWN_FILES, value)
            assert name not in ("href", "xlink:href") or ours, (path, value)
        assert RUN in page.text


def test_every_page_forbids_scripts_and_whatever_is_elsewhere(pages):
    for path in pages.glob("*.html"):
        text = path.read_text("utf-8")
        policy = (
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        )
        # Before anything that comes from the data.
        assert text.index(policy) < text.index("HACKED")


def test_no_cell_of_a_table_is_a_formula(tmp_path):
    """A spreadsheet would compute the name of a job that begins as a formula; names of data columns are inside paths."""
    from hostile_report import hostile_corpus
    from invented_results import Results

    results = Results(tmp_path)
    hostile_corpus(results, "=HYPERLINK(1)")
    _, pages = results.report()
    with (pages / "data.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "sources.0.ignored.=HYPERLINK(1)" in cells
    assert not [cell for cell in cells if re.match(r"[=+@\t\r]|-(?![\d.])", cell)]


@pytest.mark.parametrize("name", ["run.json", "model/only.txt"])
def test_of_a_compared_result_nothing_outside_its_folder_is_read(tmp_path, name):
    from invented_results import Results

    from snaketune.report.compare.earlier_results import compared_files

    results = Results(tmp_path)
    results.add("dpo", "theirs", run={})
    folder = tmp_path / "results/dpo/theirs"
    assert compared_files([str(folder)])["compared"] == [str(folder / "manifest.json")]
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(SnaketuneError, match="outside its result"):
        compared_files([str(folder)])


FORMULAS = ["=HYPERLINK(1)", "+1+cmd|x", "-1-1", "@SUM(1)", " =1", "\n=1", "\t=1", "\r=1", "\uff1d1"]


def test_what_a_model_wrote_is_no_formula_where_people_judge_it(tmp_path):
    from invented_results import Results

    results = Results(tmp_path)
    for number, formula in enumerate(FORMULAS):
        for name in ("sft-a", "dpo-a"):
            results.evaluate(f"judged{number}/{name}", text=formula, task_names=("plain",))
    _, pages = results.report()
    for number in range(len(FORMULAS)):
        for name in ("side_by_side", "blind"):
            with (pages / f"side_by_side/judged{number}/chat/{name}.csv").open(newline="", encoding="utf-8") as file:
                header, first, *_ = csv.reader(file)
            assert first[3] == first[4]
            assert re.match(r"['�]", first[3]) and len(header) == 7


def dumped(path: Path, profile: Path) -> str:
    """The page as a browser has it after its scripts ran."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
    ]
    command = [BROWSER, *flags, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
def test_in_a_browser_nothing_of_the_data_runs(pages, tmp_path):
    """Even without the policy, which is taken out of all pages but one; a page that has the markup as markup runs it."""
    requested = {}
    for path in pages.glob("*.html"):
        text = path.read_text("utf-8")
        (tmp_path / path.name).write_text(re.sub(r"<meta http-equiv[^>]*>", "", text), "utf-8")
        requested[path.name] = False
    # Pages with the markup unsanitized, without the part that leads to another page.
    markup = MARKUP.partition("<base")[0]
    index = (pages / "index.html").read_text("utf-8")
    (tmp_path / "forbidden.html").write_text(index.replace("<body>", f"<body>{markup}<p>", 1), "utf-8")
    without = (tmp_path / "index.html").read_text("utf-8")
    (tmp_path / "through.html").write_text(without.replace("<body>", f"<body>{markup}<p>", 1), "utf-8")
    requested |= {"forbidden.html": False, "through.html": True}
    with ThreadPoolExecutor(2) as pool:
        result = dict(
            zip(requested, pool.map(lambda name: dumped(tmp_path / name, tmp_path / f"profile-{name}"), requested))
        )
    assert all(len(text) > 1000 for text in result.values()), {name: len(text) for name, text in result.items()}
    assert {name: bool(re.search(r"<(?:html|svg)[^>]* hacked=", text)) for name, text in result.items()} == requested


DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = (
    "3",
    '"x"',
    "null",
    "[[1]]",
    '{"a": {"b": "c"}}',
    "[{}]",
    "1" * 400,
    "1e999",
    "NaN",
    DEEP,
    "[" * 300 + "]" * 300,
)


def places(value, at=()):
    """Yield the keys that lead to each value of some JSON, of lists to the first one."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else list(enumerate(value))[:1]:
        yield from places(inner, (*at, key)) if isinstance(inner, dict | list) else [(*at, key)]


def with_text(value, at, text):
    """Return a value as JSON with a text in one place."""
    if not at:
        return text
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = "PLACE"
    return json.dumps(copy).replace('"PLACE"', text)


@pytest.mark.parametrize(
    "name",
    ["dpo/a/manifest.json", "dpo/a/run.json"]
    + [f"eval/main/dpo-a/{name}" for name in ("manifest.json", "scores/scores.json", "scores/responses.jsonl")],
)
def test_a_compared_result_is_shown_or_refused_by_the_name_of_the_file(tmp_path, name):
    """Each value is replaced by several others in turn: of other types, too large, too deep, no number."""
    from invented_results import Results
    from invented_sweeps import sft_and_pairs

    results = Results(tmp_path)
    results.dpo("a", *sft_and_pairs(results))
    results.pairs("main/dpo-a", {f"p{n}": 1.0 for n in range(6)})
    results.evaluate("main/dpo-a")
    inputs = {"model": ["dpo/a"], "corpora": [], "packs": ["pack/pairs-demo-128-bb"]}
    results.add("eval", "main/dpo-a", spec={"samples": 3}, counts={"prompts": 12}, inputs=inputs)
    compared, path = str(tmp_path / "results/dpo/a"), tmp_path / "results" / name
    manifest = tmp_path / "results/eval/main/dpo-a/manifest.json"
    (text, *_), described = path.read_text("utf-8").split("\n", path.suffix == ".jsonl"), manifest.read_text("utf-8")
    value, hostile, refused = json.loads(text), cycle(HOSTILE), set()
    for at in places(value):
        for _ in range(2):
            written = next(hostile)
            path.write_text(with_text(value, at, written), "utf-8")
            if path.parent.name == "scores":
                write_manifest(
                    manifest, json.loads(described.replace(digest_of(described, path.name), digest_file(path)))
                )
            try:
                compare(results, compared)
            except SnaketuneError as error:
                assert path.name in str(error), (at, written[:20])
                assert len(str(error)) < 1000
                refused.add((at, written))
    assert len(refused) > 10


def digest_of(manifest: str, name: str) -> str:
    about = json.loads(manifest)
    return (about["payload"] | about["records"])[name]["digest"]


def compare(results, entry: str) -> None:
    """Read a compared result as the report does, and draw it."""
    from snaketune.report.charts.style import model_styles
    from snaketune.report.compare.earlier_results import compared_files
    from snaketune.report.compare.earlier_runs import EarlierRuns
    from snaketune.report.data.results import ResultSet

    ours = ResultSet((), [], [])
    read = EarlierRuns(ours, [entry], *([Path(path) for path in paths] for paths in compared_files([entry]).values()))
    assert read.comparisons and read.fingerprints
    read.chart(model_styles(read.labels))
