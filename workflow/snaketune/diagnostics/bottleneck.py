"""The `bottleneck` stage: what limits the speed of a run, and what changing each of its settings would bring.

Measured are the run as it is (two steps with torch.profiler), its curve of micro-batches, and the variants that were tried.
What isn't measured is counted from the rows or estimated, and marked as such.

    doctor.json    key, limit, findings, settings, now (what the run does as it is), parts, notes
    doctor.md      the same as a table, the largest effect first
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.diagnostics.settings import (
    MEASURED,
    WORTH,
    Setting,
    Timing,
    compared_tokens,
    figures_of,
    machine_notes,
    micro_batch,
    padding,
    parts_of_step,
    tried,
)
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import BottleneckSpec

STAGE = Stage(
    module=__name__,
    spec=BottleneckSpec,
    payload="doctor",
    inputs={
        "pack": exactly_one("pack", entries=("counts.train", "packing_metadata")),
        "preflight": exactly_one("preflight"),
        "calibrate": exactly_one("calibrate"),
        "timings": any_number("timing"),
    },
)

# Share of the device's peak from which a training counts as limited by compute.
WELL_USED = 0.4
COLUMNS = ("setting", "set to", "would bring %", "memory GB", "loss", "how it is known", "do")


def build(
    spec: BottleneckSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    preflight: Artifact,
    calibrate: Artifact,
    timings: Sequence[Artifact],
) -> Outcome:
    """Fill `work.payload` with `doctor.json` and `doctor.md`. Args: timings: round by round, the variants in their order."""
    from snaketune.training.autotune.batch_plan import CURVE
    from snaketune.training.preflight_record import FINDINGS

    def read(result: Artifact, name: str) -> Any:
        return json.loads(result.file(name).read_text(encoding="utf-8"))

    count, measured = len(spec.variants), [read(timing, MEASURED) for timing in timings]
    rounds = {variant.name: measured[number::count] for number, variant in enumerate(spec.variants)}
    result = examine(spec, pack.manifest, read(calibrate, CURVE), rounds, read(preflight, FINDINGS)["findings"])
    write_json(work.payload / "doctor.json", result)
    text = as_markdown(result)
    (work.payload / "doctor.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
    return Outcome(counts={"settings": len(result["settings"]), "findings": len(result["findings"])})


def examine(
    spec: BottleneckSpec,
    pack: dict[str, Any],
    curve: dict[str, Any],
    timings: dict[str, list[Timing]],
    findings: list[dict[str, str]],
) -> dict[str, Any]:
    """The content of `doctor.json`.

    Args:
        pack: manifest of the run's rows.
        curve: of its calibration.
        timings: by variant, one per round, the baseline first.
        findings: of preflight.
    """
    key, baseline = spec.key, timings[spec.variants[0].name]
    prefixes = (f"{key}.", "corpora", "results", "operation", "flash")
    findings = [finding for finding in findings if finding["key"] == key or finding["key"].startswith(prefixes)]
    result = {"key": key, "findings": findings, "settings": [], "now": None, "parts": {}, "notes": []}
    if unfit := next((timing["why"] for timing in baseline if not timing["fits"]), ""):
        return result | {"limit": f"memory: {unfit}"}
    fitting = [timing for rounds in timings.values() for timing in rounds if timing["fits"]]
    profiled, tokens = baseline[0], compared_tokens(fitting)
    settings = [tried(key, variant, timings[variant.name], baseline, tokens) for variant in spec.variants[1:]]
    settings += [micro_batch(key, curve, profiled), *parts_of_step(profiled)]
    if not any(variant.baseline.get("packing.strategy") == "none" for variant in spec.variants):
        settings.append(padding(key, pack))
    settings.sort(key=lambda setting: -(setting.brings_percent or 0.0))
    limit = _limit_of_speed(settings, profiled)
    if wrong := next((finding for finding in findings if finding["key"].endswith((".tokenizer", ".train_on"))), None):
        limit = f"what is learned: {wrong['key']}: {wrong['found']}. As for speed: {limit}"
    now = figures_of(baseline, baseline, tokens) | {
        "tokens_per_second_at_peak": round(profiled["tokens_per_second"] / max(1e-9, profiled["mfu"])),
        "tokens_of_loss": round(tokens),
        "rounds": len(baseline),
        **{name: profiled[name] for name in ("mfu", "expected_memory_gb", "device")},
    }
    return result | {
        "limit": limit,
        "settings": [asdict(setting) for setting in settings],
        "now": now,
        "parts": profiled["parts"],
        "notes": machine_notes(fitting),
    }


def _limit_of_speed(settings: list[Setting], baseline: dict[str, Any]) -> str:
    first = next((setting for setting in settings if setting.limit and (setting.brings_percent or 0) >= WORTH), None)
    if first:
        return f"{first.limit} ({first.brings_percent:+.0f}% {first.how}); {first.do}"
    parts, used = baseline["parts"], baseline["mfu"]
    if used >= WELL_USED:
        return f"compute: {used:.0%} of the device's peak is used, and no setting gains {WORTH:.0f}%"
    if not parts:
        return f"no setting gains {WORTH:.0f}%"
    largest = max((name for name in parts if name != "products"), key=parts.__getitem__)
    return (
        f"no setting gains {WORTH:.0f}%: {parts['products']:.0%} of a step are matrix products, "
        f"{parts[largest]:.0%} {largest} work, at {used:.0%} of the device's peak"
    )


def as_markdown(result: dict[str, Any]) -> str:
    """A Markdown table of the settings, the largest effect first, and the sentence on what limits the run."""
    lines = [f"## {result['key']}", ""]
    lines += [
        f"- {finding['severity']}: {finding['key']}: {finding['found']}; {finding['do']}"
        for finding in result["findings"]
    ]
    lines += [""] * bool(result["findings"])
    if now := result["now"]:
        expected = f" ({now['expected_memory_gb']:.2f} expected)" if now["expected_memory_gb"] else ""
        lines += [
            f"On {now['device']}: {_text(now['tokens_per_second'], ',.0f')} tokens/s, {now['mfu']:.0%} of the device's peak "
            f"({now['tokens_per_second_at_peak']:,} tokens/s); {_text(now['memory_gb'], '.2f')} GB{expected}; "
            f"loss {_text(now['loss'], '.3f')} after {now['tokens_of_loss']:,} tokens. Rounds: {now['rounds']}.",
            "",
        ]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for setting in result["settings"]:
        figures = setting["figures"] or {"gain_percent": setting["brings_percent"]}
        digits = {"gain_percent": "+.1f", "memory_gb": ".2f", "loss": ".3f"}
        brings, memory, loss = (_text(figures.get(name), shown) for name, shown in digits.items())
        cells = (setting["setting"], setting["set_to"], brings, memory, loss, setting["how"], setting["do"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if result["parts"]:
        lines += ["", "Of a step: " + ", ".join(f"{share:.0%} {part}" for part, share in result["parts"].items()) + "."]
    lines += ["", *(f"Note: {note}." for note in result["notes"])] if result["notes"] else []
    return "\n".join([*lines, "", f"What limits it: {result['limit']}."]) + "\n"


def _text(figure: dict[str, float] | float | None, digits: str) -> str:
    """A figure, or its median with the lowest and the highest value if rounds differ."""
    if not isinstance(figure, dict):
        return "" if figure is None else f"{figure:{digits}}"
    middle, least, most = (f"{figure[name]:{digits}}" for name in ("median", "least", "most"))
    return middle if least == most else f"{middle} ({least} to {most})"
