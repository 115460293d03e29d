"""The CSV files of the report.

data.csv            every count of the data pipeline, one per line
evaluation.csv      a measure per row, a model per column
variants.csv        a DPO run per row
side_by_side/EVALUATION/CORPUS/: all responses, for human evaluation in a spreadsheet
    side_by_side.csv    id, prompt, expected answer, a column per model, and two to fill in: `better`, `note`
    blind.csv           the same with anonymous columns, whose order of models differs from row to row
    key.csv             the model of each column of blind.csv, by row

The blind order is a hash of names and ids. So the files are deterministic, and a key fits a file that was filled in weeks ago,
as long as the models have the same names.
"""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

from snaketune.report.compare.measures import measures
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import CorpusFlow, RowCounts, corpus_flows, tokenized_corpora
from snaketune.report.data.packing_flow import SplitFlow, pack_flows, training_flows
from snaketune.report.data.results import ResultSet, ScoredModel, unique
from snaketune.report.text import clean

# Spreadsheets compute a cell that begins with one of these (also in full width); some ignore leading whitespace.
FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Row = dict[str, Any]
Table = tuple[list[str], list[Row]]
TO_FILL_IN = ("better", "note")

COLUMNS = ["stage", "name", "source", "split", "what", "reason", "rows", "tokens", "supervised_tokens"]


def count_rows(results: ResultSet) -> Table:
    """Columns and rows of data.csv. A cell is empty where nothing is counted."""
    rows: list[Row] = []
    for flow in corpus_flows(results):
        rows += [{"stage": "corpus", "name": flow.name} | row for row in _corpus_rows(flow)]
    for flow, _ in tokenized_corpora(results):
        for split, counts in flow.counts.items():
            of = {"stage": "tokenize", "name": flow.name, "split": split}
            sizes = {column: counts[column] for column in ("rows", "tokens", "supervised_tokens")}
            rows.append(of | {"what": "tokenized"} | sizes)
            rows += [of | {"what": what, "rows": counts[what]} for what in ("control_text", "nothing_supervised")]
    for flow in pack_flows(results):
        of = {"stage": "pack", "name": flow.name}
        rows += [of | {"split": split.split} | row for split in flow.splits for row in _split_rows(split)]
        rows += [of | {"split": "train"} | row for row in _by_reason("packed rows of a length", flow.lengths)]
    for flow in training_flows(results):
        stage, _, name = flow.label.partition(":")
        of = {"stage": stage, "name": name, "split": "train", "what": "trained per epoch"}
        rows.append(of | {"rows": flow.rows, "tokens": flow.tokens_per_epoch})
    return COLUMNS, rows


def _by_reason(what: str, counts: Mapping[Any, int]) -> list[Row]:
    return [{"what": what, "reason": reason, "rows": n} for reason, n in counts.items()]


def _corpus_rows(flow: CorpusFlow) -> Iterator[Row]:
    yield from _row_counts(flow.rows, _by_reason("quarantined", flow.quarantined))
    yield from ({"what": "kept", "split": split, "rows": n} for split, n in flow.kept.items())
    for source in flow.sources:
        rows = source.rows
        counts = _row_counts(rows, [{"what": "quarantined", "rows": rows.quarantined}])
        counts += [{"what": "kept", "rows": rows.kept}]
        counts += _by_reason("layout", source.layouts) + _by_reason("ignored", source.ignored)
        yield from ({"source": source.name} | row for row in counts)
    for what, counts in flow.changes.items():
        yield from _by_reason(what, counts)
    if near := flow.near_duplicates:
        yield from ({"what": f"near duplicates: {key}", "rows": near[key]} for key in ("groups", "largest"))
    yield from _by_reason("rows that hit", (flow.contamination or {}).get("hits") or {})


def _row_counts(counts: RowCounts, quarantined: list[Row]) -> list[Row]:
    flows = [{"what": what, "rows": getattr(counts, what)} for what in ("read", "extra", "repeated", "joined")]
    return flows + quarantined + _by_reason("dropped", counts.dropped)


def _split_rows(split: SplitFlow) -> Iterator[Row]:
    yield {"what": "read", "rows": split.read, "tokens": split.read_tokens}
    for reason in split.reasons:
        dropped = {"rows": split.dropped.get(reason, 0), "tokens": split.dropped_tokens.get(reason, 0)}
        yield {"what": "dropped", "reason": reason} | dropped
    yield {"what": "truncated"} | split.truncated
    yield from ({"what": f"shared {what}", "tokens": tokens} for what, tokens in split.shared.items())
    yield {"what": "mismatched", "tokens": split.mismatched}
    yield {"what": "split", "rows": split.split_up["rows"]}
    yield {"what": "documents", "rows": split.documents}
    yield {"what": "kept", "rows": split.kept, "tokens": split.tokens, "supervised_tokens": split.supervised}
    if split.rows is not None:
        yield {"what": "packed rows with padding", "rows": split.rows, "tokens": split.capacity}


def prompt_corpora(evaluations: Mapping[str, list[ScoredModel]]) -> dict[str, list[str]]:
    """The corpora whose prompts the models answered, by evaluation."""
    return {
        name: unique(corpus for scored in models for corpus in scored.result.spec.get("conversations", ()))
        for name, models in evaluations.items()
    }


def tables(evaluation: str, corpus: str, models: list[ScoredModel]) -> list[Table]:
    """Columns and rows of each of `pages.JUDGING`, sorted by id."""
    labels = [scored.model for scored in models]
    columns = [f"response_{number}" for number in range(1, len(labels) + 1)]
    texts: dict[str, dict[str, str]] = {}
    about: dict[str, dict[str, str]] = {}
    for scored in models:
        for row in scored.responses:
            if row["corpus"] == corpus:
                prompt = {"prompt": clean(row["prompt"]), "expected": clean(row["answer"] or "")}
                about[row["id"]] = {"id": clean(row["id"])} | prompt
                texts.setdefault(row["id"], dict.fromkeys(labels, ""))[scored.model] = clean(row["response"])
    open_rows, blind_rows, key_rows = [], [], []
    for id in sorted(about):
        # Ids may hold lone surrogates.
        names = {label: "\0".join((evaluation, corpus, id, label)).encode("utf-8", "surrogatepass") for label in labels}
        digests = {label: hashlib.sha256(name).digest() for label, name in names.items()}
        shuffled = sorted(labels, key=digests.get)
        open_rows.append(about[id] | texts[id])
        blind_rows.append(about[id] | {column: texts[id][label] for column, label in zip(columns, shuffled)})
        key_rows.append({"id": about[id]["id"]} | dict(zip(columns, shuffled)))
    head = ["id", "prompt", "expected"]
    return [
        ([*head, *labels, *TO_FILL_IN], open_rows),
        ([*head, *columns, *TO_FILL_IN], blind_rows),
        (["id", *columns], key_rows),
    ]


def csv_text(table: Table) -> str:
    columns, rows = table
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


def score_rows(results: ResultSet) -> Table:
    """Columns and rows of evaluation.csv: a measure per row, a model per column, unrounded."""
    rows = [
        {"evaluation": evaluation, "on": measure.on, "measure": measure.name, "unit": measure.unit} | measure.values
        for evaluation, models in results.evaluations.items()
        for measure in measures(models)
    ]
    return ["evaluation", "on", "measure", "unit", *unique(scored.model for scored in results.scored)], rows


def variant_rows(variants: Variants) -> Table:
    """Columns and rows of variants.csv: a run per row, unrounded, in the order of the table."""
    named = {f"{column.on}: {column.name}": column for column in variants.columns}
    rows = []
    for label in variants.labels:
        stopped = variants.stopped.get(label)
        rows.append(
            {"variant": label, "best": "yes" if label == variants.best else ""}
            | {key: values[label] for key, values in variants.keys.items()}
            | {heading: column.values[label] for heading, column in named.items()}
            | {"warnings": ", ".join(warning.kind for warning in variants.warnings.get(label, []))}
            | {"stopped at step": stopped and stopped.step, "because": stopped and stopped.reason}
        )
    return ["variant", "best", *variants.keys, *named, "warnings", "stopped at step", "because"], rows
