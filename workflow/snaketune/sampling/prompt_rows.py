"""Choose and encode prompts: the work of the `prompts` stage. `sampling.tables` lists the columns.

Rows are taken by id, which is a digest, so that is a random order. `skip` moves the first rows to the end, for a sample after
one that has taken them. A row is solved if, in the last of the earlier samples that has it, all responses have the highest
score of that sample, and unsolved if all have the lowest. Of both, a share is chosen by their ids.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.errors import SnaketuneError
from snaketune.progress import progress
from snaketune.sampling.responses import Request
from snaketune.sampling.tables import OF_ROW, PROMPT_SCHEMA, PROMPTS, SCORES
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PromptsSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import Refused

SHOWN = 3


def build(
    spec: PromptsSpec,
    work: WorkFolder,
    *,
    corpora: list[Artifact],
    tokenizer: Artifact,
    base: list[Path],
    scores: Sequence[Artifact] = (),
) -> Outcome:
    """Write `prompts.arrow` to `work.payload`.

    Args:
        base: config.json of a local base model, which `spec.base` names.
        scores: of earlier samples, by which prompts are settled; the last one last.
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
    known = _known(scores)
    chosen: list[dict[str, Any]] = []
    for name, corpus in zip(spec.corpora, corpora, strict=True):
        table = read_split(corpus, spec.split)
        rows = _order(table["id"].to_pylist(), spec.skip)
        reasons = [_left_out(table["id"][row].as_py(), known, spec) for row in rows]
        left_out.update(filter(None, reasons))
        rows = [row for row, reason in zip(rows, reasons, strict=True) if not reason]
        chosen += _prompts(name, table.take(rows[: spec.limit]), spec)
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


def _order(ids: list[str], skip: int) -> list[int]:
    """The rows by id, the first `skip` last; where these are all rows, it starts again.

    >>> _order(["c", "a", "b"], 0), _order(["c", "a", "b"], 1), _order(["c", "a", "b"], 4)
    ([1, 2, 0], [2, 0, 1], [2, 0, 1])
    """
    rows = sorted(range(len(ids)), key=ids.__getitem__)
    first = skip % len(rows) if rows else 0
    return rows[first:] + rows[:first]


def _known(scores: Sequence[Artifact]) -> dict[str, str]:
    """The rows that are solved or unsolved, by id; other rows that have scores are "". A row with several prompts is what all
    of them are."""
    known: dict[str, str] = {}
    for artifact in scores:
        of_row: dict[str, set[float]] = {}
        for row in read_table(artifact.file(SCORES)).select(["id", "score"]).to_pylist():
            if row["score"] is not None:
                of_row.setdefault(row["id"], set()).add(row["score"])
        low, high = (bound(map(bound, of_row.values()), default=0.0) for bound in (min, max))
        named = {high: "solved", low: "unsolved"} if low < high else {}
        known |= {id: named.get(next(iter(found)), "") if len(found) == 1 else "" for id, found in of_row.items()}
    return known


def _left_out(id: str, known: dict[str, str], spec: PromptsSpec) -> str | None:
    """Why a row isn't sampled again: it is `solved` or `unsolved`, and not among the share of these that are."""
    reason = known.get(id)
    if not reason:
        return None
    # Not by the id's own digits: rows are taken in the order of these.
    place = int.from_bytes(hashlib.sha256(id.encode()).digest()[:4]) / 2**32
    return reason if place >= getattr(spec, reason) else None


def _prompts(name: str, table: pa.Table, spec: PromptsSpec) -> Iterator[dict[str, Any]]:
    """The prompts of rows of a corpus."""
    for row in table.to_pylist():
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
