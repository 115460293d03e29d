"""`export-ref-logps` writes what TRL's own precomputation gives, and TRL trains on it."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from snaketune.__main__ import main
from snaketune.artifacts.manifest import Artifact, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.publishing.export_ref_logps import export_ref_logps
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.training.reference import gather as ref_logps
from tests.packing import chain
from tests.packing.chain import rows_of
from tests.tokenization.small_tokenizers import tokenizer_artifact
from tests.training.test_ref_pass import SPEC, model_in

NAMES = ("ref_chosen_logps", "ref_rejected_logps")


class Made:
    """Corpus, pack, model and reference."""

    def __init__(self, folder, tokenizer: Artifact, rows: list[dict]):
        self.corpus = chain.corpus(folder / "corpus", "preference", rows, held_out=4)
        self.pack = chain.pack(folder / "pack", self.corpus, tokenizer, "preference", length=512)
        self.model = model_in(folder / "model", tokenizer)
        work = WorkFolder(folder / "reference")
        work.start()
        made = chain.made(work.folder, ref_logps.build(SPEC, work, pack=self.pack, model=[self.model]), SPEC)
        made.manifest["inputs"] = {"pack": [self.pack.manifest["pairs"]]}
        self.reference = made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def made(tmp_path, tokenizer) -> Made:
    rows = rows_of("preferences", 14)
    return Made(tmp_path, tokenizer, [rows[0], *rows, *[row | {"id": f"{row['id']}x"} for row in rows[1:3]]])


def trainer_of(kind: type[DPOTrainer], made: Made, data, folder) -> DPOTrainer:
    arguments = DPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, max_length=None, precompute_ref_log_probs=True, max_steps=2,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(made.model.folder)
    tokens = AutoTokenizer.from_pretrained(made.model.folder)
    return kind(model=model, args=arguments, train_dataset=data, processing_class=tokens)


class Tokenized(DPOTrainer):
    """DPOTrainer that uses the exported tokens."""

    def _prepare_dataset(self, dataset, *_, **__):
        return dataset


class Referenced(Tokenized):
    """DPOTrainer that also uses the exported log-probabilities."""

    def _precompute_ref_logps(self, dataset, *_, **__):
        return dataset


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_trl_computes_the_same_and_trains_on_what_is_exported(made, tmp_path, suffix):
    file = tmp_path / f"out/pairs.{suffix}"
    assert export_ref_logps(made.reference, made.pack, made.corpus, "train", file) == 12
    kind = "json" if suffix == "jsonl" else suffix
    data = load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert {"prompt", "chosen", "rejected", "prompt_ids", *NAMES} <= set(data.column_names)
    assert data[0]["prompt"] == [
        {k: turn[k] for k in ("role", "content")} for turn in rows_of("preferences", 1)[0]["prompt"]
    ]
    theirs = trainer_of(Tokenized, made, data.remove_columns(NAMES), tmp_path / "theirs")
    for name in NAMES:
        torch.testing.assert_close(
            torch.tensor(theirs.train_dataset[name]), torch.tensor(data[name]), atol=3e-4, rtol=0
        )
    ours = trainer_of(Referenced, made, data, tmp_path / "ours")
    histories = []
    for trainer in (theirs, ours):
        trainer.train()
        histories.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert histories[0] == pytest.approx(histories[1], abs=1e-4)
    # Both began where the policy is the reference.
    assert histories[1][0] == pytest.approx(0.6931, abs=1e-3)


def test_exported_tokens_equal_those_of_trl(made, tmp_path):
    export_ref_logps(made.reference, made.pack, made.corpus, "held_out", tmp_path / "pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = AutoTokenizer.from_pretrained(made.model.folder)
    assert len(rows) == 4
    for row in rows:
        for side in ("chosen", "rejected"):
            # TRL ends a completion given as text with eos, as the template does here.
            text = tokens.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            whole = tokens(text + row[side][0]["content"] + tokens.eos_token, add_special_tokens=False)["input_ids"]
            assert row["prompt_ids"] + row[f"{side}_ids"] == whole


def test_the_command_and_inputs_that_do_not_belong_together(made, tmp_path, tokenizer, capsys):
    def manifest(name: str, payload: str, artifact: Artifact, stage: str) -> str:
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        (folder / payload).symlink_to(artifact.folder)
        write_manifest(folder / "manifest.json", artifact.manifest | {"stage": stage})
        return str(folder / "manifest.json")

    named = [
        "export-ref-logps",
        *("--ref-logps", manifest("reference", "logps", made.reference, "ref_logps")),
        *("--pack", manifest("pack", "shards", made.pack, "pack")),
        *("--corpus", manifest("corpus", "rows", made.corpus, "corpus")),
    ]
    assert main([*named, "--out", str(tmp_path / "pairs.jsonl")]) == 0
    assert "12 pairs in " in capsys.readouterr().out
    assert main([*named, "--out", str(tmp_path / "pairs.csv")]) == 1
    assert "expected a file that ends in .parquet or .jsonl" in capsys.readouterr().err
    other = Made(tmp_path / "other", tokenizer, rows_of("preferences", 9))
    with pytest.raises(SnaketuneError, match="was computed for other pairs"):
        export_ref_logps(made.reference, other.pack, made.corpus, "train", tmp_path / "a.jsonl")
    with pytest.raises(SnaketuneError, match="lacks 7 of 12 pairs"):
        export_ref_logps(made.reference, made.pack, other.corpus, "train", tmp_path / "a.jsonl")
    labelled = replace(made.pack, manifest=made.pack.manifest | {"kind": "unpaired"})
    with pytest.raises(SnaketuneError, match="is of kind unpaired; expected preference, as TRL takes"):
        export_ref_logps(made.reference, labelled, made.corpus, "train", tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


def test_pairs_that_trl_cannot_represent_are_left_out_and_counted(tmp_path, tokenizer, capsys):
    rows = rows_of("preferences", 9)
    # The user speaks in the midst of a completion, which is not supervised.
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "so."}]
    rows[1] = rows[1] | {"chosen": [*rows[1]["chosen"], *more]}
    made = Made(tmp_path, tokenizer, rows)
    assert export_ref_logps(made.reference, made.pack, made.corpus, "train", tmp_path / "pairs.parquet") == 4
    assert "1 of 5 pairs are left out" in capsys.readouterr().out
