"""The switches of a run, one function each: what it is set to, what another setting would bring, and how that is known."""

from dataclasses import dataclass
from typing import Any, Literal

from snaketune.stages.specs import AuditSpec

How = Literal["measured", "counted", "estimated", "not known here"]
# What brings less is noise.
WORTH = 5.0


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


def switches_of(
    spec: AuditSpec,
    pack: dict[str, Any],
    curve: dict[str, Any],
    measured: dict[str, dict[str, Any]],
) -> list[Switch]:
    """All of them, what brings most first. Args: as those of `audit.audit`."""
    baseline = next(iter(measured.values()))
    found = [
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
    found.sort(key=lambda one: -(one.brings_percent or 0.0))
    return found


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
        how="estimated",
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
        return Switch(switch="attention kernel", set_to=baseline["kernel"], brings_percent=None, how="not known here")
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
