"""Rules that find problems in trainings, also those that preflight found, and runs on hosts that are slower than others.

A rule fires when a number is outside of what healthy runs show with any model and data; the reason for each threshold is given
beside it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from snaketune.publishing.results import Result, is_number
from snaketune.report.compare.variants import stopped_early, warnings_of
from snaketune.report.data.packing_flow import epochs
from snaketune.report.data.results import ResultSet, is_gpu, logged_numbers
from snaketune.report.judge.findings import NOTES, WARNS, ReportFinding
from snaketune.text import clean, clip, decimal, duration, percent, short, whole

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
# Fewer logged steps than this don't separate a trend from noise.
MIN_LOGGED = 10
# A loss that falls by a smaller share than this shows no learning.
MIN_LOSS_CHANGE = 0.01
# Nats per chosen token: the threshold of `engine.preference_monitor` for a collapse.
CHOSEN_FELL = 0.1
# Ratio of held-out loss to the training loss of the last steps that indicates overfitting after more than one epoch.
OVERFIT = 1.5
# Dense models of useful size reach 0.3 to 0.5 on GPUs, and on a CPU 0.2 to 0.8 of a measured matrix multiplication; if
# that is in bfloat16, 0.05 to 0.5, since everything else isn't faster.
LOW_MFU, LOW_MFU_CPU = 0.15, 0.05
WAITED = 0.05
SLOWER = 10.0
# By kind of warning: the action, and the key.
REMEDIES = {
    "collapse": ("add an SFT term on the chosen completions, {sigmoid: 1.0, sft: 0.2}, or raise beta", "loss"),
    "only rejected": ("add an SFT term on the chosen completions, {sigmoid: 1.0, sft: 0.2}", "loss"),
    "length": (
        "lower it (to 0.5, say), so that tokens beyond the shorter length weigh less, or use a length-normalized loss (simpo)",
        "ld_alpha",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """One SFT or DPO run.

    Attributes:
        epochs: Epochs that ran; None if unknown.
        loss, chosen: Means over the first and the last tenth of the log, of the loss and of the log-probability per token of
            chosen completions; None if fewer than MIN_LOGGED steps were logged.
        held_out: By corpus, held-out loss before and after; only for SFT runs whose initial model was evaluated too.
    """

    run: Result
    epochs: float | None
    loss: tuple[float, float] | None
    chosen: tuple[float, float] | None
    held_out: dict[str, tuple[float, float]]


def trainings(results: ResultSet) -> list[TrainingFacts]:
    return [
        TrainingFacts(
            run=run,
            epochs=epochs(run),
            loss=_first_and_last(logged_numbers(run, "loss")),
            chosen=_first_and_last(logged_numbers(run, "chosen_logp_per_token")),
            held_out=_held_out(results, run) if run.stage == "sft" else {},
        )
        for run in results.of("sft", "dpo")
    ]


def _first_and_last(values: list[float]) -> tuple[float, float] | None:
    """Means of the first and the last tenth of the logged values; None for fewer than MIN_LOGGED values."""
    tenth = len(values) // 10
    return (sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth) if len(values) >= MIN_LOGGED else None


def _held_out(results: ResultSet, run: Result) -> dict[str, tuple[float, float]]:
    """Held-out loss before and after by corpus, from the first evaluation of both models."""
    initial = results.first(run, "model")
    before = initial.label if initial else f"base:{run.name}"
    held_out: dict[str, tuple[float, float]] = {}
    for models in results.evaluations.values():
        by_label = {scored.model: scored.scores.get("conversations") or {} for scored in models}
        was, now = by_label.get(before, {}), by_label.get(run.label, {})
        for corpus in was.keys() & now.keys():
            losses = was[corpus].get("held_out_loss"), now[corpus].get("held_out_loss")
            if None not in losses:
                held_out.setdefault(corpus, losses)
    return dict(sorted(held_out.items()))


def training_findings(facts: TrainingFacts) -> Iterator[ReportFinding]:
    def finding(kind: str, message: str, action: str, key: str, gain: float = 1.0) -> ReportFinding:
        about = {"where": facts.run.label, "key": key and f"{facts.run.key}.{key}"}
        return ReportFinding(kind=kind, message=message, action=action, gain=gain, **about)

    run, stopped, warnings = facts.run.run, stopped_early(facts.run), warnings_of(facts.run)
    if stopped:
        message = f"stopped by stop_if at step {whole(stopped.step)}: {stopped.reason}"
        yield finding("stopped early", message, "halve it", "training.learning_rate")
    if lasting := [warning for warning in warnings if warning.at_end is not None]:
        more = f" (and {len(lasting) - 1} more, below)" if len(lasting) > 1 else ""
        remedy = REMEDIES.get(lasting[0].kind, ("", ""))
        yield finding(f"training warning: {lasting[0].kind}", f"{lasting[0].at_end}{more}", *remedy)
    if facts.loss and not stopped:
        first, last = facts.loss
        least = MIN_LOSS_CHANGE * abs(first)
        change = f"{decimal(first)} → {decimal(last)}"
        if last - first > least:
            message = f"the training loss rose: {change}"
            yield finding("loss not falling", message, "divide it by three", "training.learning_rate")
        elif first - last < least:
            message, action = f"the training loss did not fall: {change}", "multiply it by three, or train more epochs"
            yield finding("loss not falling", message, action, "training.learning_rate")
    # Other runs have warnings of their own; those of TRL's trainers have none.
    if facts.chosen and not warnings and facts.chosen[0] - facts.chosen[1] >= CHOSEN_FELL:
        change = f"{decimal(facts.chosen[0])} → {decimal(facts.chosen[1])}"
        message = f"log-probability of chosen completions fell: {change} nats per token"
        lost = 1 - math.exp(facts.chosen[1] - facts.chosen[0])
        yield finding("chosen falling", message, REMEDIES["collapse"][0], "loss", gain=lost)
    if found := _overfitting(facts):
        kind, message, action, gain = found
        yield finding(kind, message, action, "training.epochs", gain)
    mfu, gpu = run.get("mfu_median"), is_gpu(run)
    low = LOW_MFU if gpu else LOW_MFU_CPU
    if mfu is not None and mfu < low:
        usual = "30 to 50%" if gpu else "5 to 80%"
        message = f"MFU is {percent(mfu)}; {usual} is usual for a model that keeps the device busy"
        action, key = "remove it, so that the fastest size is measured", "training.micro_batch_rows"
        # A calibration measured the sizes of this run on its device, though a configured one may differ from its best.
        if run.get("calibration"):
            action, key = "use more rows per step, which allows larger micro-batches", "training.batch_rows"
        yield finding("low MFU", message, action, key, gain=1 - mfu / low)
    # Of a configured batch plan, relative to the best that was measured.
    slower = run.get("slower_than_best_percent")
    if slower is not None and slower >= SLOWER:
        message = f"the configured micro-batch is {slower:.0f}% slower than the best that was measured"
        yield finding(
            "slow micro-batch", message, "remove it", "training.micro_batch_rows", gain=slower / (100 + slower)
        )
    # Both in seconds, of the last attempt.
    waited, took = run.get("waited_for_data_s"), (run.get("attempts") or [run.get("seconds")])[-1]
    if waited and took and waited >= WAITED * took:
        message = f"waited {duration(waited)} for data, {percent(waited / took)} of its time"
        yield finding("waited for data", message, "set it to true", "operation.load_in_memory", gain=waited / took)


def _overfitting(facts: TrainingFacts) -> tuple[str, str, str, float] | None:
    """Kind, message, action and gain if held-out loss rose while the training loss fell, or is far above it after an epoch."""
    if not facts.loss or not facts.held_out:
        return None
    for corpus, (before, after) in facts.held_out.items():
        if facts.loss[1] < facts.loss[0] and after > before * (1 + MIN_LOSS_CHANGE):
            message = (
                f"the training loss fell, but held-out loss of {corpus} rose: {decimal(before)} → {decimal(after)}; "
                "overfitting, or the held-out rows differ from the training rows"
            )
            return "held-out loss rising", message, "train fewer epochs, or lower the learning rate", 1 - before / after
    corpus, (_, lowest) = min(facts.held_out.items(), key=lambda entry: entry[1][1])
    if facts.epochs is None or facts.epochs <= 1 or lowest <= OVERFIT * max(facts.loss[1], 0.01):
        return None
    message = (
        f"overfitting after {decimal(facts.epochs)} epochs: held-out loss of {corpus} is {decimal(lowest)}, training loss of "
        f"the last steps {decimal(facts.loss[1])}"
    )
    return "overfitting", message, "train fewer epochs, or on more rows", 1 - facts.loss[1] / lowest


def preflight_findings(results: ResultSet) -> list[ReportFinding]:
    """The findings of preflight, which the run.json of each training repeats; empty without preflight."""
    entries = (result.run.get("preflight") or [] for result in results.trainings)
    # Runs that preflight checked together have the same findings.
    return list(dict.fromkeys(finding for listed in entries for finding in parse_findings(listed)))


def parse_findings(entries: list[dict[str, Any]]) -> list[ReportFinding]:
    """The findings among preflight's entries, without passed checks.

    >>> entry = {"severity": "warns", "where": "sft.a", "key": "sft.a.seed", "found": "twice", "do": "another"}
    >>> findings = parse_findings([entry, entry | {"severity": "fine"}])
    >>> [(finding.where, finding.message, finding.action, finding.key) for finding in findings]
    [('sft.a', 'twice', 'another', 'sft.a.seed')]
    """
    return [
        ReportFinding(
            kind=f"preflight: {clip(entry['found'], 200)}",
            where=clip(entry["where"], 200),
            message=clip(entry["found"]),
            action=clip(entry.get("do") or ""),
            key=clip(entry.get("key") or "", 200),
            severity=SEVERITIES[entry["severity"]],
        )
        for entry in entries
        if entry["severity"] in SEVERITIES
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
        ReportFinding(kind="slow node", where=label, message=text, gain=lost)
        for model, probed in by_model.items()
        for key in PROBED
        for label, text, lost in _slow(model, key, probed)
    ]


def _slow(model: str, key: str, probed: list[tuple[str, str, Mapping[str, Any]]]) -> Iterator[tuple[str, str, float]]:
    """Label and message of the runs whose host is slow by one probe, and the share by which it is."""
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
            text = (
                f"ran on a slow node: {what} at {short(value)}{unit}, {percent(1 - value / middle)} below the median "
                f"of {len(by_host) - 1} other hosts with {model}, {short(middle)}{unit}"
            )
            yield label, text, 1 - value / middle
