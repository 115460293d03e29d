"""How long a job takes, and how much memory, by the work that it has: before anything of it is there.

    data stages     by the bytes of the corpus' files; a part has its share of them
    trainings       tokens = rows x steps, by what the shards hold or, before there are any, by the files; time at the tokens
                    per second that this run had before, else by 6 FLOPs per parameter and token; memory by the parameters
    what ran here   of a job of the same name run.json tells seconds and peak memory, and half as much again is asked for: in
                    place of the estimate of a computing stage's memory where the spec is the same, else where it is more

Estimates err to the larger side, and are cut to what a partition gives (`cluster.limits`). Where one was too small,
the next attempt asks for twice what the last one had, if it ran out of just that (`cluster.job_endings`).
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
# What a file grows to when it is read.
GROWS = {".gz": 5, ".xz": 5, ".zst": 5, ".zip": 5, ".parquet": 3}
# Of a dataset or a model on the Hub that isn't here yet.
UNKNOWN_ROWS, UNKNOWN_PARAMETERS = GB, 8e9
# Bytes of text to a token; few, so that many tokens are expected.
BYTES_PER_TOKEN = 3
# As far as a training gets on one GPU in a second, where nobody has measured it: a sixth of what an A100 can.
FLOPS = 5e13
# Two Snakemakes and two shells stand around each job of a cluster.
AROUND_MB = 500
# Up to how many bytes of text the data jobs of a config are short.
SMALL = 200 * MB
COMPUTING_THREADS = 8
# A model whose name tells its size, such as Qwen2.5-7B.
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z])")


class Estimates:
    """Of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job]):
        self.jobs = tuple(jobs)
        self._requests: dict[str, ResourceRequest] = {}
        self._bytes: dict[str, float] = {}
        self._below: dict[str, tuple[Job, ...]] = {}

    def of(self, job: Job) -> ResourceRequest:
        """What the job needs."""
        if job.manifest not in self._requests:
            self._requests[job.manifest] = self._estimate(job)
        return self._requests[job.manifest]

    @cached_property
    def little_text(self) -> bool:
        """Whether there is so little of it that each data job takes seconds."""
        return sum(self.text(job) for job in self.jobs if job.stage == "corpus") <= SMALL

    def text(self, job: Job) -> float:
        """Bytes of text of the corpora that a job is made of."""
        if job.manifest not in self._bytes:
            if job.stage == "corpus":
                found = _size_of(job.spec.sources)
            else:
                found = sum(self.text(corpus) for corpus in self._corpora(job))
            self._bytes[job.manifest] = found
        return self._bytes[job.manifest]

    def _corpora(self, job: Job) -> tuple[Job, ...]:
        # Kept: of parts that read parts there are more ways down than jobs.
        if job.manifest not in self._below:
            found = {}
            for made in (one for some in job.artifacts.values() for one in some):
                # A tokenizer was trained on others.
                below = (made,) if made.stage == "corpus" else () if made.stage == "tokenizer" else self._corpora(made)
                found |= {one.manifest: one for one in below}
            self._below[job.manifest] = tuple(found.values())
        return self._below[job.manifest]

    def _estimate(self, job: Job) -> ResourceRequest:
        # Jobs of one array get what its first job asks for, so all of a stage ask alike.
        alike = [one for one in self.jobs if one.stage == job.stage] if STAGES[job.stage].array else [job]
        asks = [self._alone(one) for one in alike]
        found = ResourceRequest(
            threads=max(ask.threads for ask in asks),
            mem_mb=max(ask.mem_mb for ask in asks),
            runtime=max(ask.runtime for ask in asks),
            gpus=job.operation.gpus if STAGES[job.stage].gpu else 0,
            nodes=job.operation.nodes if "nodes" in STAGES[job.stage].operation else 1,
        )
        for one in alike:
            self._requests[one.manifest] = found
        return found

    def _alone(self, job: Job) -> ResourceRequest:
        computes = STAGES[job.stage].gpu
        cost = STAGES[job.stage].cost
        cost = cost(job.spec) if callable(cost) else cost
        ask = self._computing(job, cost) if isinstance(cost, ModelCost) else self._reading(job, cost)
        before = _facts(job)
        # What was measured of another spec, of files that have grown since, or of an attempt that only ended what others had
        # done, may be too little; and of processes on other nodes nobody knew.
        alike = computes and job.operation.nodes == 1 and bool(before) and _is_of(job)
        if peak := before.get("peak_memory_mb"):
            measured = 1.5 * peak * (job.operation.processes_per_node if computes else 1)
            ask["mem_mb"] = measured if alike else max(measured, ask["mem_mb"])
        if (seconds := before.get("seconds")) and "tokens_per_second_median" not in before:
            ask["runtime"] = max(5 + 1.5 * seconds / 60, ask["runtime"])
        return ResourceRequest(
            threads=ask["threads"], mem_mb=_rounded(ask["mem_mb"] + AROUND_MB, 100), runtime=_rounded(ask["runtime"], 1)
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
            # torch and CUDA in each process; weights as they are read and as they are put together; and on a CPU, where
            # only small ones are trained, all that an optimizer has of them.
            "mem_mb": 3000 * each + 6 * parameters / MB + 14 * min(parameters, 1e9) / MB,
            # Weights are read and written first and last.
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
    """How many parameters a model has, as far as that can be told without loading it.

    >>> parameters_of(Pretrained(path="Qwen/Qwen2.5-0.5B-Instruct")), parameters_of(Pretrained(path="openai-community/gpt2"))
    (500000000.0, 8000000000.0)
    >>> scratch = Scratch(hidden_size=128, intermediate_size=256, layers=3, heads=8)
    >>> parameters_of(scratch)
    8683520
    """
    if isinstance(base, Scratch):
        width, key_values = base.hidden_size, (base.key_value_heads or base.heads) * (base.hidden_size // base.heads)
        layer = 2 * width * (width + key_values) + 3 * width * base.intermediate_size
        # Of the largest vocabulary that is usual.
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
                # Whoever reads it says that it isn't there.
                continue
        total += UNKNOWN_ROWS if source.hub else 0
    return total


def _facts(job: Job) -> dict[str, Any]:
    """What run.json tells of the job's last run; nothing where there was none."""
    try:
        told = json.loads(Path(job.run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _is_of(job: Job) -> bool:
    """Whether the result that is there is of the job's spec."""
    try:
        told = json.loads(Path(job.manifest).read_text(encoding="utf-8"))
        return told["spec"] == json.loads(canonical(job.spec))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _tokens_in(pack: Job) -> float:
    """Tokens of the shards' rows, where they are there."""
    try:
        manifest = json.loads(Path(pack.manifest).read_text(encoding="utf-8"))
        return float(manifest["counts"]["train"]["tokens"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0


def _rounded(amount: float, step: int) -> int:
    return step * math.ceil(amount / step)
