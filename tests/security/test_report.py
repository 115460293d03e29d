"""The report of hostile data, in a real browser where there is one, and by a parser: no element of a page is the data's."""

import csv
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest

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
            ours = value.startswith("#") or re.fullmatch(
                r"(index|corpus|packing|samples|preferences)\.html|answers\.csv", value
            )
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


FORMULAS = ["=HYPERLINK(1)", "+1+cmd|x", "-1-1", "@SUM(1)", " =1", "\n=1", "\t=1", "\r=1", "\uff1d1"]


def test_what_a_model_wrote_is_no_formula_where_people_judge_it(tmp_path):
    from invented_results import Results

    results = Results(tmp_path)
    for number, formula in enumerate(FORMULAS):
        for name in ("sft-a", "dpo-a"):
            results.evaluate(f"judged{number}/{name}", text=formula, task_names=("plain",))
    _, pages = results.report()
    with (pages / "answers.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["corpus"] == "chat"]
    assert {row["evaluation"] for row in rows} == {f"judged{number}" for number in range(len(FORMULAS))}
    assert all(row["sft:a"] == row["dpo:a"] and re.match(r"['�]", row["sft:a"]) for row in rows)


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
