"""The switches: settings that can change the speed of a run, each with an alternative, its gain, and how that is known."""

from dataclasses import dataclass
from typing import Any, Literal

from snaketune.config.optimizers import OPTIMIZERS
from snaketune.stages.specs import AuditSpec

How = Literal["measured", "counted", "estimated", "not known here"]
# Effects below this many percent are noise.
WORTH = 5.0


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One setting of a run.

    Attributes:
        brings_percent: the gain in trained tokens per second after `do`; 0 if the setting is right, None if unknown.
        most_percent: the gain if the part of a step that it affects took no time; 0 if unknown.
        holds_back: the description of it as the run's main limit.
    """

    switch: str
    set_to: str
    brings_percent: float | None
    how: How
    do: str = ""
    most_percent: float = 0.0
    holds_back: str = ""


def switches_of(
    spec: AuditSpec,
    pack: dict[str, Any],
    curve: dict[str, Any],
    measured: dict[str, dict[str, Any]],
) -> list[Switch]:
    """Return all switches, the largest effect first. Args: as those of `audit.audit`."""
    baseline = next(iter(measured.values()))
    switches = [
        *_packing(spec, pack, baseline, measured),
        _micro_batch(spec, curve, baseline),
        _checkpointing(baseline, measured),
        _precision(spec, measured),
        _optimizer(spec, baseline, measured),
        _loader(baseline),
        _head(baseline),
        _attention(baseline),
        _fused(baseline),
        *_small_kernels(baseline),
        _compile(spec, baseline, measured),
        *_reference(spec),
    ]
    switches.sort(key=lambda one: -(one.brings_percent or 0.0))
    return switches


def _gain(measured: dict[str, dict[str, Any]], variant: str) -> tuple[float | None, str]:
    """Return the percentage by which a variant is faster than the baseline, and why there is none."""
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
    unpacked = counts["tokens"] / max(1, counts["pieces"] * pack["row_length"])
    switches = [
        Switch(
            switch="packing",
            set_to=f"on, {full:.1%} of the rows' positions hold tokens (one document a row: {unpacked:.1%})",
            brings_percent=round(100 * (1 / full - 1), 1),
            how="counted",
            do=f"{spec.key}.packing.length: longer rows have less padding" if full < 1 / (1 + WORTH / 100) else "",
            holds_back="padding: rows that documents don't fill",
        )
    ]
    dropped, read = metadata.get("lost_to_length", {}).get("tokens", 0), counts.get("read_tokens", 0)
    switches.append(
        Switch(
            switch="row length",
            set_to=f"{pack['row_length']} tokens; {dropped / max(1, read):.1%} of all tokens are dropped because of it",
            brings_percent=round(100 * (read / max(1, read - dropped) - 1), 1),
            how="counted",
            do=f"{spec.key}.packing.length: {metadata['lost_to_length'].get('enough') or 'longer'}" if dropped else "",
            holds_back="dropped tokens: rows too short for what is to be learned",
        )
    )
    return switches


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
        holds_back="the micro-batch: too few rows per batch for the device",
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
            switch="gradient checkpointing", set_to="on, since memory is short", brings_percent=0.0, how="measured"
        )
    # One more forward pass, in a step of three.
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
    details = "" if share is None else f", {share:.0%} of a step"
    of = OPTIMIZERS[spec.training.optimizer]
    if of.bits > 8 and not of.factored:
        states = of.states * baseline["trainable_parameters"] / baseline["processes"] / 1e9
        details += f"; its states take up to {states * of.bits / 8:.2g} GB, and {states:.2g} in 8 bits"
    return Switch(switch="optimizer", set_to=f"{spec.training.optimizer}{details}", brings_percent=0.0, how="estimated")


def _loader(baseline: dict[str, Any]) -> Switch:
    waited = baseline["waited_share"]
    return Switch(
        switch="loader",
        set_to=f"prefetched rows; {waited:.1%} of the time was spent waiting for them",
        brings_percent=_without(waited),
        how="measured",
        do="operation.load_in_memory: true, or results on a faster disk" if waited > WORTH / 100 else "",
        holds_back="the loader: steps wait for rows",
    )


def _head(baseline: dict[str, Any]) -> Switch:
    """Logits are computed for supervised tokens only, in chunks; the saving is counted."""
    saved = 1 - baseline["mfu_computed"] / baseline["mfu"] if baseline["mfu"] else 0.0
    return Switch(
        switch="chunked head",
        set_to=f"on; saves {max(0.0, saved):.0%} of the operations",
        brings_percent=0.0,
        how="counted",
    )


def _attention(baseline: dict[str, Any]) -> Switch:
    return _part_of_a_step(baseline, "attention", "attention kernel", baseline["kernel"], "attention is")


def _fused(baseline: dict[str, Any]) -> Switch:
    """Compiled layers fuse the same operations as kernels such as Liger's."""
    what = "compiled layers" if baseline["compiled"] else "none (compiled layers, or Liger's)"
    return _part_of_a_step(baseline, "other", "fused kernels", what, "norms, activations and rotations are")


def _part_of_a_step(baseline: dict[str, Any], part: str, switch: str, set_to: str, what: str) -> Switch:
    """Return a switch that isn't tried, with the share of a step that it affects."""
    share = baseline["parts"].get(part)
    if share is None:
        return Switch(switch=switch, set_to=set_to, brings_percent=None, how="not known here")
    return Switch(
        switch=switch,
        set_to=f"{set_to}; {what} {share:.0%} of a step",
        brings_percent=None,
        how="estimated",
        most_percent=_without(share),
    )


def _without(share: float) -> float:
    """Return the percentage by which a step is faster without a share of its time.

    >>> _without(0.5)
    100.0
    """
    return round(100 * share / (1 - min(0.99, share)), 1)


def _small_kernels(baseline: dict[str, Any]) -> list[Switch]:
    """Return the switch for a GPU's idle time between kernels."""
    waiting = baseline["parts"].get("waiting")
    if waiting is None or baseline["device"] == "cpu":
        return []
    idle = max(0.0, waiting - baseline["waited_share"])
    return [
        Switch(
            switch="small kernels",
            set_to=f"the device waits {idle:.0%} of the time between kernels",
            brings_percent=_without(idle),
            how="measured",
            do="more rows per micro-batch, or training.compile: true" if idle > WORTH / 100 else "",
            holds_back="small kernels: the device waits for the next one to be launched",
        )
    ]


def _compile(spec: AuditSpec, baseline: dict[str, Any], measured: dict[str, dict[str, Any]]) -> Switch:
    if "compile-auto" in measured:
        gain, _ = _gain(measured, "compile-auto")
        does = "does" if measured["compile-auto"].get("compiled") else "doesn't compile either"
        return Switch(
            switch="compile",
            set_to=f"off; auto {does}",
            brings_percent=gain,
            how="measured",
            do=f"{spec.key}.training.compile: auto" if (gain or 0) > WORTH else "",
            holds_back="layers in many small kernels, which aren't compiled",
        )
    configured = "auto, " if spec.training.compile == "auto" else ""
    # The rule of auto is measured (models/compiling.py): the FLOPs from which a run earns its compilation back.
    earned = "" if baseline["compiled"] or not configured else ", as it gains nothing or isn't available"
    return Switch(
        switch="compile",
        set_to=f"{configured}{'on' if baseline['compiled'] else 'off'}{earned}",
        brings_percent=0.0,
        how="estimated",
    )


def _reference(spec: AuditSpec) -> list[Switch]:
    if spec.kind == "sft":
        return []
    # A forward pass of two models, or of one, beside forward and backward of one (docs/benchmarks.md).
    return [
        Switch(
            switch="reference log-probabilities",
            set_to="computed once, and shared; computed in each step they would cost 25 to 33%",
            brings_percent=0.0,
            how="estimated",
        )
    ]
