"""The table of the scores of a sample's responses, as the stages `score`, `judge` and `rate` write it."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.sampling.tables import KEYS, PROMPTS, SCORE, SCORES
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tables import read_table, write_table

SHOWN = 3
Row = dict[str, Any]
# By name, the numbers of a response.
Numbers = dict[str, float]


def with_prompts(responses: pa.Table, samples: Artifact) -> list[tuple[Row, Row]]:
    """The responses of a sample, each with its prompt."""
    prompts = {(row["id"], row["turn"]): row for row in read_table(samples.file(PROMPTS)).to_pylist()}
    return [(row, prompts[row["id"], row["turn"]]) for row in responses.to_pylist()]


def write_score_table(
    work: WorkFolder, responses: pa.Table, found: Sequence[Numbers | str], example: str = ""
) -> tuple[dict[str, Any], float]:
    """Write `scores.arrow`: a row per response, in their order. Return the counts of the manifest, and the mean score.

    Args:
        found: the numbers of each response, or why there are none.
        example: is added to the error.
    Raises:
        SnaketuneError: no response has a score.
    """
    without: Counter[str] = Counter()
    numbers: list[Numbers] = []
    table = responses.select(KEYS)
    for key, value in zip(table.to_pylist(), found, strict=True):
        if isinstance(value, str):
            without[value] += 1
            if without[value] <= SHOWN:
                print(f"no score: response {key['index']} to {key['id']}: {value}", flush=True)
            value = {}
        numbers.append(value)
    known = [value[SCORE] for value in numbers if value]
    if not known:
        why = ", ".join(f"{count} × {reason}" for reason, count in without.most_common(SHOWN))
        raise SnaketuneError(f"none of the {len(found)} responses has a score ({why}){example}")
    for name in (SCORE, *sorted({name for value in numbers for name in value} - {SCORE})):
        table = table.append_column(name, pa.array([value.get(name) for value in numbers], pa.float64()))
    write_table(work.payload / SCORES, table)
    counts = {"responses": len(found), "scored": len(known), "without": dict(without)}
    return counts, math.fsum(known) / len(known)
