"""The pages, from templates. Everything that comes from data or models is escaped: what they write is not trusted."""

from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from snaketune.report import text
from snaketune.report.corpus_flow import corpus_flows
from snaketune.report.drawing import COLOURS, Chart, model_styles, svg_inline
from snaketune.report.findings import Findings
from snaketune.report.flow import pack_flows, training_flows
from snaketune.report.headline import cards
from snaketune.report.jobs import job_rows, tokenizer_rows, versions
from snaketune.report.records import records
from snaketune.report.samples import choose
from snaketune.report.scores import measures
from snaketune.report.spans import tokenized_rows
from snaketune.stages.specs import ReportSpec

SAMPLES_ON_THE_PAGE = 4
FILTERS = ("whole", "short", "decimal", "percent", "duration", "clean", "words")


class Pages:
    """The pages of one report: `render` gives one by the stem of its file name."""

    def __init__(self, spec: ReportSpec, findings: Findings, charts: dict[str, Chart]):
        self.findings = findings
        # Both the overview and the page of its own show a figure; it is drawn once.
        self.panels = {name: _panels(chart) for name, chart in charts.items()}
        self.shared = {
            "spec": spec,
            "styles": model_styles(findings.models),
            "colours": COLOURS,
            "charts": charts,
            "panels": self.panels,
        }

    def render(self, name: str) -> str:
        pages: dict[str, Callable[[], dict[str, Any]]] = {
            "index": self._index,
            "corpus": self._corpus,
            "packing": self._packing,
            "samples": self._samples,
        }
        return _environment().get_template(f"{name}.html.jinja").render(**self.shared, **pages[name]())

    def _index(self) -> dict[str, Any]:
        findings = self.findings
        return {
            "cards": cards(findings),
            "corpora": corpus_flows(findings),
            "packs": pack_flows(findings),
            "trainings": training_flows(findings),
            "tokenizers": tokenizer_rows(findings),
            "tables": {
                name: {"models": [scored.model for scored in models], "measures": measures(models)}
                for name, models in findings.evaluations.items()
            },
            "samples": {name: choose(models, SAMPLES_ON_THE_PAGE) for name, models in findings.evaluations.items()},
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

    def _samples(self) -> dict[str, Any]:
        return {"samples": {name: choose(models) for name, models in self.findings.evaluations.items()}}


def _panels(chart: Chart) -> list[tuple[str, Markup]]:
    """Title and picture of each panel. The picture is marked as safe: matplotlib escapes the text in it."""
    return [(panel.title, Markup(svg_inline(chart, number))) for number, panel in enumerate(chart.panels)]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("snaketune", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {name: getattr(text, name) for name in FILTERS}
    environment.filters["zip"] = zip
    return environment
