"""The `report` stage: everything that ran, as a page, and as figures and tables for Snakemake's own report.

Reads manifests, run.json files and the small payloads (scores, responses, places of documents); no weights, no torch. A
report of a few hundred thousand conversations takes some seconds, most of them matplotlib's.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import write_json
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.work import WorkFolder
from snaketune.config.specs import ReportSpec
from snaketune.report import flow, scores
from snaketune.report.drawing import Chart, Style, model_styles, svg_file
from snaketune.report.figures import dpo_chart, lengths_chart, packing_chart, sft_chart
from snaketune.report.findings import Findings
from snaketune.report.html import page, samples_page
from snaketune.report.pages import pages_for


def build(spec: ReportSpec, work: WorkFolder, *, manifests: list[Path], runs: list[Path]) -> Outcome:
    """Fill `work.payload` with the pages that `pages_for` names for the stages among the manifests.

    Args:
        manifests: of all results to report on.
        runs: their run.json files, each beside its manifest; one that isn't there leaves gaps and nothing else.
    Raises:
        SnaketuneError: a manifest or payload that can't be read.
    """
    findings = Findings(manifests, runs)
    styles = model_styles(findings.models)
    wanted = pages_for(findings.stages)
    charts = {Path(name).stem: _chart(Path(name).stem, findings, styles) for name in wanted if name.endswith(".svg")}
    for name in wanted:
        path = work.payload / name
        match name:
            case "index.html":
                _write(path, page(spec, findings, charts, styles))
            case "samples.html":
                _write(path, samples_page(spec, findings, styles))
            case "data.csv":
                _write(path, _csv(flow.CSV_COLUMNS, flow.csv_rows(findings)))
            case "evaluation.csv":
                _write(path, _csv(*scores.csv_rows(findings)))
            case "evaluation.json":
                write_json(path, scores.as_json(findings))
            case _:
                _write(path, svg_file(charts[path.stem]))
    return Outcome(
        counts={"results": {stage: len(findings.of(stage)) for stage in sorted(findings.stages)}},
        libraries=("matplotlib", "jinja2"),
    )


def _chart(name: str, findings: Findings, styles: dict[str, Style]) -> Chart:
    match name:
        case "lengths":
            return lengths_chart(findings)
        case "packing":
            return packing_chart(findings)
        case "sft":
            return sft_chart(findings, styles)
        case "dpo":
            return dpo_chart(findings, styles)
        case _:
            return scores.evaluation_chart(findings, styles)


def _csv(columns: Sequence[str], rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="\n")
