"""The pages, from templates. Everything that comes from data or models is escaped: what they write is not trusted."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from snaketune.config.specs import ReportSpec
from snaketune.report import text
from snaketune.report.drawing import COLOURS, Chart, Style, svg_inline
from snaketune.report.findings import Findings
from snaketune.report.flow import corpus_flows, pack_flows, training_flows
from snaketune.report.headline import cards
from snaketune.report.jobs import job_rows, tokenizer_rows, versions
from snaketune.report.samples import choose
from snaketune.report.scores import measures

SAMPLES_ON_THE_PAGE = 4
FILTERS = ("whole", "short", "decimal", "percent", "duration", "clean")


def page(spec: ReportSpec, findings: Findings, charts: dict[str, Chart], styles: dict[str, Style]) -> str:
    """`index.html`."""
    return _render(
        "page.html.jinja",
        spec,
        styles,
        findings=findings,
        cards=cards(findings),
        corpora=corpus_flows(findings),
        packs=pack_flows(findings),
        trainings=training_flows(findings),
        tokenizers=tokenizer_rows(findings),
        charts=charts,
        panels={name: _panels(chart) for name, chart in charts.items()},
        tables={
            name: {"models": [scored.model for scored in models], "measures": measures(models)}
            for name, models in findings.evaluations.items()
        },
        samples={name: choose(models, SAMPLES_ON_THE_PAGE) for name, models in findings.evaluations.items()},
        jobs=job_rows(findings),
        versions=versions(findings),
    )


def samples_page(spec: ReportSpec, findings: Findings, styles: dict[str, Style]) -> str:
    """`samples.html`: more of them."""
    samples = {name: choose(models) for name, models in findings.evaluations.items()}
    return _render("samples.html.jinja", spec, styles, samples=samples)


def _panels(chart: Chart) -> list[tuple[str, Markup]]:
    """Title and picture of each panel. The picture is marked as safe: matplotlib escapes the text in it."""
    return [(panel.title, Markup(svg_inline(chart, number))) for number, panel in enumerate(chart.panels)]


def _render(template: str, spec: ReportSpec, styles: dict[str, Style], **context: Any) -> str:
    environment = _environment()
    return environment.get_template(template).render(spec=spec, styles=styles, colours=COLOURS, **context)


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
