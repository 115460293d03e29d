"""What the `report` stage writes: everything that ran, as a page, and as figures and tables for Snakemake's own report.

Reads manifests, run.json files and the small payloads (scores, responses, places of documents, first lines of records);
no weights, no torch. A report of a few hundred thousand conversations takes some seconds, most of them matplotlib's.
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
from snaketune.report.compare.other_results import Compared
from snaketune.report.compare.side_by_side import conversations_of, names_of, tables
from snaketune.report.compare.variants import Variants, best_of, csv_rows, variants
from snaketune.report.data import counts_csv
from snaketune.report.data.preference_shift import Change, changes
from snaketune.report.data.results import Findings
from snaketune.report.html import Pages
from snaketune.report.pages import pages_for
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReportSpec

# What a cell begins with that is computed, full-width forms too; some programs look past space before it.
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
    """Fill `work.payload` with the pages that `pages_for` names for the stages among the manifests.

    Args:
        manifests: of all results to report on, in the order of `spec.jobs`.
        runs: their run.json files, each beside its manifest; one that isn't there leaves gaps and nothing else.
        compared, compared_runs: the same of trainings of another time, in the order of `spec.compare`.
        compared_evals: manifests of what evaluated their models.
    Raises:
        SnaketuneError: a manifest or payload that can't be read.
    """
    findings = Findings(spec.jobs, manifests, runs)
    found = variants(findings, spec.sort_by)
    others = Compared(findings, spec.compare, list(compared), list(compared_runs), list(compared_evals))
    wanted = pages_for(findings.stages, compared=bool(others.others))
    changed = changes(findings)
    styles = model_styles([*findings.models, *others.labels])
    charts = _charts(findings, found, changed, styles)
    if others.others:
        charts["compare"] = others.chart(styles)
    pages = Pages(spec, findings, charts, styles, found, changed, others)
    for name in wanted:
        path = work.payload / name
        match path.suffix:
            case ".html":
                _write(path, pages.render(path.stem))
            case ".svg":
                _write(path, svg_file(charts[path.stem]))
            case ".json":
                write_json(path, scores.as_json(findings))
            case _:
                _write(path, _csv(*_table(path.stem, findings, found)))
    for evaluation, corpora in conversations_of(findings.evaluations).items():
        for place, names in names_of({evaluation: corpora}).items():
            made = tables(evaluation, place.partition("/")[2], findings.evaluations[evaluation])
            for name, table in zip(names, made.values(), strict=True):
                (work.payload / name).parent.mkdir(parents=True, exist_ok=True)
                _write(work.payload / name, _csv(*table))
    counts = {"results": {stage: len(findings.of(stage)) for stage in sorted(findings.stages)}}
    # What was compared with is kept when old work is freed.
    kept = {"compared": others.fingerprints} if others.others else {}
    return Outcome(counts=counts, about=best_of(found) | kept)


def _charts(findings: Findings, found: Variants, changed: list[Change], styles: dict[str, Style]) -> dict[str, Chart]:
    """By name of their file."""
    charts = data_charts(findings)
    if findings.of("sft"):
        charts["sft"] = sft_chart(findings, styles)
    if findings.of("dpo"):
        charts["dpo"] = dpo_chart(findings, styles)
        charts["variants"] = variants_chart(found, changed, styles)
    if findings.of("eval"):
        charts["evaluation"] = scores.evaluation_chart(findings, styles)
    if {"dpo", "eval"} <= findings.stages:
        charts["preferences"] = preferences_chart(changed, styles)
    return charts


def _table(name: str, findings: Findings, found: Variants) -> tuple[Sequence[str], list[dict[str, Any]]]:
    match name:
        case "data":
            return counts_csv.COLUMNS, counts_csv.csv_rows(findings)
        case "variants":
            return csv_rows(found)
    return scores.csv_rows(findings)


def _csv(columns: Sequence[str], rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: _no_formula(value) for column, value in row.items()} for row in rows)
    return buffer.getvalue()


def _no_formula(value: Any) -> Any:
    """Text as a spreadsheet takes it for text: columns of somebody's data may be called `=HYPERLINK(...)`, and models write
    what they like. An apostrophe before it makes text of it; numbers stay numbers.

    >>> [_no_formula(value) for value in ("=1+1", "@x", "-x", "a=b", -1.5, "-1.5", "")]
    ["'=1+1", "'@x", "'-x", 'a=b', -1.5, '-1.5', '']
    >>> [_no_formula(value) for value in (" =1", "\\n+1|x", "\uff1d1")]
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
