"""Generate the responses to one part of a sample's prompts: the work of the `generate` stage.

Parts take turns in the batches, which are the same for any number of parts. Responses are kept by row as they are finished, so
an attempt that was killed repeats a batch at most, and of a server's what arrived within a second or was on its way.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.config.generation import Server
from snaketune.config.operation import Execution
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.devices import Compute, resolve_compute, use_threads
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.load_model import set_special_tokens
from snaketune.sampling.engines import resolve, server_engine
from snaketune.sampling.generation_check import choose_generation_mode
from snaketune.sampling.memory import check_memory
from snaketune.sampling.responses import Engine, ResponseCache, batches, key_parts
from snaketune.sampling.tables import PART_SCHEMA, PROMPTS, RESPONSES
from snaketune.sampling.transformers_engine import TransformersEngine
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import GenerateSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer


def generate_part(
    spec: GenerateSpec,
    work: WorkFolder,
    prompts: Artifact,
    tokenizer: Artifact,
    *,
    results: tuple[Artifact, ...],
    base_files: Sequence[Path],
    operation: Execution,
) -> Outcome:
    """Write `responses.arrow`.

    Args:
        results: the model's result and its base layers; empty for a base model.
    Raises:
        SnaketuneError: the engine isn't there, doesn't serve this model, or fails.
    """
    for result in (tokenizer, *results):
        result.files()
    chat, compute = ChatTokenizer.load(tokenizer.folder), resolve_compute("auto")
    stack = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer.folder, trust_remote_code=spec.trust_remote_code
    )
    weights_dtype = compute.weights_dtype(frozen=spec.frozen_weights)
    tokens = read_table(prompts.for_part(spec.part).file(PROMPTS))["tokens"]
    encoded = [np.array(ids, np.int32) for ids in tokens.to_pylist()]
    wanted = batches(encoded, spec.responses, spec.batch_size)[spec.part - 1 :: spec.parts]
    name = resolve(operation.engine, operation.vllm, compute.device.type)
    longest = max(map(len, encoded)) + spec.decoding.max_new_tokens
    if not isinstance(name, Server) and (config := stack.config() or stack.new_config()):
        gpus = max(1, operation.gpus)
        # vLLM has as many at a time as fit, and divides all of it among its GPUs.
        rows = max(map(len, wanted), default=1) if name == "transformers" else 1
        check_memory(config, compute, weights_dtype, rows=rows, tokens=longest, gpus=gpus if name == "vllm" else 1)
    if name == "transformers":
        engine: Engine = _transformers_engine(spec, stack, chat, compute)
    else:
        engine = server_engine(
            name,
            environment=operation.vllm,
            stack=stack,
            tokenizer=tokenizer,
            chat=chat,
            decoding=spec.decoding,
            compute=compute,
            frozen=spec.frozen_weights,
            gpus=operation.gpus,
            longest=longest,
            work=work,
        )
    cache = ResponseCache(
        work,
        engine,
        key_parts(
            results=results,
            base=spec.base,
            base_files=base_files,
            tokenizer=tokenizer,
            decoding=spec.decoding,
            work_root=work.root,
        ),
    )
    started = time.monotonic()
    generated, tokens_generated = cache.complete(wanted)
    seconds = time.monotonic() - started
    digests = [request.digest for batch in wanted for request in batch]
    rows = [{"digest": digest, **cache.known[digest]._asdict()} for digest in digests]
    write_table(work.payload / RESPONSES, pa.Table.from_pylist(rows, schema=PART_SCHEMA))
    length = sum(len(row["tokens"]) for row in rows)
    run = {"device": str(compute.device), "responses_generated": generated, "generation_seconds": round(seconds, 1)}
    if generated:
        run["generated_tokens_per_second"] = round(tokens_generated / seconds, 1)
    if isinstance(name, Server):
        run["url"] = name.url
    about = {"engine": engine.about(), "rows": [cache.rows.key]}
    return Outcome(counts={"responses": len(rows), "tokens": length}, about=about, run=run)


def _transformers_engine(
    spec: GenerateSpec, stack: AdapterStack, chat: ChatTokenizer, compute: Compute
) -> TransformersEngine:
    weights_dtype = compute.weights_dtype(frozen=spec.frozen_weights)
    loaded = stack.load(weights_dtype)
    set_special_tokens(loaded, chat)
    loaded = loaded.to(compute.device)
    use_threads(loaded.config, compute)
    # Before the model's own attention is replaced.
    mode = choose_generation_mode(loaded, chat, compute)
    use_own_attention(loaded)
    return TransformersEngine(model=loaded, chat=chat, compute=compute, mode=mode, decoding=spec.decoding)
