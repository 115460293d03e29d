"""All findings of a report: of the rules, of preflight, and runs on hosts that are slower than others with the same device."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.publishing.results import is_number
from snaketune.report.compare.variants import Variants
from snaketune.report.data.corpus_flow import corpus_flows
from snaketune.report.data.packing_flow import pack_flows
from snaketune.report.data.results import ResultSet, is_gpu
from snaketune.report.judge import data_rules
from snaketune.report.judge.findings import NOTES, WARNS, ReportFinding, in_order
from snaketune.report.judge.training_rules import training_findings, trainings
from snaketune.report.judge.verdict import Verdict
from snaketune.report.text import clean, clip, percent, short

# Of the findings of preflight. One that stops a run is a warning here, since the run was started anyway.
SEVERITIES = {"stops": WARNS, "warns": WARNS, "notes": NOTES}
# With three hosts, the median is sound even if one of them is slow.
MIN_HOSTS = 3
# What a run measures at its start, and the share below the median of the others from which a host is slow. Repeated probes of
# one host vary by 1 to 2 %; a single read of a file that was just written is a noisy measurement.
PROBED = {
    "matmul_flops_per_second": ("matrix multiplication", "FLOP/s", 0.05),
    "copy_bytes_per_second": ("memory copy", "B/s", 0.05),
    "disk_bytes_per_second": ("disk read", "B/s", 0.5),
}


def collect_findings(
    results: ResultSet,
    lineage: list[str],
    verdicts: Sequence[Verdict],
    variants: Variants,
    others: Sequence[tuple[str, dict[str, Any]]] = (),
) -> list[ReportFinding]:
    """All findings, in their order on the page.

    Args:
        lineage: The models of the verdicts.
        others: Label and run.json of earlier runs, whose hosts are compared with ours.
    """
    findings = [*preflight_findings(results), *data_rules.sweep_findings(results, variants)]
    findings += slow_nodes([*((run.label, run.run) for run in results.of("sft", "dpo")), *others])
    for verdict in verdicts:
        for one in verdict.differences:
            findings += data_rules.difference_findings(one, verdict)
    for run in trainings(results):
        findings += training_findings(run)
    users = data_rules.users_of_packs(results)
    for flow in pack_flows(results):
        for split in flow.splits:
            findings += data_rules.pack_findings(flow, split, users.get(f"pack/{flow.name}", ""))
    for flow in corpus_flows(results):
        findings += data_rules.corpus_findings(flow)
    findings += data_rules.prompt_findings(results, lineage)
    return in_order(findings)


def preflight_findings(results: ResultSet) -> list[ReportFinding]:
    """The findings of preflight, which the run.json of each training repeats; empty without preflight.

    Raises:
        SnaketuneError: An entry has another form.
    """
    findings: list[ReportFinding] = []
    for result in results.of("sft", "dpo"):
        try:
            findings += parse_findings(result.run.get("preflight") or [])
        except (LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(
                f"results/{result.stage}/{result.name}/run.json: the entry `preflight` isn't in the form that preflight writes "
                f"({error!r}); remove the file's folder and run again"
            ) from None
    # Runs that preflight checked together have the same findings.
    return list(dict.fromkeys(findings))


def parse_findings(entries: list[dict[str, Any]]) -> list[ReportFinding]:
    """The findings among preflight's entries, without passed checks.

    >>> one = {"severity": "warns", "where": "sft.a", "key": "sft.a.seed", "found": "twice", "do": "another"}
    >>> [(one.where, one.message, one.action, one.key) for one in parse_findings([one, one | {"severity": "fine"}])]
    [('sft.a', 'twice', 'another', 'sft.a.seed')]
    """
    return [
        ReportFinding(
            kind=f"preflight: {clip(one['found'], 200)}",
            where=clip(one["where"], 200),
            message=clip(one["found"]),
            action=clip(one.get("do") or ""),
            key=clip(one.get("key") or "", 200),
            severity=SEVERITIES[one["severity"]],
        )
        for one in entries
        if one["severity"] in SEVERITIES
    ]


def slow_nodes(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[ReportFinding]:
    """The findings about runs on slow hosts.

    A run is compared with the other hosts that have the same GPU model (on CPU: processor model), if there are at least
    MIN_HOSTS. Each host counts once, by the median of its runs, and isn't compared with itself: runs on one host differ only by
    what else ran there.

    Args:
        runs: Label and run.json of each run. Runs without `probe`, host or device model are skipped.
    """
    by_model: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for label, run in runs:
        model, host = clean(run.get("device" if is_gpu(run) else "processor") or ""), run.get("host")
        if model and host and isinstance(run.get("probe"), Mapping):
            by_model.setdefault(model, []).append((label, str(host), run["probe"]))
    return [
        ReportFinding(kind="slow node", where=label, message=text)
        for model, probed in by_model.items()
        for key in PROBED
        for label, text in _slow(model, key, probed)
    ]


def _slow(model: str, key: str, probed: list[tuple[str, str, Mapping[str, Any]]]) -> Iterable[tuple[str, str]]:
    """Label and message of the runs whose host is slow by one probe."""
    what, unit, slower = PROBED[key]
    known = [(label, host, float(probe[key])) for label, host, probe in probed if is_number(probe.get(key))]
    by_host: dict[str, list[float]] = {}
    for _, host, value in known:
        by_host.setdefault(host, []).append(value)
    if len(by_host) <= MIN_HOSTS:
        return
    for label, host, value in known:
        middle = median(median(values) for other, values in by_host.items() if other != host)
        if value < (1 - slower) * middle:
            yield (
                label,
                (
                    f"ran on a slow node: {what} at {short(value)}{unit}, {percent(1 - value / middle)} below the median "
                    f"of {len(by_host) - 1} other hosts with {model}, {short(middle)}{unit}"
                ),
            )
