"""Choose and encode prompts: the work of the `prompts` stage. `sampling.tables` lists the columns."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.errors import SnaketuneError
from snaketune.progress import progress
from snaketune.sampling.responses import Request
from snaketune.sampling.tables import OF_ROW, PROMPT_SCHEMA, PROMPTS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PromptsSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import Refused

SHOWN = 3


def write_prompts(spec: PromptsSpec, work: WorkFolder, corpora: list[Artifact], tokenizer: Artifact) -> Outcome:
    """Write `prompts.arrow`.

    Raises:
        SnaketuneError: there is no prompt, or one doesn't fit into the model with its response.
    """
    tokenizer.files()
    chat = ChatTokenizer.load(tokenizer.folder)
    # Refuses variables that the template doesn't use.
    chat.with_variables(json.dumps(spec.template_variables))
    positions = _positions(spec)
    left_out: Counter[str] = Counter()
    prompts: list[dict[str, Any]] = []
    chosen = [
        prompt for name, corpus in zip(spec.corpora, corpora, strict=True) for prompt in _prompts(name, corpus, spec)
    ]
    for prompt in progress(chosen, "encoding", "prompts", len(chosen)):
        variables = json.loads(prompt["template_variables"] or "{}") | spec.template_variables
        prompt["template_variables"] = json.dumps(variables) if variables else None
        try:
            ids = chat.encode_prompt(prompt["messages"], prompt["tools"], prompt["template_variables"])
        except Refused as reason:
            left_out[reason.reason] += 1
            if left_out[reason.reason] <= SHOWN:
                print(f"left out: prompt {prompt['id']} of {prompt['corpus']}: {reason}", flush=True)
            continue
        if spec.longest and len(ids) > spec.longest:
            left_out["longer"] += 1
            continue
        if positions and len(ids) + spec.new_tokens > positions:
            raise SnaketuneError(
                f"sample.prompts: prompt {prompt['id']} of {prompt['corpus']} has {len(ids)} tokens, and with "
                f"generation.max_new_tokens: {spec.new_tokens} it doesn't fit into the model's {positions} positions; set "
                f"prompts.longest: {max(1, positions - spec.new_tokens)}, which leaves such prompts out, or lower "
                "max_new_tokens"
            )
        prompts.append(prompt | {"tokens": ids.astype(np.int32), "digest": Request(ids).digest.hex()})
    if not prompts:
        why = ", ".join(f"{reason} {count}" for reason, count in left_out.items()) or f"no row in {spec.split}"
        raise SnaketuneError(f"sample.prompts: {', '.join(spec.corpora)} give no prompt ({why})")
    table = pa.Table.from_pylist(prompts, schema=PROMPT_SCHEMA)
    write_table(work.payload / PROMPTS, table)
    lengths = pc.list_value_length(table["tokens"])
    counts = {"prompts": len(table), "distinct": pc.count_distinct(table["digest"]).as_py(), "left_out": dict(left_out)}
    return Outcome(
        counts=counts, about={"tokens": {"longest": pc.max(lengths).as_py(), "all": pc.sum(lengths).as_py()}}
    )


def _positions(spec: PromptsSpec) -> int | None:
    """The positions of the model; None if it has no limit."""
    if isinstance(spec.base, Scratch):
        return spec.base.max_positions
    from snaketune.models.load_model import positions_of, read_config

    return positions_of(read_config(spec.base)) if isinstance(spec.base, Pretrained) else None


def _prompts(name: str, corpus: Artifact, spec: PromptsSpec) -> Iterator[dict[str, Any]]:
    """The prompts of a corpus' rows, by id."""
    table = read_table(corpus.file(f"{spec.split}.arrow"))
    # Ids are digests of the rows.
    order = pc.sort_indices(table["id"])
    for row in table.take(order[: spec.limit] if spec.limit else order).to_pylist():
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in _turns(row)]
        ends = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        last = len(turns) - 1 if "messages" in row else len(row["prompt"])
        for turn in ends if spec.turns == "all" else [last]:
            prompt = {"id": row["id"], "turn": turn, "corpus": name, "messages": turns[:turn]}
            prompt |= {key: row.get(key) for key in OF_ROW}
            # The answer is that of the last turn; a bad completion is no reference.
            answered = turn == last and row.get("label", True)
            reference = turns[turn]["content"] if turn < last or answered else None
            yield prompt | {"reference": reference, "answer": row.get("answer") if answered else None}


def _turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """The turns of a conversation, or the prompt of a pair and its better completion, or of an unpaired row and its own."""
    if "messages" in row:
        return row["messages"]
    return row["prompt"] + (row["chosen"] if "chosen" in row else row["completion"])[:1]
