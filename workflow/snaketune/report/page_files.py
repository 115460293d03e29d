"""Write the pages of the `report` stage: an HTML report of all results, and tables as CSV files.

Reads manifests, run.json files and small payloads (scores, responses, the index of packed documents, the first lines of
records), but no weights, and doesn't import torch. A report of a few hundred thousand conversations takes a few seconds, most
of them in matplotlib.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.diagnostics import verified
from snaketune.files import write_json
from snaketune.publishing.measures import measures
from snaketune.report.charts.data_charts import data_charts
from snaketune.report.charts.model_charts import evaluation_chart, preferences_chart, race_chart, variants_chart
from snaketune.report.charts.reward_charts import reward_chart, reward_evaluation_chart
from snaketune.report.charts.round_charts import rounds_chart
from snaketune.report.charts.style import Chart, model_styles
from snaketune.report.charts.training_charts import dpo_chart, sft_chart
from snaketune.report.compare import variants
from snaketune.report.compare.earlier_runs import EarlierRuns
from snaketune.report.csv_files import Table, count_rows, csv_text, prompt_corpora, score_rows, tables, variant_rows
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.job_table import cards, job_rows, tokenizer_rows, versions
from snaketune.report.data.packing_flow import epochs, pack_flows
from snaketune.report.data.preference_shift import flips, preference_changes
from snaketune.report.data.races import races_of
from snaketune.report.data.results import ResultSet, unique
from snaketune.report.data.rounds import rounds_of
from snaketune.report.data.sampled import sampled_tables, selections
from snaketune.report.data.sampled import score_rows as scores_of_samples
from snaketune.report.data.samples import Sample, answers_while_training, choose, dropped_examples, tokenized_rows
from snaketune.report.data.teachers import teacher_comparisons
from snaketune.report.data.win_rates import judged_comparisons
from snaketune.report.html import render
from snaketune.report.judge.ending import ending
from snaketune.report.judge.findings import groups, steps
from snaketune.report.judge.headline import Headline, collect_findings, headline, judged_lineage
from snaketune.report.pages import pages_for, side_by_side_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.published_jobs import CHECKS
from snaketune.stages.specs import ReportSpec
from snaketune.text import clean

# Samples and flipped pairs on the overview, and flipped pairs on their own page.
SAMPLES_ON_THE_OVERVIEW = 4
FLIPS_ON_THE_OVERVIEW, FLIPS = 2, 8


def build(
    spec: ReportSpec,
    work: WorkFolder,
    *,
    manifests: list[Path],
    runs: list[Path],
    compared: Sequence[Path] = (),
    compared_runs: Sequence[Path] = (),
    compared_evals: Sequence[Path] = (),
) -> Outcome:
    """Fill `work.payload` with the files that `pages_for` and `side_by_side_files` list for the results.

    Args:
        manifests: Manifests of all results to report on, in the order of `spec.jobs`.
        runs: Their run.json files, each beside its manifest. Where one is missing, its values are shown as missing.
        compared, compared_runs: Manifests and run.json files of earlier trainings, in the order of `spec.compare`.
        compared_evals: Manifests of the evaluations of their models.
    Raises:
        SnaketuneError: If a manifest or payload can't be read.
    """
    results = ResultSet(spec.jobs, manifests, runs)
    earlier = EarlierRuns(results, spec.compare, compared, compared_runs, compared_evals)
    pages = Pages(spec, results, earlier)
    for path in map(Path, pages_for(results.stages, compared=bool(earlier.others))):
        match path.suffix:
            case ".html":
                _write(work.payload / path, render(path.stem, **pages.shared, **pages.values[path.stem]()))
            case ".csv":
                _write(work.payload / path, csv_text(pages.tables[path.stem]()))
            case ".json":
                of_models = results.all_evaluations.items()
                scores = {name: {scored.model: scored.scores for scored in models} for name, models in of_models}
                write_json(work.payload / path, scores)
    for key, names in pages.side_by_side.items():
        evaluation, _, corpus = key.partition("/")
        for name, table in zip(names, tables(evaluation, corpus, results.evaluations[evaluation]), strict=True):
            _write(work.payload / name, csv_text(table))
    counts = {"results": {stage: len(results.of(stage)) for stage in sorted(results.stages)}}
    # The clean target keeps the work folders of compared results.
    compared_work = {"compared": earlier.fingerprints} if earlier.others else {}
    about = variants.best_entry(pages.variants) | compared_work | {"ending": ending(results, pages.headline)}
    return Outcome(counts=counts, about=about)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


class Pages:
    """The charts, tables and values of all pages of one report.

    Attributes:
        shared: The values that every page has.
        values: By page, a function that returns the values that only it has.
        tables: By the stem of a CSV file, a function that returns its columns and rows.
        side_by_side: The files with all responses, by evaluation and corpus.
    """

    def __init__(self, spec: ReportSpec, results: ResultSet, earlier: EarlierRuns):
        self.results, self.earlier = results, earlier
        self.styles = model_styles([*results.models, *earlier.labels])
        self.side_by_side = side_by_side_files(prompt_corpora(results.evaluations))
        self.races = races_of(results)
        self.rounds = rounds_of(results)
        self.variants = variants.compare_variants(results, spec.sort_by)
        self.changes = preference_changes(results)
        self.shared = {
            "spec": spec.model_copy(update={"title": clean(spec.title), "note": clean(spec.note)}),
            "styles": self.styles,
            "charts": self.charts,
            "variants": self.variants,
        }
        self.values: dict[str, Callable[[], dict[str, Any]]] = {
            "index": self._index,
            "corpus": self._corpus,
            "packing": self._packing,
            "preferences": lambda: {"preference_changes": self._changes(self.variants.labels, FLIPS)},
            "samples": lambda: {
                "samples": self._samples(),
                "side_by_side": self.side_by_side,
                "while_training": answers_while_training(results),
            },
            "sampling": self._sampling,
            "compare": lambda: {"comparisons": earlier.comparisons},
        }
        self.tables: dict[str, Callable[[], Table]] = {
            "data": lambda: count_rows(results),
            "variants": lambda: variant_rows(self.variants),
            "evaluation": lambda: score_rows(results),
        }

    @cached_property
    def charts(self) -> dict[str, Chart]:
        """By name; those without results are omitted."""
        results, styles = self.results, self.styles
        charts: dict[str, tuple[set[str], Callable[[], Chart]]] = {
            "sft": ({"sft"}, lambda: sft_chart(results, styles)),
            "dpo": ({"dpo"}, lambda: dpo_chart(results, styles)),
            "variants": ({"dpo"}, lambda: variants_chart(self.variants, self.changes, styles)),
            "rounds": ({"select"}, lambda: rounds_chart(self.rounds)),
            "reward": ({"reward"}, lambda: reward_chart(results, styles)),
            "race": ({"race"}, lambda: race_chart(self.races, styles)),
            "evaluation": ({"eval"}, lambda: evaluation_chart(results, styles)),
            "preferences": ({"dpo", "eval"}, lambda: preferences_chart(self.changes, styles)),
        }
        made = {name: make() for name, (stages, make) in charts.items() if stages <= results.stages}
        if not self.rounds:
            # Selected rows of another model.
            made.pop("rounds", None)
        if any(scored.scores["preferences"] for scored in results.reward_models):
            made["rewards"] = reward_evaluation_chart(results, styles)
        if self.earlier.others:
            made["compare"] = self.earlier.chart(styles)
        return made | data_charts(results)

    def _checks(self) -> list[tuple[str, list[list[str]]]]:
        """The checks of each finished training."""
        checks: dict[str, list[dict[str, Any]]] = {}
        for one in self.results.of(*CHECKS):
            checks.setdefault(one.name, []).extend(verified.checks_in(one.artifact))
        return [(name, verified.table(of_training)) for name, of_training in checks.items()]

    @cached_property
    def lineage(self) -> list[str]:
        return judged_lineage(self.results, self.variants.best)

    @cached_property
    def headline(self) -> Headline:
        return headline(self.results, self.lineage)

    def _index(self) -> dict[str, Any]:
        results, best, top = self.results, self.variants.best, self.headline
        findings = collect_findings(results, self.lineage, top.verdicts, self.variants, self.earlier.runs)
        return {
            "headline": top,
            "cards": list(cards(results)),
            "findings": groups(findings),
            "steps": steps(findings),
            "corpora": corpus_flows(results),
            "packs": pack_flows(results),
            "trainings": [(run, results.first(run, "pack"), epochs(run)) for run in results.trainings],
            "tokenizers": tokenizer_rows(results),
            "tables": {
                name: {
                    "models": [scored.model for scored in models],
                    "measures": measures(models),
                    "engines": unique(scored.engine for scored in models if scored.engine),
                }
                for name, models in results.all_evaluations.items()
            },
            "compared_with_teacher": teacher_comparisons(results),
            "judged": judged_comparisons(results),
            "races": self.races,
            "verified": self._checks(),
            "rounds": self.rounds,
            "samples": self._samples(SAMPLES_ON_THE_OVERVIEW),
            "preference_changes": self._changes([best] if best else self.variants.labels[:1], FLIPS_ON_THE_OVERVIEW),
            "jobs": job_rows(results),
            "versions": versions(results),
        }

    def _corpus(self) -> dict[str, Any]:
        examples = map(dropped_examples, self.results.of("corpus"))
        figures = self.charts["characters"].figures
        return {"corpora": list(zip(corpus_flows(self.results), examples, figures, strict=True))}

    def _packing(self) -> dict[str, Any]:
        flows = pack_flows(self.results)
        drawn = zip(*(self.charts[name].figures for name in ("lengths", "packing", "supervised")), strict=True)
        panels = dict(zip([flow.name for flow in flows if flow.packed], drawn))
        return {"packs": flows, "panels_of": panels, "tokenized": tokenized_rows(self.results)}

    def _sampling(self) -> dict[str, Any]:
        # Two panels for each sample.
        figures = self.charts["sampled"].figures
        drawn = [list(pair) for pair in zip(figures[::2], figures[1::2], strict=True)]
        selected = self.charts["selected"].figures if "selected" in self.charts else []
        return {
            "sampled_tables": list(zip(sampled_tables(self.results), drawn, strict=True)),
            "scores": scores_of_samples(self.results),
            "selections": list(zip(selections(self.results), selected, strict=True)),
        }

    def _samples(self, per_corpus: int | None = None) -> dict[str, list[Sample]]:
        evaluations = self.results.evaluations.items()
        return {name: choose(models, per_corpus, self.results.initial_models) for name, models in evaluations}

    def _changes(self, labels: list[str], most: int) -> list[dict[str, Any]]:
        """The changes in the held-out pairs of the runs `labels`: figures, counts and the pairs that flipped."""
        figures = self.charts["preferences"].figures if self.changes else []
        # Two panels for each change.
        drawn = dict(zip(map(id, self.changes), zip(figures[::2], figures[1::2], strict=True), strict=True))
        return [
            {
                "change": change,
                "panels": drawn[id(change)],
                "outcomes": {"per token": change.outcomes(True), "whole response": change.outcomes(False)},
                "flips": {name: flips(self.results, change, name == "won", most) for name in ("won", "lost")},
            }
            for label in labels
            for change in self.changes
            if change.label == label
        ]
