"""Write the pages of the `report` stage: an HTML report of all results, and figures and tables for Snakemake's own report.

Reads manifests, run.json files and small payloads (scores, responses, the index of packed documents, the first lines of
records), but no weights, and doesn't import torch. A report of a few hundred thousand conversations takes a few seconds, most
of them in matplotlib.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import write_json
from snaketune.report.charts.data_charts import data_charts
from snaketune.report.charts.preference_charts import preferences_chart
from snaketune.report.charts.style import Chart, Style, model_styles, svg_file
from snaketune.report.charts.training_curves import dpo_chart, sft_chart
from snaketune.report.charts.variant_charts import variants_chart
from snaketune.report.compare import scores
from snaketune.report.compare.other_results import ComparedRuns
from snaketune.report.compare.side_by_side import prompt_corpora, side_by_side_files, tables
from snaketune.report.compare.variants import Variants, best_entry, compare_variants, csv_rows
from snaketune.report.data import counts_csv
from snaketune.report.data.preference_shift import PreferenceChange, preference_changes
from snaketune.report.data.results import ResultSet
from snaketune.report.html import Pages
from snaketune.report.pages import pages_for
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReportSpec

# Spreadsheets compute a cell that begins with one of these (also in full width); some ignore leading whitespace.
FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def write_pages(
    spec: ReportSpec,
    work: WorkFolder,
    *,
    manifests: list[Path],
    runs: list[Path],
    compared: Sequence[Path] = (),
    compared_runs: Sequence[Path] = (),
    compared_evals: Sequence[Path] = (),
) -> Outcome:
    """Fill `work.payload` with the files that `pages_for` lists for the stages of the manifests.

    Args:
        manifests: Manifests of all results to report on, in the order of `spec.jobs`.
        runs: Their run.json files, each beside its manifest. Where one is missing, its values are shown as missing.
        compared, compared_runs: Manifests and run.json files of earlier trainings, in the order of `spec.compare`.
        compared_evals: Manifests of the evaluations of their models.
    Raises:
        SnaketuneError: If a manifest or payload can't be read.
    """
    results = ResultSet(spec.jobs, manifests, runs)
    variants = compare_variants(results, spec.sort_by)
    others = ComparedRuns(results, spec.compare, list(compared), list(compared_runs), list(compared_evals))
    names = pages_for(results.stages, compared=bool(others.others))
    changes = preference_changes(results)
    styles = model_styles([*results.models, *others.labels])
    charts = _charts(results, variants, changes, styles)
    if others.others:
        charts["compare"] = others.chart(styles)
    pages = Pages(spec, results, charts, styles, variants, changes, others)
    for name in names:
        path = work.payload / name
        match path.suffix:
            case ".html":
                _write(path, pages.render(path.stem))
            case ".svg":
                _write(path, svg_file(charts[path.stem]))
            case ".json":
                write_json(path, scores.as_json(results))
            case _:
                _write(path, _csv(*_table(path.stem, results, variants)))
    for evaluation, corpora in prompt_corpora(results.evaluations).items():
        for key, files in side_by_side_files({evaluation: corpora}).items():
            csv_tables = tables(evaluation, key.partition("/")[2], results.evaluations[evaluation])
            for name, table in zip(files, csv_tables.values(), strict=True):
                (work.payload / name).parent.mkdir(parents=True, exist_ok=True)
                _write(work.payload / name, _csv(*table))
    counts = {"results": {stage: len(results.of(stage)) for stage in sorted(results.stages)}}
    # The clean target keeps the work folders of compared results.
    compared_work = {"compared": others.fingerprints} if others.others else {}
    return Outcome(counts=counts, about=best_entry(variants) | compared_work)


def _charts(
    results: ResultSet, variants: Variants, changes: list[PreferenceChange], styles: dict[str, Style]
) -> dict[str, Chart]:
    """All charts by the stem of their file name."""
    charts = data_charts(results)
    if results.of("sft"):
        charts["sft"] = sft_chart(results, styles)
    if results.of("dpo"):
        charts["dpo"] = dpo_chart(results, styles)
        charts["variants"] = variants_chart(variants, changes, styles)
    if results.of("eval"):
        charts["evaluation"] = scores.evaluation_chart(results, styles)
    if {"dpo", "eval"} <= results.stages:
        charts["preferences"] = preferences_chart(changes, styles)
    return charts


def _table(name: str, results: ResultSet, variants: Variants) -> tuple[Sequence[str], list[dict[str, Any]]]:
    match name:
        case "data":
            return counts_csv.COLUMNS, counts_csv.csv_rows(results)
        case "variants":
            return csv_rows(variants)
    return scores.csv_rows(results)


def _csv(columns: Sequence[str], rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _escape_formula(value) for column, value in row.items()} for row in rows)
    return buffer.getvalue()


def _escape_formula(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute as a formula; numbers stay numbers.

    Column names and responses are untrusted, and may be `=HYPERLINK(...)`.

    >>> [_escape_formula(value) for value in ("=1+1", "@x", "-x", "a=b", -1.5, "-1.5", "")]
    ["'=1+1", "'@x", "'-x", 'a=b', -1.5, '-1.5', '']
    >>> [_escape_formula(value) for value in (" =1", "\\n+1|x", "\uff1d1")]
    ["' =1", "'\\n+1|x", "'\uff1d1"]
    """
    if not isinstance(value, str) or not value.lstrip().startswith(FORMULAS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="\n")
