"""Reference log-probabilities can't be read back missing, broken, or for another model, other pairs, another computation."""

import math
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.errors import SnaketuneError
from snaketune.tables import write_table
from snaketune.training.reference import ROUNDING, check_policy_is_reference, check_ref_logps, read_ref_logps, schema
from tests.models.conftest import CPU


def artifact(tmp_path, chosen: float | None = -1.0, **manifest) -> Artifact:
    columns = {
        "id": ["p", "q"], "split": ["train", "held_out"], "chosen_logp": [chosen, -3.0], "rejected_logp": [-2.0, -4.0],
        "chosen_tokens": [2, 3], "rejected_tokens": [4, 5],
    }  # fmt: skip
    folder = tmp_path / "logps"
    folder.mkdir()
    write_table(folder / "logps.arrow", pa.table(columns, schema=schema()))
    facts = {"inputs": {"model": ["m"], "pack": ["r"]}, "dtype": "float32", "kernel": "sdpa"} | manifest
    return Artifact(tmp_path / "manifest.json", {**facts, "payload": describe_files(folder), "records": {}}, folder)


class Named:
    def __init__(self, content):
        self.content = content


def test_values_come_back_by_pair_and_split(tmp_path):
    found = read_ref_logps(artifact(tmp_path), "train")
    assert list(found) == ["p"]
    assert (found["p"].chosen_logp, found["p"].rejected_tokens) == (-1.0, 4)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, math.inf])
def test_a_missing_or_infinite_value_is_an_error(tmp_path, value):
    with pytest.raises(SnaketuneError, match="chosen_logp of pair p"):
        read_ref_logps(artifact(tmp_path, value), "train")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("model", {"model": [Named("other")]}),
        ("pairs", {"pack": Named("other")}),
        ("dtype", {"compute": replace(CPU, dtype=torch.bfloat16)}),
        ("kernel", {"compute": replace(CPU, kernel="varlen")}),
    ],
)
def test_an_artifact_of_something_else_is_refused_with_what_differs(tmp_path, what, expected):
    arguments = {"model": [Named("m")], "pack": Named("r"), "compute": CPU}
    made = artifact(tmp_path)
    check_ref_logps(made, **arguments)
    with pytest.raises(SnaketuneError, match=rf"\({what}: .*--forcerun"):
        check_ref_logps(made, **(arguments | expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_with_noise_in_training_is_refused_though_the_noise_is_small(dtype):
    """phimoe's experts are drawn in training, which no setting turns off."""
    counts, zero = torch.full((2, 2), 10), torch.zeros(2, 2)
    rounding = 10 * ROUNDING[dtype]
    check_policy_is_reference(zero + 0.9 * rounding, zero + 0.85 * rounding, counts, dtype)
    with pytest.raises(SnaketuneError, match="in training from itself in evaluation"):
        check_policy_is_reference(zero + 0.9 * rounding, zero + 0.5 * rounding, counts, dtype)
    with pytest.raises(SnaketuneError, match="from its own reference"):
        check_policy_is_reference(zero + 1.1 * rounding, zero + 1.1 * rounding, counts, dtype)
