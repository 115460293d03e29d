"""Tables of all jobs, tokenizers and library versions, as text for the page."""

from dataclasses import dataclass
from typing import Any

from snaketune.report.data.calibration_runs import batch_plan_facts
from snaketune.report.data.results import Result, ResultSet, natural
from snaketune.report.text import clip, decimal, duration, percent, short, whole

SOURCE_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job, or all parts of one result: time, device and facts. `share` is relative to the longest time."""

    stage: str
    name: str
    seconds: str
    share: float
    device: str
    facts: str


@dataclass(frozen=True, kw_only=True)
class TokenizerRow:
    """One tokenizer."""

    name: str
    kind: str
    vocabulary: str
    trained_on: str
    parity: str
    samples: list[dict[str, Any]]


def job_rows(results: ResultSet) -> list[JobRow]:
    """A row per job in the order of the stages; the parts of one result share a row."""
    jobs: dict[tuple[str, str], list[Result]] = {}
    for result in results.all:
        jobs.setdefault((result.stage, result.name_without_part), []).append(result)
    seconds = {
        job: sum(known) if (known := [p.run["seconds"] for p in parts if p.run.get("seconds") is not None]) else None
        for job, parts in jobs.items()
    }
    longest = max((spent or 0.0 for spent in seconds.values()), default=0.0)
    return [
        JobRow(
            stage=job[0],
            name=job[1],
            seconds=duration(seconds[job]),
            share=(seconds[job] or 0.0) / longest if longest else 0.0,
            device=str(parts[0].run.get("device", "")),
            facts=", ".join(([f"{len(parts):,} parts"] if len(parts) > 1 else []) + _facts(parts[0])),
        )
        for job, parts in jobs.items()
    ]


def _facts(result: Result) -> list[str]:
    manifest, counts, run = result.manifest, result.counts, result.run
    facts = []
    if parameters := manifest.get("parameters"):
        trainable = manifest.get("trainable_parameters", parameters)
        facts.append(
            f"{short(parameters)} parameters" + (f", {short(trainable)} trained" if trainable != parameters else "")
        )
    if steps := counts.get("steps"):
        facts.append(f"{whole(steps)} steps")
    if manifest.get("trainer"):
        facts.append(f"trainer {manifest['trainer']}")
    facts += [str(manifest[key]) for key in ("dtype", "kernel") if manifest.get(key)]
    if run.get("processes", 1) > 1:
        facts.append(f"{run['processes']} processes")
    if len(attempts := run.get("attempts", [])) > 1:
        facts.append(f"{len(attempts)} attempts, the last one {duration(attempts[-1])}")
    facts += batch_plan_facts(run)
    if rate := run.get("tokens_per_second_median") or run.get("tokens_per_second"):
        facts.append(f"{short(rate)} tokens/s")
    facts += _share_of_peak(run)
    if memory := run.get("peak_memory_gb"):
        facts.append(f"{decimal(memory)} GB {run['peak_memory_is']}")
    if prompts := counts.get("prompts"):
        facts.append(f"{whole(prompts)} prompts answered")
    return facts


def _share_of_peak(run: dict[str, Any]) -> list[str]:
    """MFU and the peak that it is relative to; for older results, FLOP/s."""
    if share := run.get("mfu_median"):
        peak = f"{short(run['peak_flops_per_second'])}FLOP/s ({run['peak_flops_source']})"
        return [f"MFU {percent(share)}: {run['flops']['counted']}, of {peak}"]
    if flops := run.get("model_tflops_per_second"):
        return [f"{short(flops * 1e12)}FLOP/s at {run['flops_per_parameter_and_token']} per parameter and token"]
    return []


def tokenizer_rows(results: ResultSet) -> list[TokenizerRow]:
    """A row per tokenizer, sorted by name."""
    rows = []
    for result in results.of("tokenizer"):
        spec, parity = result.spec, result.manifest.get("parity")
        adopted = spec.get("adopt")
        kind = f"adopted: {adopted}" + (f" at {spec['revision']}" if spec.get("revision") else "") if adopted else None
        trained_on = (
            f"{whole(result.counts['texts'])} texts, {short(result.counts['bytes'])}B" if result.counts else "–"
        )
        rows.append(
            TokenizerRow(
                name=result.name,
                kind=kind or f"trained: {spec['model']}",
                vocabulary=whole(result.manifest.get("vocab_size")),
                trained_on=trained_on,
                parity=f"equals sentencepiece on {whole(parity['texts'])} texts" if parity else "–",
                samples=[
                    sample | {"supervised_text": [clip(text, SOURCE_CHARACTERS) for text in sample["supervised_text"]]}
                    for sample in result.manifest.get("samples", [])
                ],
            )
        )
    return rows


def versions(results: ResultSet) -> dict[str, list[str]]:
    """All versions of each library that shaped a result. More than one means that results were made with different versions."""
    by_library: dict[str, set[str]] = {}
    for result in results.all:
        for library, version in result.manifest.get("versions", {}).items():
            by_library.setdefault(library, set()).add(version or "not installed")
        if result.run.get("python"):
            by_library.setdefault("python", set()).add(result.run["python"])
    return {library: sorted(versions_, key=natural) for library, versions_ in sorted(by_library.items())}
