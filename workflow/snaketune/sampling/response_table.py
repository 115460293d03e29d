"""Join the responses of all parts to one table: the work of the `sample` stage.

One row per prompt and index, in the order of the prompts.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.sampling.responses import Request, first_stop
from snaketune.sampling.tables import PROMPTS, RESPONSE_SCHEMA, RESPONSES
from snaketune.sampling.turn_parts import TurnForm, TurnParts
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job import result_at
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SampleSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.control import any_of

# Entries of a part's spec that may differ between the parts of a sample.
OF_PART = ("part", "parts", "engine", "batch_size")


def build(
    spec: SampleSpec,
    work: WorkFolder,
    *,
    prompts: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write `prompts.arrow` and `responses.arrow` to `work.payload`.

    Args:
        model, base_layers, base: what the responses are of; only their digests are read.
        operation: with the pattern of the parts' manifests.
    Raises:
        SnaketuneError: a part is missing, belongs to another sample, or was made by another engine than the others.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    parts = _parts(spec, prompts, (*model, *base_layers), operation)
    found = {row["digest"]: row for part in parts for row in read_table(part.file(RESPONSES)).to_pylist()}
    form, rows, unread = TurnForm.of(chat), [], 0
    texts: dict[bytes, TurnParts] = {}
    for prompt in read_table(prompts.file(PROMPTS)).to_pylist():
        ids = np.array(prompt["tokens"], np.int32)
        before = chat.text(ids[-8:])
        for index in range(spec.responses):
            digest = Request(ids, index).digest
            if digest not in found:
                raise SnaketuneError(
                    f"{operation.parts}: response {index} to prompt {prompt['id']} is in no part; rebuild the parts"
                )
            response = found[digest]
            if digest not in texts:
                texts[digest] = _turn_parts(form, chat, before, response, spec.decoding.stop)
            parts_of_turn = texts[digest]
            unread += parts_of_turn.unread
            rows.append(
                {"id": prompt["id"], "turn": prompt["turn"], "prompt": prompt["digest"], "index": index}
                | {key: response[key] for key in ("text", "tokens", "ended", "logp")}
                | {key: getattr(parts_of_turn, key) for key in ("reasoning", "content", "tool_calls")}
                | {"answer": prompt["answer"], "reference": prompt["reference"]}
            )
    write_table(work.payload / RESPONSES, pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA))
    shutil.copyfile(prompts.file(PROMPTS), work.payload / PROMPTS)
    counts: dict[str, Any] = {
        "prompts": len(rows) // spec.responses,
        "responses": len(rows),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "ended": dict(Counter(row["ended"] for row in rows)),
        "without_logp": sum(row["logp"] is None for row in rows),
        "unread_tool_calls": unread,
    }
    engine = parts[0].manifest["engine"]
    about = {"engine": engine, "reproducible": engine["name"] == "transformers"}
    about["rows"] = sorted({key for part in parts for key in part.manifest["rows"]})
    return Outcome(counts=counts, about=about, run={"parts": len(parts)})


def _parts(spec: SampleSpec, prompts: Artifact, results: tuple[Artifact, ...], operation: Execution) -> list[Artifact]:
    """The results of all parts, which are checked to be of this sample and of one engine."""
    pattern = Path(operation.parts or "")
    manifests = sorted(pattern.parent.parent.glob(f"{pattern.parent.name}/{pattern.name}"))
    parts = [result_at(path) for path in manifests]
    expected = {"spec": spec.model_dump(mode="json", exclude={"engine"})}
    expected |= {"prompts": [prompts.content], "model": [result.content for result in results]}
    for part in parts:
        manifest, inputs = part.manifest, part.manifest["inputs"]
        stored = {"spec": {key: value for key, value in manifest["spec"].items() if key not in OF_PART}}
        stored |= {"prompts": inputs["prompts"], "model": inputs["model"] + inputs["base_layers"]}
        if different := [what for what, value in expected.items() if stored[what] != value]:
            raise SnaketuneError(
                f"{part.manifest_path} is no part of this sample (other {', '.join(different)}); rebuild it with: "
                f"{rebuild_command(part.manifest_path)}"
            )
    engines = {json.dumps(part.manifest["engine"], sort_keys=True): part.manifest_path for part in parts}
    if len(engines) > 1:
        made = ", ".join(f"{path} by {engine}" for engine, path in engines.items())
        raise SnaketuneError(
            f"the parts of one sample were generated by different engines ({made}); name one under sample.NAME.operation."
            "engine, and run again"
        )
    if not parts:
        raise SnaketuneError(f"{operation.parts}: there is no part")
    return parts


def _turn_parts(
    form: TurnForm, chat: ChatTokenizer, prompt: str, response: dict[str, Any], stops: tuple[str, ...]
) -> TurnParts:
    """The parts of a response; one without marks has its text as content. Args: prompt: the end of its text."""
    ids = response["tokens"]
    text = chat.text(ids[:-1] if ids and ids[-1] in chat.stop_ids else ids)
    turn = form.parts(prompt, text[: first_stop(text, stops)])
    if turn.reasoning is None and turn.tool_calls is None:
        return turn._replace(content=response["text"])
    return turn._replace(content=re.sub(any_of(chat.control.ids), "", turn.content))
