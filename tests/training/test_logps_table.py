"""Reference log-probabilities: missing or invalid ones, and those of another model, of other pairs or from another computation,
are refused."""

import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.model.kernels import KERNELS
from snaketune.engine.reference_check import ROUNDING, check_policy_is_reference
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import RefLogpsSpec
from snaketune.tables import write_table
from snaketune.training.reference.cache_key import KERNEL_FAMILIES
from snaketune.training.reference.logps_table import (
    check_computed_alike,
    is_comparable,
    read_ref_logps,
    schema,
    sort_rows,
)
from tests.models.conftest import CPU
from tests.stages.demo_jobs import job_of

ROWS = {
    "id": ["p", "p", "q", "q"],
    "split": ["train", "train", "held_out", "held_out"],
    "completion": [0, 1, 0, 1],
    "logp": [-1.0, -2.0, -3.0, -4.0],
    "tokens": [2, 4, 3, 5],
}
TOKENS = {"token_logps": [[-0.5, -0.5], [-0.5] * 4, [-1.0] * 3, [-0.8] * 5]}
SPEC = RefLogpsSpec(precision="auto", frozen_weights=False, quantization=None, trust_remote_code=False)


def artifact(folder, columns: dict | None = None, spec: RefLogpsSpec = SPEC, **manifest) -> Artifact:
    columns = columns or ROWS
    logps = folder / "logps"
    logps.mkdir()
    write_table(logps / "logps.arrow", pa.table(columns, schema=schema("token_logps" in columns)))
    facts = {"inputs": {"model": ["m"], "base_layers": ["b"], "pack": ["r"]}, "spec": spec.model_dump(mode="json")}
    facts |= {"stage": "ref_logps", "dtype": "float32", "weights_dtype": "float32", "kernel": "sdpa"} | manifest
    return Artifact(folder / "manifest.json", {**facts, "payload": describe_files(logps), "records": {}}, logps)


class Named:
    def __init__(self, content):
        self.content = content


def test_values_are_read_by_pair_and_split(tmp_path):
    references = read_ref_logps(artifact(tmp_path), "train")
    assert list(references) == ["p"]
    assert (references["p"].logps[0], references["p"].tokens[1], references["p"].token_logps) == (-1.0, 4, None)


def test_values_per_token_are_read_if_stored(tmp_path):
    references = read_ref_logps(artifact(tmp_path, ROWS | TOKENS), "held_out")
    _, rejected = references["q"].token_logps
    assert rejected.tolist() == pytest.approx([-0.8] * 5)
    assert rejected.dtype == "float32"


def test_rows_are_sorted_and_deduplicated(tmp_path):
    table = pa.table(ROWS | TOKENS, schema=schema(True))
    mixed = pa.concat_tables([table.slice(2), table, table.slice(1, 1)])
    assert sort_rows(mixed).equals(table)
    assert not len(sort_rows(table.slice(0, 0)))


def test_the_table_is_read_with_pyarrow_alone(tmp_path):
    made = artifact(tmp_path, ROWS | TOKENS)
    program = """
import sys
import pyarrow as pa
with pa.memory_map(sys.argv[1]) as file:
    table = pa.ipc.open_file(file).read_all()
    assert table.to_pylist()[1] == {
        "id": "p", "split": "train", "completion": 1, "logp": -2.0, "tokens": 4, "token_logps": [-0.5] * 4
    }, table
assert not {"snaketune", "torch", "numpy.random"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-I", "-c", program, str(made.file("logps.arrow"))], check=True)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, math.inf])
def test_a_missing_or_infinite_value_is_an_error(tmp_path, value):
    with pytest.raises(SnaketuneError, match="logp of the chosen completion of pair p"):
        read_ref_logps(artifact(tmp_path, ROWS | {"logp": [value, -2.0, -3.0, -4.0]}), "train")
    (tmp_path / "tokens").mkdir()
    tokens = {"token_logps": [*TOKENS["token_logps"][:3], [-1.0, value, -1.0, -1.0, -1.0]]}
    with pytest.raises(SnaketuneError, match="token_logps of the rejected completion of pair q"):
        read_ref_logps(artifact(tmp_path / "tokens", ROWS | tokens), "train")


def test_a_pair_without_one_of_its_completions_is_an_error(tmp_path):
    with pytest.raises(SnaketuneError, match="other than two completions"):
        read_ref_logps(artifact(tmp_path, {key: column[1:] for key, column in ROWS.items()}), "train")


HERE = {"compute": CPU, "model": [Named("m"), Named("b")], "pairs": "r", "share_kernels": False}


@pytest.mark.parametrize(
    ("what", "here"),
    [
        ("model", {"model": [Named("other"), Named("b")]}),
        ("model", {"model": [Named("m"), Named("other")]}),
        ("model", {"model": [Named("m")]}),
        ("pairs", {"pairs": "other"}),
        ("dtype", {"compute": replace(CPU, dtype=torch.bfloat16)}),
        ("kernel", {"compute": replace(CPU, kernel="varlen")}),
    ],
)
def test_another_references_artifact_is_refused_with_the_difference(tmp_path, what, here):
    made = artifact(tmp_path)
    check_computed_alike(made, **HERE)
    with pytest.raises(SnaketuneError, match=rf"{what}: .*rm -r \S+/ref_logps/\S+ && rm .*manifest.json && snakemake"):
        check_computed_alike(made, **(HERE | here))


def test_another_kernel_family_is_refused_unless_shared(tmp_path):
    made = artifact(tmp_path, kernel="flash_attention_2")
    for kernel in ("flash_attention_2", "flash_attention_4"):
        check_computed_alike(made, **(HERE | {"compute": replace(CPU, kernel=kernel)}))
        assert is_comparable(made, replace(CPU, kernel=kernel))
    with pytest.raises(SnaketuneError, match=r"kernel: flash there, sdpa here.*reference_pass\.share_kernels"):
        check_computed_alike(made, **HERE)
    check_computed_alike(made, **(HERE | {"share_kernels": True}))


def test_an_external_reference_is_checked_against_the_pairs_that_it_was_made_of(tmp_path):
    made = artifact(tmp_path, inputs={"model": [], "base_layers": [], "pack": ["r"]})
    check_computed_alike(made, **(HERE | {"model": []}))
    with pytest.raises(SnaketuneError, match="model: "):
        check_computed_alike(made, **HERE)
    with pytest.raises(SnaketuneError, match="pairs: "):
        check_computed_alike(made, **(HERE | {"model": [], "pairs": "other"}))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_the_cache_key_has_the_data_types_of_a_cpu(tmp_path, precision, frozen):
    spec = SPEC.model_copy(update={"precision": precision, "frozen_weights": frozen})
    own, *_ = job_of("ref_logps", tmp_path, spec, device="cpu").cache_keys()
    compute = resolve_compute(precision)
    weights = str(compute.weights_dtype(frozen=frozen)).removeprefix("torch.")
    assert own.spec.items() >= (compute.about() | {"weights_dtype": weights}).items()
    assert own.device == compute.device.type


def test_every_kernel_has_a_family():
    assert KERNEL_FAMILIES.keys() == KERNELS.keys()


def test_looking_up_a_reference_imports_no_torch():
    program = (
        "import sys, snaketune.training.reference.cache_key as k; assert 'torch' not in sys.modules and k.cache_keys"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_with_small_noise_in_training_is_refused(dtype):
    """phimoe's experts are drawn in training, which no setting turns off."""
    counts, zero = torch.full((2, 2), 10), torch.zeros(2, 2)
    rounding = 10 * ROUNDING[dtype]
    check_policy_is_reference(zero + 0.9 * rounding, zero + 0.85 * rounding, counts, dtype)
    for external in (False, True):
        with pytest.raises(SnaketuneError, match="in training from itself in evaluation"):
            check_policy_is_reference(zero + 0.9 * rounding, zero + 0.5 * rounding, counts, dtype, external=external)
    with pytest.raises(SnaketuneError, match="from its own reference"):
        check_policy_is_reference(zero + 1.1 * rounding, zero + 1.1 * rounding, counts, dtype)
    check_policy_is_reference(zero + 9.0, zero + 9.0, counts, dtype, external=True)
    # In 16 bits one short completion may be off by more, but not by that much.
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for factor, fine in ((2.0, dtype != torch.float32), (11.0, False)):
        ratios = factor * rounding * one
        with nullcontext() if fine else pytest.raises(SnaketuneError, match="from its own reference"):
            check_policy_is_reference(ratios, ratios, counts, dtype)
