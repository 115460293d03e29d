"""Log-probabilities kept by content: what a change computes again, and what is reused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.engine.model import logprobs
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.units import UnitRows, find_units
from snaketune.packing.reader import open_rows
from snaketune.training.reference import compute
from snaketune.training.reference import gather as ref_logps
from snaketune.training.reference.logps_table import FILE
from snaketune.training.reference.pair_logps import PairLogps
from tests.models.conftest import CPU
from tests.packing import chain
from tests.packing.chain import rows_of, started
from tests.training.pipeline_runs import Interrupted

from .test_ref_pass import SPEC, killed_after, model_in, pairs_in, parts_of, reference, tiny_of


def changed(folder: Path, tokenizer: Artifact, count: int, changes: range, **settings) -> Artifact:
    """Pairs with as many prompts, some of which have another answer."""
    rows = rows_of("preferences", count)
    for number in changes:
        rows[number]["rejected"] = [{"role": "assistant", "content": f"I don't know what {number} would be."}]
    corpus = chain.corpus(folder / "corpus", "preference", rows, held_out=count // 5)
    return chain.pack(folder / "pack", corpus, tokenizer, "preference", **settings)


def bytes_of(folder: Path) -> bytes:
    return (folder / "ref_logps/one/payload.partial" / FILE).read_bytes()


@pytest.mark.parametrize("with_tokens", [False, True])
def test_after_a_change_the_changed_pairs_are_computed_and_the_bytes_are_those_of_a_cold_pass(
    tmp_path, tokenizer, monkeypatch, with_tokens
):
    torch.set_num_threads(1)
    count, spec = 100, SPEC.model_copy(update={"token_logps": with_tokens})
    model = model_in(tmp_path / "model", tokenizer)
    _, cold = reference(tmp_path / "warm", changed(tmp_path / "0", tokenizer, count, range(0)), model, spec)
    assert cold.run["tokens_computed"] == cold.run["tokens"]
    counted, computed = [], logprobs.token_losses

    def counting(model, batch):
        counted.append(batch["segments"].layout.document_tokens)
        return computed(model, batch)

    # A pair of the train split, half of both, one more; then rows of another length, which change no pair.
    for name, changes, least, most, settings in (
        ("1", range(1), 1, 0.05, {}),
        # The first of these pairs is changed already.
        ("50", range(0, count, 2), 49, 0.56, {}),
        ("50", range(0, count, 2), 0, 0, {"length": 384}),
    ):
        pack = changed(tmp_path / f"{name}{settings}", tokenizer, count, changes, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "token_losses", counting)
            counted.clear()
            _, warm = reference(tmp_path / "warm", pack, model, spec)
        reference(tmp_path / f"cold {name}{settings}", pack, model, spec)
        assert bytes_of(tmp_path / "warm") == bytes_of(tmp_path / f"cold {name}{settings}")
        assert warm.run["tokens_computed"] <= most * warm.run["tokens"]
        # Batches of less than LEAST_ROWS supervised tokens are filled up.
        assert warm.run["tokens_computed"] <= sum(counted) <= warm.run["tokens_computed"] + 65 * len(counted)
        assert warm.run["pairs_computed"] >= least


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32), ("gemma3_text", torch.float32)]
)
def test_the_bits_of_a_unit_do_not_depend_on_the_other_units_of_its_batch(tmp_path, tokenizer, family, dtype):
    torch.set_num_threads(1)
    pack, loaded = pairs_in(tmp_path, tokenizer), tiny_of(model_in(tmp_path / "model", tokenizer, family))
    rows = open_rows(pack, "train")
    tested = self_test(loaded, [rows], replace(CPU, dtype=dtype), training=False)
    assert tested.compute.kernel == "sdpa"
    units = find_units(rows, range(len(rows)), compute.documents(pack, "train"))
    generator, alone = np.random.default_rng(0), {}
    for trial in range(40):
        order = generator.permutation(len(units))[: generator.integers(2, len(units) + 1)]
        batches = [[units[number]] for number in range(len(units))] if trial == 0 else [[units[n] for n in order]]
        apart = UnitRows(rows, [unit for batch in batches for unit in batch])
        if trial == 0:
            apart.groups = batches
        values = PairLogps(model=loaded, compute=tested.compute, what="test", token_logps=True)
        for numbers, batch, losses_N in values.passes(apart, range(len(apart))):
            some = [unit for number in numbers for unit in apart.groups[number]]
            for digest, value in values.encode(some, batch, losses_N).items():
                assert alone.setdefault(digest, value) == value


def test_a_pass_killed_after_a_change_continues_and_parts_reuse_what_one_job_computed(
    tmp_path, tokenizer, small_steps, monkeypatch
):
    torch.set_num_threads(1)
    model = model_in(tmp_path / "model", tokenizer)
    before, after = (changed(tmp_path / f"{n}", tokenizer, 40, range(0, n, 2)) for n in (0, 40))
    reference(tmp_path / "warm", before, model)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(Interrupted):
            reference(tmp_path / "warm", after, model)
    pattern = parts_of(tmp_path / "warm", after, model, 2)
    parts = [json.loads(path.read_text()) for path in Path(pattern).parent.parent.glob("*-of-2/manifest.json")]
    assert parts[0]["rows"] == parts[1]["rows"]
    work = started(tmp_path / "gathered/ref_logps/one")
    ref_logps.build(SPEC, work, pack=after, model=[model], operation=Execution(parts=pattern))
    reference(tmp_path / "cold", after, model)
    assert bytes_of(tmp_path / "gathered") == bytes_of(tmp_path / "cold")
    # Everything is there now.
    _, again = reference(tmp_path / "warm", after, model)
    assert (again.run["tokens_computed"], again.run["pairs_computed"]) == (0, 0)
