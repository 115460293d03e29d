"""Estimates of a job's time and memory, before anything of it exists.

    data stages     from the bytes of the corpus' files, divided by the number of parts
    trainings       tokens = rows x steps, from the shards or, before they exist, from the files; time from the tokens per
                    second of the run's last training, else from 6 FLOPs per parameter and token; memory from the parameters
    earlier runs    run.json of a job of the same name: 1.5 times its peak memory replaces the estimate of a computing stage
                    if the spec is the same and it runs on one node; otherwise 1.5 times memory and time raise the estimates

Estimates err on the high side, and are cut to the limits of a partition (`cluster.limits`). If one was too small, the next
attempt requests twice what the last one had of the resource that ran out (`cluster.job_endings`).
"""

import json
import math
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.cluster.limits import ResourceRequest
from snaketune.config.training_runs import Pretrained, Scratch
from snaketune.stages.declaration import Cost, ModelCost
from snaketune.stages.job import Job
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

MB, GB = 1e6, 1e9
# How much a compressed file grows when it is read.
GROWS = {".gz": 5, ".xz": 5, ".zst": 5, ".zip": 5, ".parquet": 3}
# For a dataset or a model on the Hub that isn't downloaded yet.
UNKNOWN_ROWS, UNKNOWN_PARAMETERS = GB, 8e9
# Bytes of text per token; low, so that the number of tokens is rather overestimated.
BYTES_PER_TOKEN = 3
# FLOPs per second of a training on one GPU before one was measured: a sixth of an A100's peak.
FLOPS = 5e13
# Memory of the two Snakemake processes and two shells around each job of a cluster.
AROUND_MB = 500
# The data jobs of a config count as short up to this many bytes of text.
SMALL = 200 * MB
COMPUTING_THREADS = 8
# The size in a model's name, such as Qwen2.5-7B.
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z])")


class Estimates:
    """The estimates of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job]):
        self.jobs = tuple(jobs)
        self._requests: dict[str, ResourceRequest] = {}
        self._bytes: dict[str, float] = {}
        self._below: dict[str, tuple[Job, ...]] = {}

    def of(self, job: Job) -> ResourceRequest:
        """Return the resources that the job needs."""
        if job.manifest not in self._requests:
            self._requests[job.manifest] = self._estimate(job)
        return self._requests[job.manifest]

    @cached_property
    def little_text(self) -> bool:
        """Whether the corpora are so small that each data job takes seconds."""
        return sum(self.text(job) for job in self.jobs if job.stage == "corpus") <= SMALL

    def text(self, job: Job) -> float:
        """Return the bytes of text of the corpora that a job is made from."""
        if job.manifest not in self._bytes:
            if job.stage == "corpus":
                size = _size_of(job.spec.sources)
            else:
                size = sum(self.text(corpus) for corpus in self._corpora(job))
            self._bytes[job.manifest] = size
        return self._bytes[job.manifest]

    def _corpora(self, job: Job) -> tuple[Job, ...]:
        # Cached: with parts that read parts, there are far more paths through the graph than jobs.
        if job.manifest not in self._below:
            corpora = {}
            for made in (one for some in job.artifacts.values() for one in some):
                # A tokenizer may be trained on other corpora.
                below = (made,) if made.stage == "corpus" else () if made.stage == "tokenizer" else self._corpora(made)
                corpora |= {one.manifest: one for one in below}
            self._below[job.manifest] = tuple(corpora.values())
        return self._below[job.manifest]

    def _estimate(self, job: Job) -> ResourceRequest:
        # All jobs of one array get what its first job requests, so all jobs of such a stage request the same.
        alike = [one for one in self.jobs if one.stage == job.stage] if STAGES[job.stage].array else [job]
        requests = [self._alone(one) for one in alike]
        estimate = ResourceRequest(
            threads=max(one.threads for one in requests),
            mem_mb=max(one.mem_mb for one in requests),
            runtime=max(one.runtime for one in requests),
            gpus=job.operation.gpus if STAGES[job.stage].gpu else 0,
            nodes=job.operation.nodes if "nodes" in STAGES[job.stage].operation else 1,
        )
        for one in alike:
            self._requests[one.manifest] = estimate
        return estimate

    def _alone(self, job: Job) -> ResourceRequest:
        computes = STAGES[job.stage].gpu
        cost = STAGES[job.stage].cost
        cost = cost(job.spec) if callable(cost) else cost
        estimate = self._computing(job, cost) if isinstance(cost, ModelCost) else self._reading(job, cost)
        measured_before = _facts(job)
        # A measurement of another spec, of files that have grown since, or of an attempt that only resumed another one may be
        # too low; and memory is measured on the first node only.
        alike = computes and job.operation.nodes == 1 and bool(measured_before) and _is_of(job)
        if peak := measured_before.get("peak_memory_mb"):
            measured = 1.5 * peak * (job.operation.processes_per_node if computes else 1)
            estimate["mem_mb"] = measured if alike else max(measured, estimate["mem_mb"])
        if (seconds := measured_before.get("seconds")) and "tokens_per_second_median" not in measured_before:
            estimate["runtime"] = max(5 + 1.5 * seconds / 60, estimate["runtime"])
        return ResourceRequest(
            threads=estimate["threads"],
            mem_mb=_rounded(estimate["mem_mb"] + AROUND_MB, 100),
            runtime=_rounded(estimate["runtime"], 1),
        )

    def _reading(self, job: Job, cost: Cost) -> dict[str, Any]:
        text = self.text(job) / getattr(job.spec, "parts", 1) / GB
        mem_mb, minutes = cost.mb, cost.minutes
        if cost.bytes_per_parameter or cost.minutes_per_billion:
            parameters = parameters_of(self._base(job))
            mem_mb += cost.bytes_per_parameter * parameters / MB
            minutes += cost.minutes_per_billion * parameters / 1e9
        return {
            "threads": cost.threads,
            "mem_mb": mem_mb + cost.mb_per_gb * text,
            "runtime": minutes + cost.minutes_per_gb * text,
        }

    def _computing(self, job: Job, cost: ModelCost) -> dict[str, Any]:
        parameters = parameters_of(self._base(job))
        each = job.operation.processes_per_node
        seconds = 0.0
        if cost.flops:
            learning = getattr(job.spec, "training", None)
            passes = learning.epochs if learning else 1
            rate = _facts(job).get("tokens_per_second_median") or FLOPS * job.operation.processes / (
                cost.flops * parameters
            )
            seconds = passes * self._tokens(job) / rate / getattr(job.spec, "parts", 1)
        return {
            "threads": COMPUTING_THREADS * each,
            # torch and CUDA in each process; weights as read and as assembled; and on a CPU, which trains only small models,
            # the optimizer's states.
            "mem_mb": 3000 * each + 6 * parameters / MB + 14 * min(parameters, 1e9) / MB,
            # Time to read and write the weights.
            "runtime": 5 + 3 * parameters / 1e9 + 1.5 * seconds / 60,
        }

    def _base(self, job: Job) -> Pretrained | Scratch | None:
        base = getattr(job.spec, "base", None)
        if base is None:
            for made in job.artifacts.get("model", ()):
                return self._base(made)
        return base

    def _tokens(self, job: Job) -> float:
        packs = [made for role in ("pack", "packs") for made in job.artifacts.get(role, ())]
        return sum(_tokens_in(pack) or self.text(pack) / BYTES_PER_TOKEN for pack in packs)


def parameters_of(base: Pretrained | Scratch | None) -> float:
    """Return the number of a model's parameters, as far as it can be estimated without loading it.

    >>> parameters_of(Pretrained(path="Qwen/Qwen2.5-0.5B-Instruct")), parameters_of(Pretrained(path="openai-community/gpt2"))
    (500000000.0, 8000000000.0)
    >>> scratch = Scratch(hidden_size=128, intermediate_size=256, layers=3, heads=8)
    >>> parameters_of(scratch)
    8683520
    """
    if isinstance(base, Scratch):
        width, key_values = base.hidden_size, (base.key_value_heads or base.heads) * (base.hidden_size // base.heads)
        layer = 2 * width * (width + key_values) + 3 * width * base.intermediate_size
        # Assumes a large vocabulary.
        return base.layers * layer + 64_000 * width * (1 if base.tie_embeddings else 2)
    if base is None:
        return UNKNOWN_PARAMETERS
    folder = Path(base.path)
    if folder.is_dir():
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return stored / 2 or UNKNOWN_PARAMETERS
    if found := BILLIONS.findall(base.path.rpartition("/")[2]):
        return max(float(number) * (1e9 if unit in "bB" else 1e6) for number, unit in found)
    return UNKNOWN_PARAMETERS


def _size_of(sources: Iterable[Any]) -> float:
    total = 0.0
    for source in sources:
        for file in map(Path, source.files):
            try:
                total += file.stat().st_size * GROWS.get(file.suffix, 1)
            except OSError:
                # A missing file is reported by the job that reads it.
                continue
        total += UNKNOWN_ROWS if source.hub else 0
    return total


def _facts(job: Job) -> dict[str, Any]:
    """Return the facts in run.json of the job's last run; empty if there is none."""
    try:
        facts = json.loads(Path(job.run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_of(job: Job) -> bool:
    """Return True if the existing result was made with the job's spec."""
    try:
        manifest = json.loads(Path(job.manifest).read_text(encoding="utf-8"))
        return manifest["spec"] == json.loads(canonical(job.spec))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _tokens_in(pack: Job) -> float:
    """Return the number of tokens in the rows of a pack; 0 if it doesn't exist yet."""
    try:
        manifest = json.loads(Path(pack.manifest).read_text(encoding="utf-8"))
        return float(manifest["counts"]["train"]["tokens"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def _rounded(amount: float, step: int) -> int:
    return step * math.ceil(amount / step)
