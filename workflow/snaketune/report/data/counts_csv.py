"""The rows of `data.csv`: every count of the data pipeline, one per line."""

from collections.abc import Iterator, Mapping
from typing import Any

from snaketune.report.data.corpus_flow import CorpusFlow, RowCounts, corpus_flows
from snaketune.report.data.packing_flow import SplitFlow, pack_flows, training_flows
from snaketune.report.data.results import ResultSet
from snaketune.report.data.tokenized import tokenized_corpora

COLUMNS = ["stage", "name", "source", "split", "what", "reason", "rows", "tokens", "supervised_tokens"]
Row = dict[str, Any]


def count_rows(results: ResultSet) -> tuple[list[str], list[Row]]:
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
