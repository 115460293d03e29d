"""Score the responses of a sample: the work of the `score` stage. `sampling.tables` lists the columns.

answer    1 or 0: whether the answer in the response is the one of the corpus' row; null without an answer in the row
python    what a function of the user's returns (`sampling.scorer`), kept by row; null for an error or a time-out
sum       of other scores of the same sample; null if one is
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file
from snaketune.patterns import TooSlow, search
from snaketune.progress import progress
from snaketune.sampling.answers import same_answer
from snaketune.sampling.scorer import Scorer
from snaketune.sampling.tables import OF_ROW, PROMPTS, RESPONSES, SCORE_FIELDS, SCORES
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ScoreSpec
from snaketune.tables import read_table, write_table

SCORE = "score"
# What a scorer returned is kept after as many rows.
ROWS_PER_FILE = 256
SHOWN = 3
# By name, the numbers of a response; or why there are none.
Numbers = dict[str, float]


def build(
    spec: ScoreSpec,
    work: WorkFolder,
    *,
    samples: Artifact,
    scores: Sequence[Artifact] = (),
    python: Sequence[Path] = (),
) -> Outcome:
    """Write `scores.arrow` to `work.payload`: a row per response, in their order.

    Args:
        scores: the summands, in the order of their weights.
    Raises:
        SnaketuneError: no response has a score, or the summands are of another sample.
    """
    responses = read_table(samples.file(RESPONSES))
    keys = responses.select(["id", "turn", "index"]).to_pylist()
    missing: Counter[str] = Counter()
    rows: list[str] = []
    if spec.weights:
        found = _sum(spec, keys, [read_table(part.file(SCORES)).to_pylist() for part in scores])
    else:
        prompts = {(row["id"], row["turn"]): row for row in read_table(samples.file(PROMPTS)).to_pylist()}
        given = [(response, prompts[response["id"], response["turn"]]) for response in responses.to_pylist()]
        if spec.answer:
            found = [_answer(spec.answer.pattern, response) for response, _ in given]
        else:
            found, rows = _python(spec, work, given, python[0])
    numbers: list[Numbers] = []
    for key, value in zip(keys, found, strict=True):
        if isinstance(value, str):
            missing[value] += 1
            if missing[value] <= SHOWN and spec.python:
                print(f"no score: response {key['index']} to {key['id']}: {value}", flush=True)
            value = {}
        numbers.append(value)
    if not any(numbers):
        why = ", ".join(f"{count} × {reason}" for reason, count in missing.most_common(SHOWN))
        raise SnaketuneError(f"none of the {len(keys)} responses has a score ({why})")
    names = [SCORE, *sorted({name for value in numbers for name in value} - {SCORE})]
    columns = {name: [value.get(name) for value in numbers] for name in names}
    schema = pa.schema([*SCORE_FIELDS, *((name, pa.float64()) for name in names)])
    table = pa.Table.from_pydict({key: [row[key] for row in keys] for key in ("id", "turn", "index")} | columns, schema)
    write_table(work.payload / SCORES, table)
    known = [value for value in columns[SCORE] if value is not None]
    counts = {"responses": len(keys), "scored": len(known), "without": dict(missing)}
    about = {"mean": math.fsum(known) / len(known)} | ({"rows": rows} if rows else {})
    return Outcome(counts=counts, about=about)


def _answer(pattern: str, response: dict[str, Any]) -> Numbers | str:
    if response["answer"] is None:
        return "the row has no answer"
    try:
        match = search(pattern, response["content"])
    except TooSlow as error:
        raise SnaketuneError(f"score.by.answer.pattern, response to {response['id']}: {error}") from None
    found = match.group(1).strip() if match and match.group(1) is not None else None
    return {SCORE: float(found is not None and same_answer(found, response["answer"]))}


def _sum(spec: ScoreSpec, keys: list[dict[str, Any]], tables: list[list[dict[str, Any]]]) -> list[Numbers | str]:
    found: list[Numbers | str] = []
    for number, key in enumerate(keys):
        rows = [table[number] if number < len(table) else {} for table in tables]
        if any({name: row.get(name) for name in key} != key for row in rows):
            raise SnaketuneError("score.by.sum: the summands are scores of another sample; sum scores of one")
        values = [row[SCORE] for row in rows]
        if None in values:
            found.append("a summand is missing")
        else:
            found.append({SCORE: math.fsum(weight * value for weight, value in zip(spec.weights, values, strict=True))})
    return found


def _python(
    spec: ScoreSpec, work: WorkFolder, given: list[tuple[dict[str, Any], dict[str, Any]]], file: Path
) -> tuple[list[Numbers | str], list[str]]:
    """What the function returns for each response, and the key of the rows that are kept."""
    store = RowStore(work.root, {"scorer": digest_file(file), "seconds": spec.seconds})
    store.mark(work)
    requests = [_request(response, prompt) for response, prompt in given]
    digests = [hashlib.sha256(digest_json(request).encode()).digest()[:16] for request in requests]
    known = {digest: json.loads(row) for digest, row in store.find(digests).items()}
    waiting = {digest: request for digest, request in zip(digests, requests) if digest not in known}
    if cached := len(set(digests)) - len(waiting):
        print(f"{cached} of {len(set(digests))} scores are cached", flush=True)
    added: dict[bytes, bytes] = {}
    with Scorer(file, spec.seconds) as scorer:
        for digest, request in progress(waiting.items(), "scoring", "responses", len(waiting)):
            value = known[digest] = scorer.score(request)
            # An error or a time-out may be another one next time.
            if isinstance(value, dict):
                added[digest] = json.dumps(value).encode()
            if len(added) == ROWS_PER_FILE:
                store.add(added)
                added = {}
    store.add(added)
    store.merge()
    return [known[digest] for digest in digests], [store.key]


def _request(response: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the function."""
    names = ("index", "reasoning", "content", "tool_calls", "tokens", "ended", "logp")
    row = {name: response[name] for name in names} | {name: prompt[name] for name in ("id", "turn", "corpus", *OF_ROW)}
    return {"prompt": prompt["messages"], "response": response["text"], "row": row}
