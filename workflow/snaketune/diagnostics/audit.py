"""The `audit` stage: for each switch of a run, what changing it would bring here; and what holds the run back.

Measured are the run as it is (two of its steps taken apart by torch.profiler), its curve of micro-batches, and a trial of each
setting that is slow on most machines. What isn't measured is counted from the rows or estimated, and says so.

    audit.json: key, holds_back, findings, switches (switch, set_to, brings_percent, how, do), parts
    audit.md    the same as a table, what brings most first
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.diagnostics.files import MEASURED
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import AuditSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.found import FINDINGS
from snaketune.training.portions import CURVE

How = Literal["measured", "counted", "estimated", "not known here"]
# What brings less is noise.
WORTH = 5.0
# Of the peak: an engine that reaches it is held back by arithmetic.
WELL_USED = 0.4


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One setting.

    Attributes:
        brings_percent: by how much more tokens that count a second would be learned from after `do`; 0 where it is right,
            None where nobody knows.
        holds_back: how it is called where it holds the run back most.
    """

    switch: str
    set_to: str
    brings_percent: float | None
    how: How
    do: str = ""
    holds_back: str = ""


def build(
    spec: AuditSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    preflight: Artifact,
    calibrate: Artifact,
    trials: list[Artifact],
) -> Outcome:
    """Fill `work.payload` with `audit.json` and `audit.md`.

    Args:
        trials: in the order of the spec's variants.
    """
    findings = json.loads(preflight.file(FINDINGS).read_text(encoding="utf-8"))["findings"]
    curve = json.loads(calibrate.file(CURVE).read_text(encoding="utf-8"))
    measured = dict(
        zip(
            (one.name for one in spec.variants),
            (json.loads(one.file(MEASURED).read_text(encoding="utf-8")) for one in trials),
            strict=True,
        )
    )
    found = audit(spec, pack.manifest, findings, curve, measured)
    write_json(work.payload / "audit.json", found)
    told = as_markdown(found)
    (work.payload / "audit.md").write_text(told, encoding="utf-8")
    print(told, flush=True)
    return Outcome(counts={"switches": len(found["switches"]), "findings": len(found["findings"])})


def audit(
    spec: AuditSpec,
    pack: dict[str, Any],
    findings: list[dict[str, str]],
    curve: dict[str, Any],
    measured: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """What is found of a run.

    Args:
        pack: manifest of its rows.
        findings: of preflight.
        curve: of the calibration.
        measured: by variant, the baseline first, what its trial measured.
    """
    baseline = next(iter(measured.values()))
    if not baseline["fits"]:
        return {
            "key": spec.key,
            "holds_back": f"memory: {baseline['why']}",
            "findings": findings,
            "switches": [],
            "parts": {},
        }
    switches = [
        *_packing(spec, pack, baseline, measured),
        _micro_batch(spec, curve, baseline),
        _checkpointing(baseline, measured),
        _precision(spec, measured),
        _optimizer(spec, baseline, measured),
        _loader(baseline),
        _head(baseline),
        _kernels(baseline),
        _compile(baseline),
        *_reference(spec),
    ]
    switches.sort(key=lambda one: -(one.brings_percent or 0.0))
    of_the_run = [one for one in findings if one["key"].startswith((spec.key, "corpora", "results", "flash"))]
    return {
        "key": spec.key,
        "holds_back": _holds_back(of_the_run, switches, baseline),
        "findings": of_the_run,
        "switches": [asdict(one) for one in switches],
        "parts": baseline["parts"],
        "mfu": baseline["mfu"],
        "tokens_per_second": baseline["tokens_per_second"],
        "device": baseline["device"],
    }


def _gain(measured: dict[str, dict[str, Any]], variant: str) -> tuple[float | None, str]:
    """Percent that a trial's variant is faster, and why there is no figure."""
    first, one = next(iter(measured.values())), measured[variant]
    if not one["fits"]:
        return 0.0, "doesn't fit"
    return round(100 * (one["tokens_per_second"] / first["tokens_per_second"] - 1), 1), ""


def _packing(
    spec: AuditSpec, pack: dict[str, Any], baseline: dict[str, Any], measured: dict[str, dict[str, Any]]
) -> list[Switch]:
    if "packed" in measured:
        gain, _ = _gain(measured, "packed")
        return [
            Switch(
                switch="packing",
                set_to="off",
                brings_percent=gain,
                how="measured",
                do=f"{spec.key}.packing.strategy: best-fit-decreasing",
                holds_back="padding: each row of a batch is as long as its longest",
            )
        ]
    metadata, counts = pack["packing_metadata"], pack["counts"]["train"]
    full = metadata["packing_efficiency"] / 100
    alone = counts["tokens"] / max(1, counts["pieces"] * pack["row_length"])
    found = [
        Switch(
            switch="packing",
            set_to=f"on, {full:.1%} of the rows' places hold tokens (one document a row: {alone:.1%})",
            brings_percent=round(100 * (1 / full - 1), 1),
            how="counted",
            do=f"{spec.key}.packing.length: longer rows leave less over" if full < 1 / (1 + WORTH / 100) else "",
            holds_back="padding: rows that documents don't fill",
        )
    ]
    lost, read = metadata.get("lost_to_length", {}).get("tokens", 0), counts.get("read_tokens", 0)
    found.append(
        Switch(
            switch="row length",
            set_to=f"{pack['row_length']} tokens; {lost / max(1, read):.1%} of all tokens are lost to it",
            brings_percent=round(100 * (read / max(1, read - lost) - 1), 1),
            how="counted",
            do=f"{spec.key}.packing.length: {metadata['lost_to_length'].get('enough') or 'longer'}" if lost else "",
            holds_back="dropped tokens: rows too short for what is to be learned",
        )
    )
    return found


def _micro_batch(spec: AuditSpec, curve: dict[str, Any], baseline: dict[str, Any]) -> Switch:
    now = next(
        (
            one
            for one in curve["trials"]
            if one["fits"]
            and one["micro_batch_rows"] == baseline["micro_batch_rows"]
            and one["gradient_checkpointing"] == bool(baseline["gradient_checkpointing"])
        ),
        None,
    )
    best = curve["best"]
    gain = 100 * (best["tokens_per_second"] / now["tokens_per_second"] - 1) if now else None
    return Switch(
        switch="micro-batch",
        set_to=f"{baseline['micro_batch_rows']} rows x {baseline['accumulation']} ({spec.training.batch_rows} a step)",
        brings_percent=gain if gain is None else round(max(0.0, gain), 1),
        how="measured" if now else "not known here",
        do=f"{spec.key}.training.micro_batch_rows: auto, or {best['micro_batch_rows']}"
        if gain and gain > WORTH
        else "",
        holds_back="the micro-batch: too few rows at once for the device",
    )


def _checkpointing(baseline: dict[str, Any], measured: dict[str, dict[str, Any]]) -> Switch:
    if "activations-kept" in measured:
        gain, why = _gain(measured, "activations-kept")
        return Switch(
            switch="gradient checkpointing",
            set_to="on" + (f"; off {why}" if why else ""),
            brings_percent=gain,
            how="measured",
            do="" if why else "training.gradient_checkpointing: false, or auto",
            holds_back="recomputed activations, though they fit in memory",
        )
    if baseline["gradient_checkpointing"]:
        return Switch(
            switch="gradient checkpointing", set_to="on, where memory ends", brings_percent=0.0, how="measured"
        )
    # A forward pass more, of a step's three.
    return Switch(
        switch="gradient checkpointing", set_to="off; on would cost about 25%", brings_percent=0.0, how="estimated"
    )


def _precision(spec: AuditSpec, measured: dict[str, dict[str, Any]]) -> Switch:
    if "precision-auto" in measured:
        gain, _ = _gain(measured, "precision-auto")
        return Switch(
            switch="precision",
            set_to="float32",
            brings_percent=gain,
            how="measured",
            do=f"{spec.key}.training.precision: auto",
            holds_back="float32 products where the device has faster ones",
        )
    return Switch(switch="precision", set_to=spec.training.precision, brings_percent=0.0, how="estimated")


def _optimizer(spec: AuditSpec, baseline: dict[str, Any], measured: dict[str, dict[str, Any]]) -> Switch:
    if "fused-optimizer" in measured:
        gain, _ = _gain(measured, "fused-optimizer")
        return Switch(
            switch="optimizer",
            set_to=spec.training.optimizer,
            brings_percent=gain,
            how="measured",
            do=f"{spec.key}.training.optimizer: adamw_torch_fused",
            holds_back="an optimizer in many small kernels",
        )
    share = baseline["parts"].get("optimizer")
    told = "" if share is None else f", {share:.0%} of a step"
    return Switch(
        switch="optimizer",
        set_to=f"{spec.training.optimizer}{told}",
        brings_percent=0.0,
        how="estimated" if share is None else "measured",
    )


def _loader(baseline: dict[str, Any]) -> Switch:
    waited = min(0.99, baseline["waited_share"])
    return Switch(
        switch="loader",
        set_to=f"rows are ready beforehand; {waited:.1%} of the time was waited for them",
        brings_percent=round(100 * waited / (1 - waited), 1),
        how="measured",
        do="operation.load_in_memory: true, or results on a faster disk" if waited > WORTH / 100 else "",
        holds_back="the loader: steps wait for rows",
    )


def _head(baseline: dict[str, Any]) -> Switch:
    """Logits are made of supervised tokens alone, in chunks; what that saves is counted."""
    saved = 1 - baseline["mfu_computed"] / baseline["mfu"] if baseline["mfu"] else 0.0
    return Switch(
        switch="chunked head",
        set_to=f"on; leaves out {max(0.0, saved):.0%} of the operations",
        brings_percent=0.0,
        how="counted",
    )


def _kernels(baseline: dict[str, Any]) -> Switch:
    """Attention, and what a GPU waits for between its kernels."""
    waiting = baseline["parts"].get("waiting")
    if waiting is None or baseline["device"] == "cpu":
        return Switch(switch="attention kernel", set_to=baseline["kernel"], brings_percent=0.0, how="not known here")
    idle = max(0.0, min(0.99, waiting - baseline["waited_share"]))
    return Switch(
        switch="kernels",
        set_to=f"{baseline['kernel']}; the device waits {idle:.0%} of the time between kernels",
        brings_percent=round(100 * idle / (1 - idle), 1),
        how="measured",
        do="more rows at once, or training.compile: true" if idle > WORTH / 100 else "",
        holds_back="small kernels: the device waits for the next one to be started",
    )


def _compile(baseline: dict[str, Any]) -> Switch:
    return Switch(
        switch="compile",
        set_to="on"
        if baseline["compiled"]
        else "off; `diagnose: changes: {compiled: {training.compile: true}}` measures it",
        brings_percent=None,
        how="not known here",
    )


def _reference(spec: AuditSpec) -> list[Switch]:
    if spec.kind == "sft":
        return []
    # A forward pass of two models, or of one, beside forward and backward of one (docs/benchmarks.md).
    return [
        Switch(
            switch="reference log-probabilities",
            set_to="computed once, and shared; in each step they would cost 25 to 33%",
            brings_percent=0.0,
            how="estimated",
        )
    ]


def _holds_back(findings: list[dict[str, str]], switches: list[Switch], baseline: dict[str, Any]) -> str:
    """One sentence."""
    wrong = next((one for one in findings if one["key"].endswith((".tokenizer", ".train_on"))), None)
    if wrong:
        return f"what is learned: {wrong['key']}: {wrong['found']}"
    first = switches[0]
    if (first.brings_percent or 0) >= WORTH and first.holds_back:
        return f"{first.holds_back} ({first.brings_percent:+.0f}% {first.how}); {first.do}"
    parts = baseline["parts"]
    if baseline["mfu_computed"] >= WELL_USED:
        return (
            f"compute: {baseline['mfu_computed']:.0%} of the device's peak is used, and no switch brings {WORTH:.0f}%"
        )
    if not parts:
        return f"nothing that a switch of the config mends by {WORTH:.0f}%"
    largest = max((name for name in parts if name != "products"), key=parts.__getitem__)
    return (
        f"nothing that a switch of the config mends by {WORTH:.0f}%: {parts['products']:.0%} of a step are matrix products, "
        f"{parts[largest]:.0%} {largest} work, at {baseline['mfu_computed']:.0%} of the device's peak"
    )


def as_markdown(found: dict[str, Any]) -> str:
    """A table, what brings most first, and the sentence."""
    lines = [f"## {found['key']}", ""]
    lines += [f"- {one['severity']}: {one['key']}: {one['found']}; {one['do']}" for one in found["findings"]]
    lines += [""] * bool(found["findings"])
    lines += ["| switch | set to | would bring | how it is known | do |", "|---|---|---|---|---|"]
    for one in found["switches"]:
        brings = "?" if one["brings_percent"] is None else f"{one['brings_percent']:+.1f}%"
        cells = (one["switch"], one["set_to"], brings, one["how"], one["do"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if found["parts"]:
        lines += ["", "Of a step: " + ", ".join(f"{share:.0%} {part}" for part, share in found["parts"].items()) + "."]
    return "\n".join([*lines, "", f"What holds it back: {found['holds_back']}."]) + "\n"
