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
from snaketune.config.operation import Execution
from snaketune.sampling.engines import engine_of, resolve
from snaketune.sampling.responses import batches
from snaketune.sampling.sampled import Sampled
from snaketune.sampling.tables import PART_SCHEMA, PROMPTS, RESPONSES
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import GenerateSpec
from snaketune.tables import read_table, write_table


def build(
    spec: GenerateSpec,
    work: WorkFolder,
    *,
    prompts: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write this part's `responses.arrow` to `work.payload`.

    Args:
        model, base_layers: the model's result and its base layers; empty for a base model.
        base: files of a local base model, which `spec.base` names.
        operation: with the engine.
    Raises:
        SnaketuneError: the engine isn't there, doesn't serve this model, or fails.
    """
    sampled = Sampled(
        results=(*model, *base_layers),
        base=spec.base,
        trust_remote_code=spec.trust_remote_code,
        tokenizer=tokenizer,
        decoding=spec.decoding,
        frozen=spec.frozen_weights,
        base_files=base,
        operation=operation,
        work=work,
    )
    tokens = read_table(prompts.for_part(spec.part).file(PROMPTS))["tokens"]
    encoded = [np.array(ids, np.int32) for ids in tokens.to_pylist()]
    wanted = batches(encoded, spec.responses, spec.batch_size)[spec.part - 1 :: spec.parts]
    name = resolve(operation.engine, operation.vllm, sampled.compute.device.type)
    cache = sampled.cache(engine_of(name, sampled, max(map(len, encoded)) + spec.decoding.max_new_tokens))
    started = time.monotonic()
    generated, tokens_generated = cache.complete(wanted)
    seconds = time.monotonic() - started
    digests = [request.digest for batch in wanted for request in batch]
    rows = [{"digest": digest, **cache.known[digest]._asdict()} for digest in digests]
    write_table(work.payload / RESPONSES, pa.Table.from_pylist(rows, schema=PART_SCHEMA))
    length = sum(len(row["tokens"]) for row in rows)
    run = {
        "device": str(sampled.compute.device),
        "responses_generated": generated,
        "generation_seconds": round(seconds, 1),
    }
    if generated:
        run["generated_tokens_per_second"] = round(tokens_generated / seconds, 1)
    run |= cache.engine.run()
    about = {"engine": cache.engine.about(), "rows": [cache.rows.key]}
    return Outcome(counts={"responses": len(rows), "tokens": length}, about=about, run=run)
