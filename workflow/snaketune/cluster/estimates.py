"""Estimates of a job's time and memory, before anything of it exists.

    data stages     from the bytes of the corpus' files, divided by the number of parts
    trainings       tokens = rows x steps, from the shards or, before they exist, from the files; time from the tokens per
                    second of the run's last training, else from 6 FLOPs per parameter and token; memory from the parameters
    earlier runs    run.json of a job of the same name: 1.5 times its peak memory replaces the estimate of a computing stage
                    if the spec is the same and it runs on one node; otherwise 1.5 times memory and time raise the estimates

Estimates err on the high side, and are cut to the limits of a partition (`cluster.site`). If one was too small, the next
attempt requests twice what the last one had of the resource that ran out (`cluster.job_endings`).
"""

import json
import math
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import read_json
from snaketune.cluster.site import ResourceRequest
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.generation import Server
from snaketune.engine.threads import MIN_WIDTH_FOR_THREADS
from snaketune.locations import located, size_of
from snaketune.stages.declaration import Cost, ModelCost
from snaketune.stages.job import Job
from snaketune.stages.specs import ReproductionSpec, canonical
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
# Tokens per second of generation, before it was measured: a 7B in batches of 32, without a server's continuous batching.
GENERATED_PER_SECOND = 500
# Bytes of text per row; low, so that the number of rows is rather overestimated.
BYTES_PER_ROW = 200
# Prompts of a sample without a limit, before they were counted: a dataset of the Hub may have any number of rows.
MOST_PROMPTS = 20_000
# Of a server that the config names: answers per minute, and the memory of the job that asks.
ANSWERS_PER_MINUTE, ASKING_MB = 60, 1500
# Stages that compute nothing but what they may ask a server for.
ASKING = ("generate", "judge", "compare")
# Memory of the two Snakemake processes and two shells around each job of a cluster.
AROUND_MB = 500
# The data jobs of a config count as short up to this many bytes of text.
SMALL = 200 * MB
COMPUTING_THREADS = 8
# Bytes per trained parameter: of weights in float32, and of a checkpoint, which has AdamW's two averages too.
WEIGHTS, CHECKPOINT = 4, 12
# The parameters of adapters with a high rank, as a share of the model's.
ADAPTERS = 0.05
# Added to a time that was measured or computed from tokens, for a busy node or a slow disk.
MARGIN_MINUTES = 4.5
# The size in a model's name, such as Qwen2.5-7B.
BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z])")


class Estimates:
    def __init__(self, jobs: Iterable[Job]):
        self.jobs = tuple(jobs)
        self._requests: dict[str, ResourceRequest] = {}
        self._corpora: dict[str, dict[str, float]] = {}

    def of(self, job: Job) -> ResourceRequest:
        if job.manifest not in self._requests:
            # All jobs of one array get what its first job requests, so all jobs of such a stage request the same.
            alike = [task for task in self.jobs if task.stage == job.stage] if STAGES[job.stage].array else [job]
            threads, mem_mb, runtime = (max(sizes) for sizes in zip(*map(self._alone, alike)))
            estimate = ResourceRequest(
                threads=threads,
                mem_mb=mem_mb,
                runtime=runtime,
                gpus=job.operation.gpus if STAGES[job.stage].gpu else 0,
                nodes=job.operation.nodes if "nodes" in STAGES[job.stage].operation else 1,
            )
            self._requests |= {task.manifest: estimate for task in alike}
        return self._requests[job.manifest]

    @cached_property
    def little_text(self) -> bool:
        """Whether the corpora are so small that each data job takes seconds."""
        return sum(self._text(job) for job in self.jobs if job.stage == "corpus") <= SMALL

    def _text(self, job: Job) -> float:
        """The bytes of text that a job is made from."""
        return sum(self._sizes(job).values())

    def _written(self, job: Job) -> float:
        """The bytes of text of which a job writes the rows: of a part, its share; of a corpus in parts, whose files are links,
        none."""
        linked = job.stage == "corpus" and job.artifacts.get("decided")
        return 0.0 if linked else self._text(job) / getattr(job.spec, "parts", 1)

    def _sizes(self, job: Job) -> dict[str, float]:
        """The same by corpus. Cached: with parts that read parts, there are far more paths through the graph than jobs."""
        if job.manifest not in self._corpora:
            if job.stage in ("corpus", "read") and not job.artifacts.get("decided"):
                selected = sum(self._text(result) for result in job.artifacts.get("selected", ()))
                sizes = {job.manifest: _read(job.spec) + selected}
            else:
                # A tokenizer may be trained on other corpora.
                read = (
                    parent for parents in job.artifacts.values() for parent in parents if parent.stage != "tokenizer"
                )
                sizes = {manifest: size for parent in read for manifest, size in self._sizes(parent).items()}
            self._corpora[job.manifest] = sizes
        return self._corpora[job.manifest]

    def disk(self, job: Job) -> tuple[float, float]:
        """The bytes of a job's result; and of its checkpoints, which it removes: a new one is written beside the last, as are
        the weights of the best measurement."""
        cost, parameters = _cost(job), parameters_of(_base(job))
        lora, training = getattr(job.spec, "lora", None), getattr(job.spec, "training", None)
        trained = parameters * ADAPTERS if lora else parameters
        saved = trained if lora and lora != "continued" and not lora.merge else parameters
        result = cost.disk_per_parameter * saved
        if isinstance(cost, Cost):
            result += cost.disk_per_text * self._written(job)
        else:
            result += self._stored_tokens(job, cost)
        if not (training and cost.disk_per_parameter):
            return result, 0.0
        return result, (2 * CHECKPOINT + (2 * WEIGHTS if training.selects else 0)) * trained

    def _alone(self, job: Job) -> tuple[int, int, int]:
        """The threads, the memory in MB and the minutes of one job."""
        computes, cost = STAGES[job.stage].gpu, _cost(job)
        measured = read_json(job.run, {})
        if job.stage in ASKING and isinstance(job.operation.engine, Server):
            # The server computes.
            threads, mem_mb, minutes = 1, ASKING_MB, MARGIN_MINUTES + self._responses(job) / ANSWERS_PER_MINUTE
        elif isinstance(cost, ModelCost):
            rates = measured.get("tokens_per_second_median"), measured.get("generated_tokens_per_second")
            threads, mem_mb, minutes = self._computing(job, cost, *rates)
        else:
            threads, mem_mb, minutes = self._reading(job, cost)
        if peak := measured.get("peak_memory_mb"):
            peak *= 1.5 * (job.operation.processes_per_node if computes else 1)
            # A measurement of another spec, of files that have grown since, or of an attempt that only resumed another one may
            # be too low; and memory is measured on the first node only.
            alike = computes and job.operation.nodes == 1
            alike = alike and read_json(job.manifest, {}).get("spec") == json.loads(canonical(job.spec))
            mem_mb = peak if alike else max(peak, mem_mb)
        if (seconds := measured.get("seconds")) and "tokens_per_second_median" not in measured:
            minutes = max(MARGIN_MINUTES + 1.5 * seconds / 60, minutes)
        return threads, 100 * math.ceil((mem_mb + AROUND_MB) / 100), math.ceil(minutes)

    def _tokens(self, job: Job) -> float:
        """The tokens of a job's packs."""
        packs = (pack for role in ("pack", "packs") for pack in job.artifacts.get(role, ()))
        return sum(_tokens_in(pack) or self._text(pack) / BYTES_PER_TOKEN for pack in packs)

    def _stored_tokens(self, job: Job, cost: ModelCost) -> float:
        """The bytes of a teacher's tokens; 0 for other jobs. Of several parts, the job that gathers them stores all."""
        if not cost.disk_per_stored_token:
            return 0.0
        return cost.disk_per_stored_token * self._tokens(job) * job.spec.k / getattr(job.spec, "parts", 1)

    def _reading(self, job: Job, cost: Cost) -> tuple[int, float, float]:
        """The threads, the memory in MB and the minutes of a job that reads files."""
        text = self._written(job) / GB
        mem_mb, minutes = cost.mb + cost.mb_per_gb * text, cost.minutes + cost.minutes_per_gb * text
        if cost.bytes_per_parameter or cost.minutes_per_billion:
            parameters = parameters_of(_base(job))
            mem_mb += cost.bytes_per_parameter * parameters / MB
            minutes += cost.minutes_per_billion * parameters / 1e9
        return cost.threads, mem_mb, minutes

    def _computing(
        self, job: Job, cost: ModelCost, rate: float | None, measured_generation: float | None
    ) -> tuple[int, float, float]:
        """The same of a job that computes with a model. Args: its measured tokens per second, of a training and generated."""
        parameters, processes = parameters_of(_base(job)), job.operation.processes_per_node
        seconds = 0.0
        if cost.flops:
            training = getattr(job.spec, "training", None)
            rate = rate or FLOPS * job.operation.processes / (cost.flops * parameters)
            tokens = (training.epochs if training else 1) * self._tokens(job)
            if isinstance(job.spec, ReproductionSpec):
                # From the start, and from a snapshot.
                rows = 2 * job.spec.steps * job.spec.run.training.batch_rows
                tokens = min(tokens, rows * job.artifacts["pack"][0].spec.lengths[-1])
            seconds = tokens / rate / getattr(job.spec, "parts", 1)
        decoding = getattr(job.spec, "decoding", None)
        new_tokens = decoding.max_new_tokens if decoding else getattr(job.spec, "max_new_tokens", 0)
        seconds += self._responses(job) * new_tokens / (measured_generation or GENERATED_PER_SECOND)
        # torch and CUDA in each process; weights as read and as assembled; and on a CPU, which trains only small models, the
        # optimizer's states.
        mem_mb = 3000 * processes + 6 * parameters / MB + 14 * min(parameters, 1e9) / MB
        # What is stored is in memory before it is written.
        mem_mb += self._stored_tokens(job, cost) / MB
        width = _width(_base(job))
        threads = processes * (1 if 0 < width < MIN_WIDTH_FOR_THREADS else COMPUTING_THREADS)
        # Time to read and write the weights.
        return threads, mem_mb, MARGIN_MINUTES + 3 * parameters / 1e9 + 1.5 * seconds / 60

    def _responses(self, job: Job) -> float:
        """The number of responses that a job generates, or asks for; 0 of other stages, and of evaluations."""
        match job.stage:
            case "generate":
                return self._prompts(job.artifacts["prompts"][0]) * job.spec.responses / job.spec.parts
            case "judge":
                (sample,) = job.artifacts["samples"]
                return self._prompts(sample.artifacts["prompts"][0]) * sample.spec.responses
            case "compare":
                return 2 * job.spec.prompts * len(job.artifacts["evaluated"][0].spec.conversations)
        return 0

    def _prompts(self, job: Job) -> float:
        """The number of prompts of a sample: counted, if they are there, else as many rows as there may be."""
        counted = read_json(job.manifest, {}).get("counts", {}).get("prompts")
        limit = job.spec.limit * len(job.spec.corpora) if job.spec.limit else MOST_PROMPTS
        return counted or min(self._text(job) / BYTES_PER_ROW, limit)


def parameters_of(base: Pretrained | Scratch | None) -> float:
    """The number of a model's parameters, as far as it can be estimated without loading it.

    >>> parameters_of(Pretrained(path="Qwen/Qwen2.5-0.5B-Instruct")), parameters_of(Pretrained(path="openai-community/gpt2"))
    (500000000.0, 8000000000.0)
    >>> parameters_of(Scratch(hidden_size=128, intermediate_size=256, layers=3, heads=8))
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
    named = BILLIONS.findall(base.path.rpartition("/")[2])
    sizes = (float(number) * (1e9 if unit in "bB" else 1e6) for number, unit in named)
    return max(sizes, default=UNKNOWN_PARAMETERS)


def _width(base: Pretrained | Scratch | None) -> int:
    """The width of a model; 0 if it isn't known yet."""
    if isinstance(base, Scratch):
        return base.hidden_size
    return (read_json(f"{base.path}/config.json", {}).get("hidden_size") or 0) if base else 0


def _cost(job: Job) -> Cost | ModelCost:
    cost = STAGES[job.stage].cost
    return cost(job.spec) if callable(cost) else cost


def _base(job: Job) -> Pretrained | Scratch | None:
    """The base of a job's model. Those that a merge averages have one architecture."""
    if job.stage == "merge":
        first = job.spec.models[0]
        return _base(job.artifacts["models"][0]) if first.results else first.base
    base, models = getattr(job.spec, "base", None), job.artifacts.get("model", ())
    return _base(models[0]) if base is None and models else base


def _read(spec: Any) -> float:
    """The bytes of text that the sources of a corpus, or of a part of it, hold."""
    total = UNKNOWN_ROWS * sum(source.hub is not None for source in spec.sources)
    files = [file for source in spec.sources for file in source.files]
    ranges = getattr(spec, "ranges", ()) or ((1, 1, 1),) * len(files)
    for file, (first, last, pieces) in zip(files, ranges, strict=True):
        # A missing file is reported by the job that reads it.
        total += size_of(located(file)) * GROWS.get(Path(file).suffix, 1) * (last - first + 1) / pieces
    return total


def _tokens_in(pack: Job) -> float:
    """The number of tokens in the rows of a pack; 0 if it doesn't exist yet."""
    try:
        return float(read_json(pack.manifest, {})["counts"]["train"]["tokens"])
    except (ValueError, LookupError, TypeError):
        return 0.0
