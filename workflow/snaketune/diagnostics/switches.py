"""The switches: settings that can change the speed of a run, each with an alternative, its gain, and how that is known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from snaketune.config.optimizers import OPTIMIZERS
from snaketune.stages.specs import AuditSpec

How = Literal["measured", "counted", "estimated", "not known here"]
# Effects below this many percent are noise.
WORTH = 5.0


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Audited:
    """What is known of the run.

    Attributes:
        pack: manifest of its rows.
        curve: of its calibration.
        measured: measurements of each variant's trial, the baseline first.
    """

    spec: AuditSpec
    pack: dict[str, Any]
    curve: dict[str, Any]
    measured: dict[str, dict[str, Any]]

    @property
    def baseline(self) -> dict[str, Any]:
        return next(iter(self.measured.values()))

    def gain(self, variant: str) -> float:
        """Return the percentage by which a variant is faster than the baseline; 0 if it doesn't fit."""
        one = self.measured[variant]
        ratio = one["tokens_per_second"] / self.baseline["tokens_per_second"] if one["fits"] else 1.0
        return round(100 * (ratio - 1), 1)


def switches_of(run: Audited) -> list[Switch]:
    """Return all switches, the largest effect first."""
    groups = (_rows, _micro_batch, _settings, _kernels, _compile, _reference)
    return sorted((one for switches in groups for one in switches(run)), key=lambda one: -(one.brings_percent or 0.0))


def _tried(run: Audited, variant: str, switch: str, set_to: str, other: str, do: str, holds_back: str) -> Switch:
    """Return a switch whose other setting a variant's trial had; one that doesn't fit isn't advised."""
    if not run.measured[variant]["fits"]:
        set_to, do = f"{set_to}; {other} doesn't fit", ""
    return Switch(switch, set_to, run.gain(variant), "measured", do, holds_back=holds_back)


def _rows(run: Audited) -> Iterator[Switch]:
    key = f"{run.spec.key}.packing"
    if "packed" in run.measured:
        holds_back = "padding: each row of a batch is as long as its longest"
        yield _tried(run, "packed", "packing", "off", "on", f"{key}.strategy: best-fit-decreasing", holds_back)
        return
    metadata, counts, length = run.pack["packing_metadata"], run.pack["counts"]["train"], run.pack["row_length"]
    full = metadata["packing_efficiency"] / 100
    unpacked = counts["tokens"] / max(1, counts["pieces"] * length)
    set_to = f"on, {full:.1%} of the rows' positions hold tokens (one document a row: {unpacked:.1%})"
    do = f"{key}.length: longer rows have less padding" if full < 1 / (1 + WORTH / 100) else ""
    brings, holds_back = round(100 * (1 / full - 1), 1), "padding: rows that documents don't fill"
    yield Switch("packing", set_to, brings, "counted", do, holds_back=holds_back)
    lost, read = metadata.get("lost_to_length", {}), counts.get("read_tokens", 0)
    dropped = lost.get("tokens", 0)
    set_to = f"{length} tokens; {dropped / max(1, read):.1%} of all tokens are dropped because of it"
    do = f"{key}.length: {lost.get('enough') or 'longer'}" if dropped else ""
    brings = round(100 * (read / max(1, read - dropped) - 1), 1)
    holds_back = "dropped tokens: rows too short for what is to be learned"
    yield Switch("row length", set_to, brings, "counted", do, holds_back=holds_back)


def _micro_batch(run: Audited) -> Iterator[Switch]:
    baseline, best = run.baseline, run.curve["best"]
    rows, checkpointing = baseline["micro_batch_rows"], bool(baseline["gradient_checkpointing"])
    same = [
        one["tokens_per_second"]
        for one in run.curve["trials"]
        if one["fits"] and (one["micro_batch_rows"], one["gradient_checkpointing"]) == (rows, checkpointing)
    ]
    set_to = f"{rows} rows x {baseline['accumulation']} ({run.spec.training.batch_rows} a step)"
    holds_back = "the micro-batch: too few rows per batch for the device"
    if not same:
        yield Switch("micro-batch", set_to, None, "not known here", holds_back=holds_back)
        return
    gain = 100 * (best["tokens_per_second"] / same[0] - 1)
    key = f"{run.spec.key}.training.micro_batch_rows"
    do = f"{key}: auto, or {best['micro_batch_rows']}" if gain > WORTH else ""
    yield Switch("micro-batch", set_to, round(max(0.0, gain), 1), "measured", do, holds_back=holds_back)


def _settings(run: Audited) -> Iterator[Switch]:
    """Yield gradient checkpointing, precision and optimizer, which are tried if they are slow on most machines."""
    baseline, training, key = run.baseline, run.spec.training, f"{run.spec.key}.training"
    if "activations-kept" in run.measured:
        do, holds_back = (
            f"{key}.gradient_checkpointing: false, or auto",
            "recomputed activations, though they fit in memory",
        )
        yield _tried(run, "activations-kept", "gradient checkpointing", "on", "off", do, holds_back)
    elif baseline["gradient_checkpointing"]:
        yield Switch("gradient checkpointing", "on, since memory is short", 0.0, "measured")
    else:
        # One more forward pass, in a step of three.
        yield Switch("gradient checkpointing", "off; on would cost about 25%", 0.0, "estimated")

    if "activations-on-device" in run.measured:
        holds_back = "activations that are moved, though they fit in memory"
        do = f"{run.spec.key}.operation.activation_offloading: false"
        yield _tried(run, "activations-on-device", "activation offloading", "on", "off", do, holds_back)

    if "precision-auto" in run.measured:
        holds_back = "float32 products where the device has faster ones"
        yield _tried(run, "precision-auto", "precision", "float32", "auto", f"{key}.precision: auto", holds_back)
    else:
        yield Switch("precision", training.precision, 0.0, "estimated")

    if "fused-optimizer" in run.measured:
        fused, holds_back = "adamw_torch_fused", "an optimizer in many small kernels"
        do = f"{key}.optimizer: {fused}"
        yield _tried(run, "fused-optimizer", "optimizer", training.optimizer, fused, do, holds_back)
    else:
        share, of = baseline["parts"].get("optimizer"), OPTIMIZERS[training.optimizer]
        details = "" if share is None else f", {share:.0%} of a step"
        if of.bits > 8 and not of.factored:
            states = of.states * baseline["trainable_parameters"] / baseline["processes"] / 1e9
            details += f"; its states take up to {states * of.bits / 8:.2g} GB, and {states:.2g} in 8 bits"
        yield Switch("optimizer", f"{training.optimizer}{details}", 0.0, "estimated")


def _kernels(run: Audited) -> Iterator[Switch]:
    """Yield loader, head, attention, fused kernels and the gaps between kernels, each by its share of a step."""
    baseline, waited = run.baseline, run.baseline["waited_share"]
    set_to = f"prefetched rows; {waited:.1%} of the time was spent waiting for them"
    do = "operation.load_in_memory: true, or results on a faster disk" if waited > WORTH / 100 else ""
    yield Switch("loader", set_to, _without(waited), "measured", do, holds_back="the loader: steps wait for rows")

    # Logits are computed for supervised tokens only, in chunks.
    saved = 1 - baseline["mfu_computed"] / baseline["mfu"] if baseline["mfu"] else 0.0
    yield Switch("chunked head", f"on; saves {max(0.0, saved):.0%} of the operations", 0.0, "counted")

    # Compiled layers fuse the same operations as kernels such as Liger's.
    fused = "compiled layers" if baseline["compiled"] else "none (compiled layers, or Liger's)"
    for part, switch, set_to, what in (
        ("attention", "attention kernel", baseline["kernel"], "attention is"),
        ("other", "fused kernels", fused, "norms, activations and rotations are"),
    ):
        share = baseline["parts"].get(part)
        if share is None:
            yield Switch(switch, set_to, None, "not known here")
        else:
            set_to = f"{set_to}; {what} {share:.0%} of a step"
            yield Switch(switch, set_to, None, "estimated", most_percent=_without(share))

    waiting = baseline["parts"].get("waiting")
    if waiting is not None and baseline["device"] != "cpu":
        idle = max(0.0, waiting - waited)
        set_to = f"the device waits {idle:.0%} of the time between kernels"
        do = "more rows per micro-batch, or training.compile: true" if idle > WORTH / 100 else ""
        holds_back = "small kernels: the device waits for the next one to be launched"
        yield Switch("small kernels", set_to, _without(idle), "measured", do, holds_back=holds_back)


def _compile(run: Audited) -> Iterator[Switch]:
    if tried := run.measured.get("compile-auto"):
        gain = run.gain("compile-auto")
        set_to = "off; auto does" if tried.get("compiled") else "off; auto doesn't compile either"
        do = f"{run.spec.key}.training.compile: auto" if gain > WORTH else ""
        holds_back = "layers in many small kernels, which aren't compiled"
        yield Switch("compile", set_to, gain, "measured", do, holds_back=holds_back)
        return
    auto, compiled = run.spec.training.compile == "auto", run.baseline["compiled"]
    # The rule of auto is measured (models/compiling.py): the FLOPs from which a run earns its compilation back.
    why = ", as it gains nothing or isn't available" if auto and not compiled else ""
    yield Switch("compile", f"{'auto, ' if auto else ''}{'on' if compiled else 'off'}{why}", 0.0, "estimated")


def _reference(run: Audited) -> Iterator[Switch]:
    if run.spec.kind != "sft":
        # A forward pass of two models, or of one, beside forward and backward of one (docs/benchmarks.md).
        set_to = "computed once, and shared; computed in each step they would cost 25 to 33%"
        yield Switch("reference log-probabilities", set_to, 0.0, "estimated")


def _without(share: float) -> float:
    """Return the percentage by which a step is faster without a share of its time.

    >>> _without(0.5)
    100.0
    """
    return round(100 * share / (1 - min(0.99, share)), 1)
