"""Rules that find problems in data and evaluations. The reason for each threshold is given beside it."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from snaketune.engine.packing.truncation import is_worth_a_warning
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import CorpusFlow
from snaketune.report.data.packing_flow import PackFlow
from snaketune.report.data.results import ResultSet, unique
from snaketune.report.judge.findings import NOTES, ReportFinding
from snaketune.report.judge.verdict import INCONCLUSIVE, WORSE, Difference, Verdict
from snaketune.text import decimal, percent, whole, words

SUPERVISED = 0.02
QUARANTINED = 0.005
REPEATED = 0.05
TRUNCATED = 0.1
# The best of this many equally good runs leads by about one standard error.
MANY_RUNS = 5
# The difference of shares that an evaluation should be able to detect.
RESOLUTION = 0.1


def users_of_packs(results: ResultSet) -> dict[str, str]:
    """The config key of the first `packing` that uses each pack, by `pack/NAME`."""
    users: dict[str, str] = {}
    for stage, role in (("sft", "pack"), ("dpo", "pack"), ("eval", "packs")):
        for result in results.of(stage):
            for pack in result.job.made_from.get(role, ()):
                users.setdefault(pack, f"{result.key}.packing")
    return users


def pack_findings(flow: PackFlow, key: str) -> Iterator[ReportFinding]:
    """The findings about the train and the held-out rows of a pack. `key`: of its `packing`, in the first run that uses it."""
    for split in flow.splits:
        rows, counts, lost = words(split.split), split.counts, split.metadata.get("lost_to_length")
        if lost and is_worth_a_warning(lost["rows"], lost["tokens"], counts["read"], counts["read_tokens"]):
            share = lost["tokens"] / counts["read_tokens"]
            message = (
                f"{rows}: {percent(lost['rows'] / counts['read'])} of the {flow.unit} and {percent(share)} of the tokens "
                f"don't fit into rows of {whole(flow.length)} tokens"
            )
            action = f"set it to {lost['enough']}, which keeps 99% of the tokens"
            about = {"kind": "tokens lost", "where": flow.name, "key": key and f"{key}.length"}
            yield ReportFinding(message=message, action=action, gain=share, **about)
        if counts["tokens"] and counts["supervised_tokens"] < SUPERVISED * counts["tokens"]:
            share = counts["supervised_tokens"] / counts["tokens"]
            message = (
                f"{rows}: only {percent(share, 2)} of the tokens are supervised, so most of the work is for nothing"
            )
            action = "see supervised text in packing.html; set it to `all`, or use a chat template that marks assistant turns"
            about = {"kind": "little supervised", "where": flow.name, "key": key and f"{key}.train_on"}
            yield ReportFinding(message=message, action=action, gain=1 - share, **about)


def corpus_findings(flow: CorpusFlow) -> Iterator[ReportFinding]:
    bad, read = sum(flow.quarantined.values()), flow.counts["read"]
    if read and bad >= QUARANTINED * read:
        reasons = ", ".join(f"{whole(n)} {words(reason)}" for reason, n in list(flow.quarantined.items())[:3])
        message = f"{whole(bad)} of {whole(read)} rows ({percent(bad / read)}) are quarantined: {reasons}"
        action = "fix the files, map their columns (fields), or enable repairs; corpus.html has examples"
        key = f"corpora.{flow.name}.repair"
        yield ReportFinding(
            kind="quarantined", where=flow.name, message=message, action=action, key=key, gain=bad / read
        )


def prompt_findings(results: ResultSet, lineage: list[str]) -> Iterator[ReportFinding]:
    """The findings about the prompts of every evaluation, and the responses of the last evaluated model of the lineage."""
    for evaluation, models in results.evaluations.items():
        by_label = {scored.model: scored for scored in models}
        if last := next((by_label[label] for label in reversed(lineage) if label in by_label), None):
            most = (last.result.spec.get("generation") or {}).get("max_new_tokens")
            for corpus in unique(row["corpus"] for row in last.responses):
                rows = [row for row in last.responses if row["corpus"] == corpus]
                yield from _prompt_findings(evaluation, corpus, last.model, rows, most)


def _prompt_findings(
    evaluation: str, corpus: str, model: str, rows: list[dict[str, Any]], most: int | None
) -> Iterator[ReportFinding]:
    """The findings about one corpus. Args: rows: responses; most: `max_new_tokens`."""
    prompts = [row["prompt"] for row in rows if row["correct"] is not None]
    again = len(prompts) - len(set(prompts))
    if prompts and again >= REPEATED * len(prompts):
        yield ReportFinding(
            kind="repeated prompts",
            where=evaluation,
            message=f"{whole(again)} of {whole(len(prompts))} held-out prompts of {corpus} are duplicates, so "
            "intervals are too narrow",
            action="drop near duplicates",
            gain=again / len(prompts),
            key=f"corpora.{corpus}.near_duplicates",
        )
    truncated = sum(row["tokens"] >= most for row in rows) if most else 0
    if truncated and truncated >= TRUNCATED * len(rows):
        share = percent(truncated / len(rows))
        yield ReportFinding(
            kind="truncated responses",
            where=evaluation,
            message=f"{share} of the responses of {model} to {corpus} were truncated at {whole(most)} tokens",
            action=f"set it to {2 * most} if responses may be longer; else the model didn't learn to stop",
            key=f"eval.{evaluation}.generation.max_new_tokens",
            gain=truncated / len(rows),
        )


def difference_findings(difference: Difference, verdict: Verdict) -> Iterator[ReportFinding]:
    if difference.outcome == WORSE:
        yield ReportFinding(
            kind=f"worse: {verdict.against}, {difference.name}",
            where=verdict.model,
            message=f"worse than {verdict.against}: {difference.name} {difference.text} ({difference.interval_text})",
            action="lower it, or train fewer epochs",
            key=verdict.key and f"{verdict.key}.training.learning_rate",
            gain=_share(difference.after, difference.before),
        )
    if difference.outcome != INCONCLUSIVE or difference.measure.unit != "share":
        return
    low, high = difference.interval
    half = (high - low) / 2
    # On so few rows, a difference of RESOLUTION would be inconclusive too.
    if half > RESOLUTION:
        # The width of an interval is proportional to one over the square root of the rows.
        needed = round((half / RESOLUTION) ** 2, 1)
        yield ReportFinding(
            kind="too few rows",
            where=difference.evaluation,
            message=f"{difference.name} is inconclusive for {verdict.model} against {verdict.against}: with "
            f"{whole(difference.rows)} rows, only differences above {100 * half:.0f} points are significant",
            action=f"hold out about {decimal(needed)} times as many rows to detect {100 * RESOLUTION:.0f} points",
            key=f"corpora.{difference.measure.path.split('.')[1]}.held_out",
            severity=NOTES,
            gain=half,
        )


def sweep_findings(results: ResultSet, variants: Variants) -> Iterator[ReportFinding]:
    """The findings about the choice of the best run, which is selected on the same rows that its verdict uses."""
    best = next((run for run in results.of("dpo") if run.label == variants.best), None)
    if best is None:
        return
    scores = variants.sorted_by.values
    candidates = sum(value is not None for value in scores.values())
    if candidates >= MANY_RUNS:
        message = (
            f"selected as the best of {candidates} runs on the rows of its verdict, which is therefore biased upwards"
        )
        action = "evaluate the first few runs on rows that weren't used to select them"
        about = {"kind": "best of many runs", "where": best.label, "key": "eval", "severity": NOTES}
        others = median(value for value in scores.values() if value is not None)
        yield ReportFinding(message=message, action=action, gain=_share(scores[best.label], others), **about)
    for name, values in swept_values(variants).items():
        value = values[best.label]
        for edge, which, way, further in (
            (min(values.values()), "lowest", "downwards", value / 2),
            (max(values.values()), "highest", "upwards", value * 2),
        ):
            if value == edge:
                message = f"the best run, {best.label}, has the {which} {name} that was tried, {value:g}"
                action = f"extend it {way}: {name} {further:g}"
                about = {"kind": f"edge of {name}", "where": best.key, "key": f"{best.key}.grid", "severity": NOTES}
                # What the last step towards the edge won.
                inner = next((label for label in variants.labels if values[label] != edge), best.label)
                yield ReportFinding(
                    message=message, action=action, gain=_share(scores[best.label], scores[inner]), **about
                )


def _share(value: float, other: float | None) -> float:
    """The difference of two scores as a share of the larger; 0 if one is unknown.

    >>> _share(0.9, 0.6), _share(0.0, 0.0), _share(2.0, None)
    (0.33333333333333337, 0.0, 0.0)
    """
    return abs(value - other) / max(abs(value), abs(other), 1e-12) if other is not None else 0.0


def swept_values(variants: Variants) -> dict[str, dict[str, float]]:
    """The keys with three or more distinct numbers among the DPO runs: name → label → value."""
    swept = {}
    for name, texts in variants.keys.items():
        try:
            values = {label: float(text) for label, text in texts.items()}
        except ValueError:
            continue
        if len(set(values.values())) > 2:
            swept[name] = values
    return swept
