"""Write `data.csv`: every count of the data pipeline, one per line."""

from typing import Any

from snaketune.report.data.corpus_flow import RowCounts, corpus_flows
from snaketune.report.data.packing_flow import pack_flows, tokenized_corpora, training_flows
from snaketune.report.data.results import ResultSet

COLUMNS = ("stage", "name", "source", "split", "what", "reason", "rows", "tokens", "supervised_tokens")
INFLOWS = ("read", "extra", "repeated")


def csv_rows(results: ResultSet) -> list[dict[str, Any]]:
    """All rows of data.csv. A cell is empty where nothing is counted."""
    return [*_corpus_rows(results), *_token_rows(results), *_pack_rows(results), *_training_rows(results)]


def _corpus_rows(results: ResultSet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for flow in corpus_flows(results):
        name = {"stage": "corpus", "name": flow.name}
        rows += [name | row for row in _row_counts(flow.rows, flow.quarantined)]
        rows += [name | {"what": "kept", "split": split, "rows": n} for split, n in flow.kept.items()]
        for source in flow.sources:
            of = name | {"source": source.name}
            rows += [of | row for row in _row_counts(source.rows, None)]
            rows.append(of | {"what": "kept", "rows": source.rows.kept})
            rows += [of | {"what": "layout", "reason": layout, "rows": n} for layout, n in source.layouts.items()]
            rows += [of | {"what": "ignored", "reason": column, "rows": n} for column, n in source.ignored.items()]
        changes = {"noted": flow.notes, "repaired": flow.repairs, "cleaned": flow.cleaned, "masked": flow.masked}
        for what, counts in changes.items():
            rows += [name | {"what": what, "reason": reason, "rows": n} for reason, n in counts.items()]
        if near := flow.near_duplicates:
            rows += [name | {"what": f"near duplicates: {key}", "rows": near[key]} for key in ("groups", "largest")]
        hits = (flow.contamination or {}).get("hits") or {}
        rows += [name | {"what": "rows that hit", "reason": evaluated, "rows": n} for evaluated, n in hits.items()]
    return rows


def _row_counts(counts: RowCounts, quarantined: dict[str, int] | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"what": what, "rows": getattr(counts, what)} for what in (*INFLOWS, "joined")]
    if quarantined is None:
        rows.append({"what": "quarantined", "rows": counts.quarantined})
    else:
        rows += [{"what": "quarantined", "reason": reason, "rows": n} for reason, n in quarantined.items()]
    return rows + [{"what": "dropped", "reason": reason, "rows": n} for reason, n in counts.dropped.items()]


def _token_rows(results: ResultSet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for flow, _ in tokenized_corpora(results):
        for split, counts in flow.counts.items():
            of = {"stage": "tokenize", "name": flow.name, "split": split}
            sizes = {column: counts[column] for column in ("rows", "tokens", "supervised_tokens")}
            rows.append(of | {"what": "tokenized"} | sizes)
            rows += [of | {"what": what, "rows": counts[what]} for what in ("control_text", "nothing_supervised")]
    return rows


def _pack_rows(results: ResultSet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for flow in pack_flows(results):
        for split in flow.splits:
            of = {"stage": "pack", "name": flow.name, "split": split.split}
            counts = [{"what": "read", "rows": split.read, "tokens": split.read_tokens}]
            for reason in split.reasons:
                dropped = {"rows": split.dropped.get(reason, 0), "tokens": split.dropped_tokens.get(reason, 0)}
                counts.append({"what": "dropped", "reason": reason} | dropped)
            counts += [
                {"what": "truncated"} | split.truncated,
                *({"what": f"shared {what}", "tokens": tokens} for what, tokens in split.shared.items()),
                {"what": "mismatched", "tokens": split.mismatched},
                {"what": "split", "rows": split.split_up["rows"]},
                {"what": "documents", "rows": split.documents},
                {"what": "kept", "rows": split.kept, "tokens": split.tokens, "supervised_tokens": split.supervised},
            ]
            if split.rows is not None:
                counts.append({"what": "packed rows with padding", "rows": split.rows, "tokens": split.capacity})
            rows += [of | row for row in counts]
        for length, n in flow.lengths.items():
            what = {"what": "packed rows of a length", "reason": length, "rows": n}
            rows.append({"stage": "pack", "name": flow.name, "split": "train"} | what)
    return rows


def _training_rows(results: ResultSet) -> list[dict[str, Any]]:
    rows = []
    for flow in training_flows(results):
        stage, _, name = flow.label.partition(":")
        sizes = {"rows": flow.rows, "tokens": flow.tokens_per_epoch}
        rows.append({"stage": stage, "name": name, "split": "train", "what": "trained per epoch"} | sizes)
    return rows
