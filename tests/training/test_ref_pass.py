"""The reference pass: correct for every completion, resumed after a kill, the same in one job or in several."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, write_manifest
from snaketune.config.operation import Execution
from snaketune.engine.model import logprobs
from snaketune.engine.packing.segments import layout_of
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import open_rows
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec
from snaketune.tables import read_table
from snaketune.training.reference import compute
from snaketune.training.reference import compute as ref_pass
from snaketune.training.reference import gather as ref_logps
from snaketune.training.reference.logps_table import FILE
from tests.models.conftest import tiny_model
from tests.packing import chain
from tests.packing.chain import rows_of, started
from tests.training.pipeline_runs import Interrupted

SPEC = RefLogpsSpec(
    precision="auto", frozen_weights=False, quantization=None, token_logps=True, trust_remote_code=False
)
# Attention of its own, learned positions, windows, experts.
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "mixtral": {"num_local_experts": 4},
}


def pairs_in(folder: Path, tokenizer: Artifact, count: int = 24, length: int = 256) -> Artifact:
    rows = rows_of("preferences", count)
    # Some prompts and some pairs occur twice.
    rows += [row | {"id": f"{row['id']}x", "chosen": rows[0]["chosen"]} for row in rows[1:4]]
    corpus = chain.corpus(folder / "corpus", "preference", [rows[2], *rows], held_out=6)
    return chain.pack(folder / "pack", corpus, tokenizer, "preference", length=length)


def model_in(folder: Path, tokenizer: Artifact, family: str = "llama", seed: int = 0) -> Artifact:
    """A result that is a whole model."""
    size = len(json.loads((tokenizer.folder / "tokenizer.json").read_text())["model"]["vocab"]) + 8
    model = tiny_model(family, vocab_size=size, **FAMILIES[family])
    if family == "gemma3_text":
        # Without a window, as here, no config can be written.
        model.config.sliding_window = 64
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    payload = folder / "payload.partial"
    payload.mkdir(parents=True)
    model.save_pretrained(payload)
    for path in tokenizer.folder.iterdir():
        (payload / path.name).write_bytes(path.read_bytes())
    manifest = {"payload": chain.describe_files(payload), "records": {}}
    return Artifact(folder / "manifest.json", manifest, payload)


def reference(folder: Path, pack: Artifact, model: Artifact, spec: RefLogpsSpec = SPEC):
    """Args: folder: what `results/.work` is to a run."""
    work = started(folder / "ref_logps/one")
    outcome = ref_logps.build(spec, work, pack=pack, model=[model])
    return read_table(work.payload / FILE), outcome


@pytest.mark.parametrize("family", FAMILIES)
def test_every_completion_has_the_log_probabilities_of_its_sequence_alone(tmp_path, tokenizer, family):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer, family)
    table, outcome = reference(tmp_path / "work", pack, model)
    assert outcome.counts["pairs"] == {"train": 21, "held_out": 6}
    rows = table.to_pylist()
    keys = [(row["split"] != "train", row["id"], row["completion"]) for row in rows]
    assert keys == sorted(set(keys))
    by_completion = {(row["split"], row["id"], row["completion"]): row for row in rows}
    loaded, checked = tiny_of(model), 0
    for split in ("train", "held_out"):
        packed, entries = open_rows(pack, split), list(compute.documents(pack, split))
        for number in range(len(packed)):
            row, ids = packed[number], [entry["id"] for entry in entries if entry["row"] == number]
            layout = layout_of([row])
            for completion, segment in enumerate(layout.completions):
                positions = layout.sequence_tokens(segment, np.arange(layout.sequence_lengths[segment]))
                tokens = torch.from_numpy(row["input_ids"][positions].astype(np.int64))
                learned = torch.from_numpy(row["labels"][positions] != -100)
                with torch.no_grad():
                    logps = loaded(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                expected = logps.gather(1, tokens[1:, None])[:, 0][learned[1:]]
                one = by_completion[split, ids[completion // 2], completion % 2]
                np.testing.assert_allclose(one["token_logps"], expected, atol=2e-5)
                assert one["logp"] == pytest.approx(expected.sum().item(), rel=1e-6, abs=1e-4)
                assert one["tokens"] == len(expected) > 0
                checked += 1
    assert checked == len(rows) + 2  # one pair occurs twice


def tiny_of(model: Artifact) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.folder).eval()


def killed_after(passes: int, monkeypatch) -> None:
    computed, counted = logprobs.token_losses, iter(range(passes))

    def limited(model, batch):
        if next(counted, None) is None:
            raise Interrupted
        return computed(model, batch)

    monkeypatch.setattr(logprobs, "token_losses", limited)


@pytest.mark.parametrize("kills", [(1,), (3, 2)])
def test_a_killed_pass_resumes_with_the_same_result(tmp_path, tokenizer, small_steps, monkeypatch, capsys, kills):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    straight, _ = reference(tmp_path / "straight", pack, model)
    for passes in kills:
        with monkeypatch.context() as patch:
            killed_after(passes, patch)
            with pytest.raises(Interrupted):
                reference(tmp_path / "resumed", pack, model)
    # A file that a kill left incomplete has another suffix.
    stored = next((tmp_path / "resumed/.rows").glob("*/*.arrow"))
    stored.with_name(".99-0.partial").write_bytes(b"half")
    resumed, outcome = reference(tmp_path / "resumed", pack, model)
    assert resumed.equals(straight)
    assert "pairs that an earlier attempt or pass computed" in capsys.readouterr().out
    assert 0 < outcome.run["pairs_computed"] < 28


@pytest.mark.parametrize("damage", ["emptied", pytest.param("cut off", marks=pytest.mark.slow), "one byte"])
def test_only_the_pairs_of_a_damaged_file_are_computed_again(
    tmp_path, tokenizer, small_steps, monkeypatch, capsys, damage
):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    straight, _ = reference(tmp_path / "straight", pack, model)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(Interrupted):
            reference(tmp_path / "resumed", pack, model)
    first, *others = sorted((tmp_path / "resumed/.rows").glob("*/*.arrow"))
    assert others
    whole = first.read_bytes()
    at = whole.index(read_table(first)["value"][0].as_py())
    flipped = bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]])
    first.write_bytes({"emptied": b"", "cut off": whole[:500], "one byte": flipped}[damage])
    resumed, outcome = reference(tmp_path / "resumed", pack, model)
    assert resumed.equals(straight)
    assert re.search(rf"^{re.escape(str(first))}(: a damaged value| is damaged)", capsys.readouterr().out, re.MULTILINE)
    assert outcome.run["pairs_computed"] < 28


def test_a_pass_resumes_when_the_pairs_are_packed_into_other_rows(tmp_path, tokenizer, small_steps, monkeypatch):
    pack, model = pairs_in(tmp_path / "a", tokenizer), model_in(tmp_path / "model", tokenizer)
    other = pairs_in(tmp_path / "b", tokenizer, length=384)
    assert pack.content != other.content
    assert pack.manifest["pairs"] == other.manifest["pairs"]
    straight, _ = reference(tmp_path / "straight", other, model)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        with pytest.raises(Interrupted):
            reference(tmp_path / "resumed", pack, model)
    resumed, outcome = reference(tmp_path / "resumed", other, model)
    assert 0 < outcome.run["pairs_computed"] < 28
    assert resumed.equals(straight)


def parts_of(folder: Path, pack: Artifact, model: Artifact, count: int, spec: RefLogpsSpec = SPEC) -> str:
    """Compute the parts of a reference pass. Returns: the pattern of their manifests."""
    for part in range(1, count + 1):
        part_spec, name = RefPassSpec(**dict(spec), part=part, parts=count), folder / f"ref_pass/{part}-of-{count}"
        work = started(name)
        made = chain.made(name, ref_pass.build(part_spec, work, pack=pack, model=[model]), part_spec)
        inputs = {"model": [model.content], "base_layers": [], "tokenizer": [], "base": [], "pack": [pack.content]}
        work.payload.rename(name / "logps")
        write_manifest(name / "manifest.json", made.manifest | {"stage": "ref_pass", "inputs": inputs})
    return str(folder / f"ref_pass/*-of-{count}/manifest.json")


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(40, marks=pytest.mark.slow)]
)
def test_gathered_parts_equal_the_result_of_one_job(tmp_path, tokenizer, count):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    whole, one = reference(tmp_path / "whole", pack, model)
    pattern = parts_of(tmp_path / "parts", pack, model, count)
    work = started(tmp_path / "gathered/ref_logps/one")
    outcome = ref_logps.build(SPEC, work, pack=pack, model=[model], operation=Execution(parts=pattern))
    gathered = read_table(work.payload / FILE)
    assert (outcome.counts, outcome.about) == (one.counts, one.about)
    assert gathered.equals(whole)


def test_parts_of_another_reference_and_missing_parts_are_refused(tmp_path, tokenizer):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    other = model_in(tmp_path / "other", tokenizer, seed=1)
    pattern = parts_of(tmp_path / "parts", pack, model, 2)

    def gather(spec: RefLogpsSpec = SPEC, **changes):
        inputs = {"pack": pack, "model": [model]} | changes
        return ref_logps.build(
            spec, started(tmp_path / "w/ref_logps/one"), operation=Execution(parts=pattern), **inputs
        )

    gather()
    for changes, what in (
        ({"model": [other]}, "model"),
        ({"pack": pairs_in(tmp_path / "longer", tokenizer, length=384)}, "pairs"),
        ({"spec": SPEC.model_copy(update={"precision": "bfloat16"})}, "dtype"),
    ):
        with pytest.raises(SnaketuneError, match=rf"doesn't belong to this run \({what}: "):
            gather(**changes)
    for path in (tmp_path / "parts/ref_pass/2-of-2").rglob("*"):
        path.unlink() if path.is_file() else None
    with pytest.raises(SnaketuneError, match=r"\d+ of 27 pairs are in no part"):
        gather()


def test_the_auto_batch_grows_while_that_is_faster_with_the_same_values(tmp_path, tokenizer, monkeypatch):
    pack, model = pairs_in(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    one_by_one, taken = logprobs.AutoBatch(256, torch.device("cpu")), []
    assert not one_by_one.grows
    straight, _ = reference(tmp_path / "straight", pack, model)

    class Growing(logprobs.AutoBatch):
        def __init__(self, row_length, device):
            super().__init__(row_length, device)
            self.rows, self.grows = 1, True

        def record(self, tokens, seconds):
            taken.append(self.rows)
            # Three rows take no longer than one, and eight as long as eight times one.
            super().record(tokens, 1.0 if self.rows < 4 else 0.5 * self.rows)

    monkeypatch.setattr(logprobs, "AutoBatch", Growing)
    monkeypatch.setattr(logprobs, "PASSES", 2)
    grown, _ = reference(tmp_path / "grown", pack, model)
    assert taken[:4] == [1, 1, 2, 2]
    assert max(taken) <= 4
    np.testing.assert_allclose(grown["logp"], straight["logp"], rtol=1e-5)
