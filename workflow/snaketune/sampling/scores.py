"""Score the responses of a sample: the work of the `score` stage. `sampling.tables` lists the columns.

answer    1 or 0: whether the answer in the response is the one of the corpus' row; null without an answer in the row
python    what a function of the user's returns (`sampling.scorer`), kept by row; null for an error or a time-out
sum       of other scores of the same sample; null if one is
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import islice
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
from snaketune.sampling.score_table import Numbers, Row, with_prompts, write_score_table
from snaketune.sampling.scorer import Scorer
from snaketune.sampling.tables import KEYS, OF_ROW, RESPONSES, SCORE, SCORES
from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ScoreSpec
from snaketune.tables import read_table

# What a scorer returned is kept after as many rows.
ROWS_PER_FILE = 256


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
    rows: list[str] = []
    if spec.weights:
        found = _sum(spec, responses, [read_table(part.file(SCORES)) for part in scores])
    elif spec.answer:
        found = [_answer(spec.answer.pattern, response) for response in responses.to_pylist()]
    else:
        found, rows = _python(spec, work, with_prompts(responses, samples), python[0])
    counts, mean = write_score_table(work, responses, found)
    return Outcome(counts=counts, about={"mean": mean} | ({"rows": rows} if rows else {}))


def _answer(pattern: str, response: dict[str, Any]) -> Numbers | str:
    if response["answer"] is None:
        return "the row has no answer"
    try:
        match = search(pattern, response["content"])
    except TooSlow as error:
        raise SnaketuneError(f"score.by.answer.pattern, response to {response['id']}: {error}") from None
    found = match.group(1).strip() if match and match.group(1) is not None else None
    return {SCORE: float(found is not None and same_answer(found, response["answer"]))}


def _sum(spec: ScoreSpec, responses: pa.Table, tables: list[pa.Table]) -> list[Numbers | str]:
    if any(table.select(KEYS) != responses.select(KEYS) for table in tables):
        raise SnaketuneError("score.by.sum: the summands are scores of another sample; sum scores of one")
    found: list[Numbers | str] = []
    for values in zip(*(table[SCORE].to_pylist() for table in tables), strict=True):
        if None in values:
            found.append("a summand is missing")
        else:
            found.append({SCORE: math.fsum(weight * value for weight, value in zip(spec.weights, values, strict=True))})
    return found


def _python(
    spec: ScoreSpec, work: WorkFolder, given: list[tuple[Row, Row]], file: Path
) -> tuple[list[Numbers | str], list[str]]:
    """What the function returns for each response, and the key of the rows that are kept."""
    store = RowStore(work.root, {"scorer": digest_file(file), "seconds": spec.seconds})
    store.mark(work)
    requests = [_request(response, prompt) for response, prompt in given]
    digests = [hashlib.sha256(digest_json(request).encode()).digest()[:16] for request in requests]
    by_digest = dict(zip(digests, requests, strict=True))
    # They aren't kept: an error or a time-out may be another one next time.
    failures: dict[bytes, str] = {}

    def scored(missing: list[bytes]) -> Iterator[dict[bytes, Numbers]]:
        with Scorer(file, spec.seconds) as scorer:
            returned = ((digest, scorer.score(by_digest[digest])) for digest in missing)
            returned = progress(returned, "scoring", "responses", len(missing))
            while rows := dict(islice(returned, ROWS_PER_FILE)):
                failures.update({digest: value for digest, value in rows.items() if isinstance(value, str)})
                yield {digest: value for digest, value in rows.items() if not isinstance(value, str)}

    kept, _ = store.completed(digests, scored, "scores")
    found = kept | failures
    return [found[digest] for digest in digests], [store.key]


def _request(response: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the function."""
    names = ("index", "reasoning", "content", "tool_calls", "tokens", "ended", "logp")
    row = {name: response[name] for name in names} | {name: prompt[name] for name in ("id", "turn", "corpus", *OF_ROW)}
    return {"prompt": prompt["messages"], "response": response["text"], "row": row}
