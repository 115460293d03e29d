"""What the jobs cost, and tables of all jobs, tokenizers and library versions, as text for the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.data.packing_flow import pack_flows
from snaketune.report.data.results import ResultSet, by_whole, is_gpu, natural
from snaketune.text import NOTHING, clean, clip, decimal, duration, percent, short, whole

SOURCE_CHARACTERS = 300


def job_rows(results: ResultSet) -> list[dict[str, Any]]:
    """A row per job in the order of the stages, with its share of the longest time; the parts of one result share a row."""
    jobs, seconds = by_whole(results.all), {}
    for job, parts in jobs.items():
        known = [part.run["seconds"] for part in parts if part.run.get("seconds") is not None]
        seconds[job] = sum(known) if known else None
    longest = max((spent or 0.0 for spent in seconds.values()), default=0.0)
    return [
        {
            "stage": stage,
            "name": name,
            "seconds": duration(seconds[stage, name]),
            "share": (seconds[stage, name] or 0.0) / longest if longest else 0.0,
            "device": str(parts[0].run.get("device", "")),
            "facts": ", ".join(([f"{len(parts):,} parts"] if len(parts) > 1 else []) + list(_facts(parts[0]))),
        }
        for (stage, name), parts in jobs.items()
    ]


def _facts(result: Result) -> Iterator[str]:
    manifest, counts, run = result.manifest, result.counts, result.run
    if parameters := manifest.get("parameters"):
        trainable = manifest.get("trainable_parameters", parameters)
        trained = f", {short(trainable)} trained" if trainable != parameters else ""
        yield f"{short(parameters)} parameters{trained}"
    if steps := counts.get("steps"):
        yield f"{whole(steps)} steps"
    if manifest.get("trainer"):
        yield f"trainer {manifest['trainer']}"
    yield from (str(manifest[key]) for key in ("dtype", "kernel") if manifest.get(key))
    if run.get("processes", 1) > 1:
        yield f"{run['processes']} processes"
    if len(attempts := run.get("attempts", [])) > 1:
        yield f"{len(attempts)} attempts, the last one {duration(attempts[-1])}"
    if rows := run.get("micro_batch_rows"):
        checkpointing = ", activation checkpointing" if run.get("gradient_checkpointing") else ""
        slowdown = run.get("slower_than_best_percent") or 0
        slower = f" ({slowdown:.0f}% slower than the best measured)" if slowdown >= 1 else ""
        yield f"micro-batches of {rows} row{'s' if rows > 1 else ''}{checkpointing}{slower}"
    if rate := run.get("tokens_per_second_median") or run.get("tokens_per_second"):
        yield f"{short(rate)} tokens/s"
    if share := run.get("mfu_median"):
        peak = f"{short(run['peak_flops_per_second'])}FLOP/s ({run['peak_flops_source']})"
        yield f"MFU {percent(share)}: {run['flops']['counted']}, of {peak}"
    if memory := run.get("peak_memory_gb"):
        yield f"{decimal(memory)} GB {run['peak_memory_is']}"
    if prompts := counts.get("prompts"):
        yield f"{whole(prompts)} prompts answered"


def tokenizer_rows(results: ResultSet) -> list[dict[str, Any]]:
    rows = []
    for result in results.of("tokenizer"):
        spec, manifest, counts = result.spec, result.manifest, result.counts
        at = f" at {spec['revision']}" if spec.get("revision") else ""
        parity = manifest.get("parity")
        samples = [
            sample | {"supervised_text": [clip(text, SOURCE_CHARACTERS) for text in sample["supervised_text"]]}
            for sample in manifest.get("samples", [])
        ]
        rows.append(
            {
                "name": result.name,
                "kind": f"adopted: {spec['adopt']}{at}" if spec.get("adopt") else f"trained: {spec['model']}",
                "vocabulary": whole(manifest.get("vocab_size")),
                "trained_on": f"{whole(counts['texts'])} texts, {short(counts['bytes'])}B" if counts else NOTHING,
                "parity": f"equals sentencepiece on {whole(parity['texts'])} texts" if parity else NOTHING,
                "samples": samples,
            }
        )
    return rows


def versions(results: ResultSet) -> dict[str, list[str]]:
    """All versions of each library that shaped a result. More than one means that results were made with different versions."""
    by_library: dict[str, set[str]] = {}
    for result in results.all:
        python = {"python": result.run["python"]} if result.run.get("python") else {}
        for library, version in (result.manifest.get("versions", {}) | python).items():
            by_library.setdefault(library, set()).add(version or "not installed")
    return {library: sorted(versions_, key=natural) for library, versions_ in sorted(by_library.items())}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number, or one per stage (`values`: label and text), with a note."""

    title: str
    value: str = ""
    values: tuple[tuple[str, str], ...] = ()
    note: str = ""


def cards(results: ResultSet) -> Iterator[Card]:
    """Cards about cost and utilization; a card without data is omitted."""
    timed = [result for result in results.all if result.run.get("seconds")]
    if timed:
        longest = max(timed, key=lambda result: result.run["seconds"])
        most = f"the longest is {longest.stage} {longest.name}, {duration(longest.run['seconds'])}"
        total = duration(sum(result.run["seconds"] for result in timed))
        attempts = sum(max(1, len(result.run.get("attempts", ()))) for result in timed)
        tried = f" in {whole(attempts)} attempts" if attempts > len(timed) else ""
        yield Card(title="Compute time", value=total, note=f"{whole(len(timed))} jobs{tried}; {most}")
    if hours := _gpu_hours(timed):
        note = ", ".join(f"{_hours(spent)} on {name}" for name, spent in sorted(hours.items()))
        yield Card(title="GPU hours", value=_hours(sum(hours.values())), note=note)
    if runs := results.trainings:
        steps, tokens = (sum(run.counts[count] for run in runs) for count in ("steps", "tokens"))
        note = f"without padding, by {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {whole(steps)} steps in total"
        yield Card(title="Tokens trained", value=short(tokens), note=note)
    speeds: dict[str, list[float]] = {}
    devices = set()
    for run in results.trainings:
        if speed := run.run.get("tokens_per_second_median"):
            speeds.setdefault(run.stage, []).append(speed)
            devices.add(str(run.run.get("device", "")))
    if speeds:
        values = tuple((stage, short(max(speeds[stage]))) for stage in ("sft", "dpo", "reward") if stage in speeds)
        on = ", ".join(sorted(devices - {""})) or NOTHING
        yield Card(title="Tokens per second", values=values, note=f"median, without padding, on {on}")
    if packs := [flow for flow in pack_flows(results) if flow.packed and flow.metadata["row_tokens"]]:
        tokens = sum(flow.train.counts["tokens"] for flow in packs)
        capacity = sum(flow.metadata["row_tokens"] for flow in packs)
        unpacked = sum(flow.train.counts["pieces"] * flow.length for flow in packs)
        note = f"of all train rows is tokens, not padding; {percent(tokens / unpacked)} with one document per row"
        yield Card(title="Packing efficiency", value=percent(tokens / capacity), note=note)


def _gpu_hours(timed: list[Result]) -> dict[str, float]:
    """GPU hours by device, of all attempts that run.json counts, with the process count of the last one."""
    hours: dict[str, float] = {}
    for run in (result.run for result in timed if is_gpu(result.run)):
        device = clean(run["device"])
        # Reference passes and evaluations record only the kind of device.
        name = "GPU" if device.startswith("cuda") else device
        hours[name] = hours.get(name, 0.0) + run["seconds"] * run.get("processes", 1) / 3600
    return hours


def _hours(spent: float) -> str:
    return f"{spent:,.2f}" if spent >= 0.01 else "under 0.01"
