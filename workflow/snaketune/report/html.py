"""Render the pages of the report from templates. All text from data and models is untrusted, so it is escaped."""

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
from snaketune.report.compare.other_results import ComparedRuns
from snaketune.report.compare.scores import measures
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.dropped_examples import dropped_examples
from snaketune.report.data.job_table import job_rows, tokenizer_rows, versions
from snaketune.report.data.packing_flow import pack_flows, training_flows
from snaketune.report.data.preference_shift import PreferenceChange, flips
from snaketune.report.data.results import ResultSet
from snaketune.report.data.samples import SampledPrompt, choose
from snaketune.report.data.supervised_spans import tokenized_rows
from snaketune.report.judge.all_findings import collect_findings, groups, steps
from snaketune.report.judge.headline import cards, headline, judged_lineage
from snaketune.stages.specs import ReportSpec

SAMPLES_ON_THE_PAGE = 4
FLIPS_ON_THE_PAGE, FLIPS = 2, 8
PER_TOKEN = {"per token": True, "whole response": False}
FLIP_IS_WON = {"won": True, "lost": False}
FILTERS = ("whole", "short", "decimal", "percent", "duration", "clean", "words")


class Pages:
    """The pages of one report. `render` returns a page by the stem of its file name."""

    def __init__(
        self,
        spec: ReportSpec,
        results: ResultSet,
        charts: dict[str, Chart],
        styles: dict[str, Style],
        variants: Variants,
        changes: list[PreferenceChange],
        compared: ComparedRuns,
    ):
        self.results, self.variants, self.changes, self.compared = results, variants, changes, compared
        # The overview shows figures of other pages too; each is drawn once.
        self.panels = {name: _panels(chart) for name, chart in charts.items()}
        self.shared = {
            "spec": spec.model_copy(update={"title": text.clean(spec.title), "note": text.clean(spec.note)}),
            "styles": styles,
            "colours": COLOURS,
            "charts": charts,
            "panels": self.panels,
            "variants": variants,
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
        results = self.results
        lineage = judged_lineage(results, self.variants.best)
        top = headline(results, lineage)
        findings = collect_findings(results, lineage, top.verdicts, self.variants, self.compared.runs)
        return {
            "headline": top,
            "cards": cards(results),
            "findings": groups(findings),
            "steps": steps(findings),
            "corpora": corpus_flows(results),
            "packs": pack_flows(results),
            "trainings": training_flows(results),
            "tokenizers": tokenizer_rows(results),
            "tables": {
                name: {"models": [scored.model for scored in models], "measures": measures(models)}
                for name, models in results.evaluations.items()
            },
            "samples": self._samples_of_all(SAMPLES_ON_THE_PAGE),
            "preference_changes": self._preference_changes(
                [self.variants.best or self.variants.labels[0]], FLIPS_ON_THE_PAGE
            )
            if self.variants.labels
            else [],
            "jobs": job_rows(results),
            "versions": versions(results),
        }

    def _corpus(self) -> dict[str, Any]:
        examples = [dropped_examples(result) for result in self.results.of("corpus")]
        return {"corpora": list(zip(corpus_flows(self.results), examples, self.panels["characters"], strict=True))}

    def _packing(self) -> dict[str, Any]:
        flows = pack_flows(self.results)
        drawn = zip(*(self.panels[name] for name in ("lengths", "packing", "supervised")), strict=True)
        panels = dict(zip([flow.name for flow in flows if flow.packed], drawn))
        return {"packs": flows, "panels_of": panels, "tokenized": tokenized_rows(self.results)}

    def _compare(self) -> dict[str, Any]:
        return {"comparisons": self.compared.comparisons}

    def _samples(self) -> dict[str, Any]:
        return {
            "samples": self._samples_of_all(),
            "side_by_side": side_by_side.side_by_side_files(side_by_side.prompt_corpora(self.results.evaluations)),
        }

    def _preferences(self) -> dict[str, Any]:
        return {"preference_changes": self._preference_changes(self.variants.labels, FLIPS)}

    def _samples_of_all(self, per_corpus: int | None = None) -> dict[str, list[SampledPrompt]]:
        evaluations = self.results.evaluations.items()
        return {name: choose(models, per_corpus, self.results.initial_models) for name, models in evaluations}

    def _preference_changes(self, labels: list[str], most: int) -> list[dict[str, Any]]:
        """The changes in the held-out pairs of the runs `labels`: figures, counts and the pairs that flipped."""
        # The chart has two panels per change.
        panels_of = {id(change): self.panels["preferences"][2 * n : 2 * n + 2] for n, change in enumerate(self.changes)}
        return [
            {
                "change": change,
                "panels": panels_of[id(change)],
                "outcomes": {name: change.outcomes(per_token) for name, per_token in PER_TOKEN.items()},
                "flips": {name: flips(self.results, change, won, most) for name, won in FLIP_IS_WON.items()},
            }
            for label in labels
            for change in self.changes
            if change.label == label
        ]


def _panels(chart: Chart) -> list[tuple[str, Markup]]:
    """Title and SVG of each panel. The SVG is marked as safe, since matplotlib escapes the text in it."""
    return [(panel.title, Markup(svg_inline(chart, number))) for number, panel in enumerate(chart.panels)]


def _runs(values: list[Any], attribute: str) -> list[tuple[Any, list[Any]]]:
    """Group neighbours with the same value of `attribute`, in order."""
    return [(key, list(some)) for key, some in groupby(values, attrgetter(attribute))]


@cache
def environment() -> Environment:
    """The Jinja environment of the templates: everything is escaped, and an undefined name is an error."""
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
