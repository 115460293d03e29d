"""The `audit` stage: for each switch of a run, the effect of changing it here, and what limits the run's speed.

Measured are the run as it is (two steps with torch.profiler), its curve of micro-batches, and a trial of each setting that is
slow on most machines. What isn't measured is counted from the rows or estimated, and marked as such.

    audit.json: key, holds_back, findings, switches (switch, set_to, brings_percent, most_percent, how, do), parts
    audit.md    the same as a table, the largest effect first
"""

import json
from dataclasses import asdict
from typing import Any

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.diagnostics.switches import WORTH, Audited, Switch, switches_of
from snaketune.diagnostics.trial_files import MEASURED
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import AuditSpec

STAGE = Stage(
    module=__name__,
    spec=AuditSpec,
    payload="audit",
    inputs={
        "pack": exactly_one("pack", entries=("counts.train", "packing_metadata")),
        "preflight": exactly_one("preflight"),
        "calibrate": exactly_one("calibrate"),
        "trials": any_number("trial"),
    },
)

# Share of the device's peak from which a training counts as limited by compute.
WELL_USED = 0.4


def build(
    spec: AuditSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    preflight: Artifact,
    calibrate: Artifact,
    trials: list[Artifact],
) -> Outcome:
    """Fill `work.payload` with `audit.json` and `audit.md`. Args: trials: in the order of the spec's variants."""
    from snaketune.training.autotune.batch_plan import CURVE
    from snaketune.training.loop.preflight_record import FINDINGS

    def read(result: Artifact, name: str) -> Any:
        return json.loads(result.file(name).read_text(encoding="utf-8"))

    measured = {variant.name: read(one, MEASURED) for variant, one in zip(spec.variants, trials, strict=True)}
    findings = read(preflight, FINDINGS)["findings"]
    result = audit(Audited(spec, pack.manifest, read(calibrate, CURVE), measured), findings)
    write_json(work.payload / "audit.json", result)
    text = as_markdown(result)
    (work.payload / "audit.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
    return Outcome(counts={"switches": len(result["switches"]), "findings": len(result["findings"])})


def audit(run: Audited, findings: list[dict[str, str]]) -> dict[str, Any]:
    """Return the findings of preflight on the run, the switches with their effects, and what limits it."""
    spec, baseline = run.spec, run.baseline
    if not baseline["fits"]:
        limit = f"memory: {baseline['why']}"
        return {"key": spec.key, "holds_back": limit, "findings": findings, "switches": [], "parts": {}}
    switches = switches_of(run)
    prefixes = (f"{spec.key}.", "corpora", "results", "operation", "flash")
    findings = [one for one in findings if one["key"] == spec.key or one["key"].startswith(prefixes)]
    holds_back = _slows_down(switches, baseline)
    if wrong := next((one for one in findings if one["key"].endswith((".tokenizer", ".train_on"))), None):
        holds_back = f"what is learned: {wrong['key']}: {wrong['found']}. As for speed: {holds_back}"
    return {
        "key": spec.key,
        "holds_back": holds_back,
        "findings": findings,
        "switches": [asdict(one) for one in switches],
        **{key: baseline[key] for key in ("parts", "mfu", "tokens_per_second", "device")},
    }


def _slows_down(switches: list[Switch], baseline: dict[str, Any]) -> str:
    first = switches[0]
    if (first.brings_percent or 0) >= WORTH and first.holds_back:
        return f"{first.holds_back} ({first.brings_percent:+.0f}% {first.how}); {first.do}"
    parts, used = baseline["parts"], baseline["mfu_computed"]
    if used >= WELL_USED:
        return f"compute: {used:.0%} of the device's peak is used, and no switch gains {WORTH:.0f}%"
    if not parts:
        return f"no switch of the config gains {WORTH:.0f}%"
    largest = max((name for name in parts if name != "products"), key=parts.__getitem__)
    return (
        f"no switch of the config gains {WORTH:.0f}%: {parts['products']:.0%} of a step are matrix products, "
        f"{parts[largest]:.0%} {largest} work, at {used:.0%} of the device's peak"
    )


def as_markdown(result: dict[str, Any]) -> str:
    """Return a Markdown table of the switches, the largest effect first, and the sentence on what limits the run."""
    lines = [f"## {result['key']}", ""]
    lines += [f"- {one['severity']}: {one['key']}: {one['found']}; {one['do']}" for one in result["findings"]]
    lines += [""] * bool(result["findings"])
    lines += ["| switch | set to | would bring | how it is known | do |", "|---|---|---|---|---|"]
    for one in result["switches"]:
        most = f"at most {one['most_percent']:+.0f}%" if one["most_percent"] else "?"
        brings = most if one["brings_percent"] is None else f"{one['brings_percent']:+.1f}%"
        cells = (one["switch"], one["set_to"], brings, one["how"], one["do"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if result["parts"]:
        lines += ["", "Of a step: " + ", ".join(f"{share:.0%} {part}" for part, share in result["parts"].items()) + "."]
    return "\n".join([*lines, "", f"What holds it back: {result['holds_back']}."]) + "\n"
