"""A family of runs with faults to come, for the tests of preflight."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Scratch
from snaketune.config.training_runs import Learning
from snaketune.diagnostics import preflight
from snaketune.stages.specs import PreflightEvaluation, PreflightRun, PreflightSpec, SftSpec, TokenizerSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.vocabulary import build as build_tokenizer
from tests.packing.chain import corpus, made, pack, rows_of, started

ROOT = Path(__file__).parents[2]
CHATML = ROOT / "resources/chat_templates/chatml.jinja"
SMALL = Scratch(hidden_size=32, intermediate_size=64, layers=1, heads=2)


class Family:
    """One SFT run on the demo's rows, with faults to come."""

    def __init__(self, folder: Path, length: int = 512):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.corpus = self.corpus_of("chat", rows_of("chat", 80))
        spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=1.0, split_digits=False)
        own = started(folder / "tokenizer")
        outcome = build_tokenizer(spec, own, corpora=[self.corpus], chat_template=[CHATML], base=[])
        self.tokenizer = made(own.folder, outcome, spec)
        self.pack = pack(folder / "pack", self.corpus, self.tokenizer, "sft", length=length)
        self.evaluated = [self.corpus]
        self.base: Any = SMALL
        self.run = {"learning_rate": 1e-3, "batch_rows": 2, "epochs": 5}
        self.settings: dict[str, Any] = {}
        self.exact_match: tuple[str, ...] = ()

    def corpus_of(self, name: str, rows: list[dict[str, Any]], answers: int = 0) -> Artifact:
        """Args: answers: how many of the held-out rows have a checkable one."""
        made = corpus(self.folder / name, "sft", rows, held_out=20)
        held_out = made.folder / "held_out-00000.arrow"
        known = pa.array(["4"] * answers + [None] * (20 - answers), pa.string())
        # A mapped file can't be written to.
        answered = held_out.with_name("answered.arrow")
        write_table(answered, read_table(held_out).append_column("answer", known))
        answered.replace(held_out)
        made.manifest["payload"] = describe_files(made.folder)
        spec = {"kind": "conversations", "split_seed": 0, "held_out": 0.25} | dict.fromkeys(
            ("decontamination", "near_duplicates")
        )
        return Artifact(made.manifest_path, made.manifest | {"spec": spec}, made.folder)

    def findings(self) -> list[dict[str, str]]:
        """Return the findings that preflight writes; raises those that stop a run."""
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        work = started(self.folder / "work")
        given = {"gpus": 0, "nodes": 1, "launch": "single", "zero_stage": None, "allow_cpu": False}
        given |= {
            "kind": "sft",
            "lora": None,
            "quantization": None,
            "micro_batch_rows": 1,
            "gradient_checkpointing": "auto",
        } | self.settings
        sft = SftSpec(
            base=None, training=Learning(**self.run), lora=given.pop("lora"), quantization=given.pop("quantization")
        )
        names = tuple(one.folder.parent.name for one in self.evaluated)
        requested = PreflightEvaluation(
            key="eval.demo", corpora=names, trained_on=("chat",), exact_match=self.exact_match
        )
        run = PreflightRun(key="sft.demo", run=sft, pack=0, reference=None, **given)
        preflight.build(
            PreflightSpec(base=self.base, runs=(run,), evaluations=(requested,)),
            work,
            tokenizer=self.tokenizer,
            packs=[self.pack],
            corpora=[self.corpus],
            evaluated=self.evaluated,
            base=[],
        )
        return json.loads((work.payload / "findings.json").read_text(encoding="utf-8"))["findings"]


@pytest.fixture(scope="module")
def sound_once(tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def family(sound_once, tmp_path) -> Family:
    """A sound one, of which a test may change what it likes."""
    own = object.__new__(Family)
    own.__dict__ |= sound_once.__dict__ | {"folder": tmp_path, "run": dict(sound_once.run), "settings": {}}
    return own


def tiny_model(folder: Path, **settings: Any) -> Path:
    from transformers import LlamaConfig

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 400,
    }
    config = LlamaConfig(**shape | settings)
    config.save_pretrained(folder / "base")
    return folder / "base"
