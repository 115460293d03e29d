"""The pages, from templates. Everything that comes from data or models is escaped: what they write is not trusted."""

from collections.abc import Callable
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from snaketune.report import text
from snaketune.report.charts.style import COLOURS, Chart, Style, svg_inline
from snaketune.report.compare import side_by_side
from snaketune.report.compare.other_results import Compared
from snaketune.report.compare.scores import measures
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.dropped_examples import records
from snaketune.report.data.job_table import job_rows, tokenizer_rows, versions
from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.preference_shift import Change, flips
from snaketune.report.data.results import Findings
from snaketune.report.data.samples import Sample, choose
from snaketune.report.data.supervised_spans import tokenized_rows
from snaketune.report.judge.headline import cards, headline, judged_line
from snaketune.report.judge.run_warnings import groups, steps, suspicions
from snaketune.stages.specs import ReportSpec

SAMPLES_ON_THE_PAGE = 4
FLIPS_ON_THE_PAGE, FLIPS = 2, 8
COUNTED = {"per token": True, "as a whole": False}
FLIPPED = {"won": True, "lost": False}
FILTERS = ("whole", "short", "decimal", "percent", "duration", "clean", "words")


class Pages:
    """The pages of one report: `render` gives one by the stem of its file name."""

    def __init__(
        self,
        spec: ReportSpec,
        findings: Findings,
        charts: dict[str, Chart],
        styles: dict[str, Style],
        found: Variants,
        changed: list[Change],
        compared: Compared,
    ):
        self.findings, self.variants, self.changed, self.compared = findings, found, changed, compared
        # Both the overview and the page of its own show a figure; it is drawn once.
        self.panels = {name: _panels(chart) for name, chart in charts.items()}
        self.shared = {
            "spec": spec.model_copy(update={"title": text.clean(spec.title), "note": text.clean(spec.note)}),
            "styles": styles,
            "colours": COLOURS,
            "charts": charts,
            "panels": self.panels,
            "variants": found,
        }

    def render(self, name: str) -> str:
        pages: dict[str, Callable[[], dict[str, Any]]] = {
            "index": self._index,
            "corpus": self._corpus,
            "packing": self._packing,
            "preferences": self._preferences,
            "samples": self._samples,
            "compare": self._compare,
        }
        return environment().get_template(f"{name}.html.jinja").render(**self.shared, **pages[name]())

    def _index(self) -> dict[str, Any]:
        findings = self.findings
        line = judged_line(findings, self.variants.best)
        front = headline(findings, line)
        suspicious = suspicions(findings, line, front.verdicts, self.variants, self.compared.runs)
        return {
            "front": front,
            "cards": cards(findings),
            "suspicious": groups(suspicious),
            "steps": steps(suspicious),
            "corpora": corpus_flows(findings),
            "packs": pack_flows(findings),
            "trainings": training_flows(findings),
            "tokenizers": tokenizer_rows(findings),
            "tables": {
                name: {"models": [scored.model for scored in models], "measures": measures(models)}
                for name, models in findings.evaluations.items()
            },
            "samples": self._chosen(SAMPLES_ON_THE_PAGE),
            "moved": self._moved([self.variants.best or self.variants.labels[0]], FLIPS_ON_THE_PAGE)
            if self.variants.labels
            else [],
            "jobs": job_rows(findings),
            "versions": versions(findings),
        }

    def _corpus(self) -> dict[str, Any]:
        found = [records(result) for result in self.findings.of("corpus")]
        return {"corpora": list(zip(corpus_flows(self.findings), found, self.panels["characters"], strict=True))}

    def _packing(self) -> dict[str, Any]:
        flows = pack_flows(self.findings)
        drawn = zip(*(self.panels[name] for name in ("lengths", "packing", "supervised")), strict=True)
        panels = dict(zip([flow.name for flow in flows if flow.packed], drawn))
        return {"packs": flows, "panels_of": panels, "tokenized": tokenized_rows(self.findings)}

    def _compare(self) -> dict[str, Any]:
        return {"comparisons": self.compared.comparisons}

    def _samples(self) -> dict[str, Any]:
        return {
            "samples": self._chosen(),
            "side_by_side": side_by_side.names_of(side_by_side.conversations_of(self.findings.evaluations)),
        }

    def _preferences(self) -> dict[str, Any]:
        return {"moved": self._moved(self.variants.labels, FLIPS)}

    def _chosen(self, per_corpus: int | None = None) -> dict[str, list[Sample]]:
        evaluations = self.findings.evaluations.items()
        return {name: choose(models, per_corpus, self.findings.begun_from) for name, models in evaluations}

    def _moved(self, labels: list[str], most: int) -> list[dict[str, Any]]:
        """What changed in the pairs of these runs: their figures, and the pairs that flipped."""
        # The chart has two panels of each.
        places = {id(change): self.panels["preferences"][2 * n : 2 * n + 2] for n, change in enumerate(self.changed)}
        return [
            {
                "change": change,
                "panels": places[id(change)],
                "outcomes": {name: change.outcomes(per_token) for name, per_token in COUNTED.items()},
                "flips": {name: flips(self.findings, change, won, most) for name, won in FLIPPED.items()},
            }
            for label in labels
            for change in self.changed
            if change.label == label
        ]


def _panels(chart: Chart) -> list[tuple[str, Markup]]:
    """Title and picture of each panel. The picture is marked as safe: matplotlib escapes the text in it."""
    return [(panel.title, Markup(svg_inline(chart, number))) for number, panel in enumerate(chart.panels)]


def _runs(values: list[Any], attribute: str) -> list[tuple[Any, list[Any]]]:
    """Neighbours that agree, in their order."""
    return [(key, list(some)) for key, some in groupby(values, attrgetter(attribute))]


@cache
def environment() -> Environment:
    """What renders templates of this folder: escaped throughout, and nothing undefined."""
    environment = Environment(
        loader=PackageLoader("snaketune", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {name: getattr(text, name) for name in FILTERS}
    environment.filters["zip"] = zip
    environment.filters["groupby_run"] = _runs
    return environment
