"""Every feature of a training, in everything that launches trainings: runs, calibrations and trials of speed.

A row of FEATURES is what a config switches on, as edits of a run by dotted key. Each cell trains a few steps of a tiny model,
or the config refuses it.
"""

import json
import math
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora, Quantization
from snaketune.config.operation import Execution, Operation
from snaketune.config.tracking import Tracking
from snaketune.config.training_runs import Dpo, Learning, Sft, Training
from snaketune.diagnostics import timed_training
from snaketune.engine import trainer as trainer_module
from snaketune.engine.model.compiling import CompileChoice
from snaketune.stages.plan.doctor_jobs import timed_spec
from snaketune.stages.plan.training_jobs import calibrated_spec
from snaketune.stages.specs import CalibrateSpec, DpoSpec, RefLogpsSpec, SftSpec, TimingSpec, spec_from
from snaketune.tracking.curves import TrackedRun
from snaketune.training import dpo, sft
from snaketune.training.autotune import calibration, timed_steps
from snaketune.training.reference import gather as ref_logps
from tests.models.conftest import tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import messages

from .sft_runs import raw_rows

RUN = {
    "corpus": "rows",
    "training": {
        "epochs": 1, "batch_rows": 2, "micro_batch_rows": 1, "learning_rate": 0.003, "gradient_checkpointing": False,
        "compile": False, "evaluate": {"every": 2, "samples": 0},
    },
    "operation": {"log_steps": 2, "allow_cpu": True},
}  # fmt: skip
KINDS = {"sft": (Sft, {"base": {"path": "base"}, "tokenizer": "small"}), "dpo": (Dpo, {"from": "sft"})}
SECTIONS = {"training": Training, "operation": Operation, "lora": Lora, "quantization": Quantization}
# The reference log-probabilities of these tests are of float32 weights.
ALONE = {"dpo:loss": "orpo"}
# Feature → edits of the run (`dpo:` of DPO runs only), and by kind of run why a config with it is refused.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "held-out rows": ({"training.evaluate": {"every": 1, "rows": 2, "samples": 1}}, {}),
    "no held-out rows": ({"training.evaluate": False}, {}),
    "best weights": ({"training.keep": "best", "training.metric": "loss"}, {}),
    "early stop": ({"training.stop_if": {"held_out_rises": 1}, "training.learning_rate": 1.0}, {}),
    "early stop by pairs": ({"stop_if": {"kl_above": 1e-9, "window": 1}}, {"sft": "stop_if"}),
    "snapshots": ({"training.snapshots": [0.5]}, {}),
    "end of a snapshot": ({"training.until": 0.5}, {}),
    "average": ({"training.average": {"ema": 0.9}}, {}),
    "embedding noise": ({"training.neftune_noise_alpha": 5}, {"dpo": "neftune_noise_alpha"}),
    "compiled": ({"training.compile": True}, {}),
    "deterministic": ({"training.deterministic": True, "training.seed": 1}, {}),
    "trainable part": ({"training.trainable": r"model\.layers\.1\..*"}, {}),
    "muon": ({"training.optimizer": "muon", "training.weight_decay": 0.1, "training.betas": [0.9, 0.95]}, {}),
    "schedule with an end": (
        {"training.schedule": "warmup_stable_decay", "training.schedule_options": {"num_decay_steps": 1}},
        {},
    ),
    "long warm-up": (
        {"training.schedule": "polynomial", "training.warmup_fraction": 0.6, "training.max_grad_norm": 9},
        {},
    ),
    "precision": ({"training.precision": "float32", "training.save_dtype": "float32"}, {}),
    "activations recomputed": ({"training.gradient_checkpointing": True}, {}),
    "activations offloaded": ({"operation.activation_offloading": True}, {}),
    "intervals": ({"operation.checkpoint_steps": 1, "operation.log_steps": 1}, {}),
    "rows in memory": ({"operation.load_in_memory": True}, {}),
    "adapters": (
        {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1, "rslora": True, "merge": False, "target_modules": ["q_proj"]}},
        {},
    ),
    "DoRA": ({"lora": {"rank": 2, "dora": True}}, {}),
    "EVA": ({"lora": {"rank": 2, "init_lora_weights": "eva"}, "training.average": {"ema": 0.9}}, {}),
    "PiSSA": ({"lora": {"rank": 2, "init_lora_weights": "pissa"}}, {}),
    "LoRA+": ({"lora": {"rank": 2, "loraplus_lr_ratio": 4, "modules_to_save": ["embed_tokens"]}}, {}),
    "4-bit weights": ({"lora": {"rank": 2}, "quantization": {"type": "nf4", "double": True}, **ALONE}, {}),
    "DFT": ({"loss": "dft"}, {"dpo": "loss"}),
    "loss of whole steps": ({"loss": "aot"}, {"sft": "loss"}),
    "unpacked rows": ({"packing": {"strategy": "none", "length": 64}}, {"dpo": "packing.strategy can't be `none`"}),
}
# Keys of several processes (test_many_processes); `auto` is resolved before a training starts.
ELSEWHERE = {"operation.gpus", "operation.nodes", "operation.launch", "operation.zero_stage"}


def run_of(kind: str, edits: dict[str, Any]) -> Sft | Dpo:
    model, further = KINDS[kind]
    run = deepcopy(RUN | further)
    for key, value in edits.items():
        section, _, leaf = key.removeprefix("dpo:").rpartition(".")
        if kind == "dpo" or not key.startswith("dpo:"):
            (run[section] if section else run)[leaf] = value
    return model.model_validate(run)


class Launchers:
    """The inputs of all trainings; its methods launch one, and return its number of steps and its losses."""

    def __init__(self, folder: Path, tokenizer: Artifact):
        self.folder, self.tokenizer = folder, tokenizer
        tiny_model("llama").save_pretrained(folder / "base")
        self.base = Pretrained(path=str(folder / "base"))
        chats = [{"id": str(i), "messages": messages(f"cat {i}?", f"ton {i}")} for i in range(18)]
        pairs = [
            {"id": str(i), "prompt": messages(f"cat {i}?"), "chosen": messages("", f"ton {i}")[1:]}
            | {"rejected": messages("", f"hat {i} sing")[1:]}
            for i in range(24)
        ]
        chat_rows = chain.corpus(folder / "chats", "sft", chats, held_out=4)
        pair_rows = chain.corpus(folder / "pairs", "preference", pairs, held_out=4)
        self.packs = {
            "sft": chain.pack(folder / "packed", chat_rows, tokenizer, "sft", length=64),
            "dpo": chain.pack(folder / "pair-pack", pair_rows, tokenizer, "preference", length=64),
            "raw": raw_rows(folder / "raw"),
        }
        self.packs["raw"].manifest["counts"] = {"train": {"kept": 12}}
        run = run_of("sft", {})
        self.model = chain.made(folder / "model", self._build(run, folder / "model"), self.spec(run))
        spec = RefLogpsSpec(precision="auto", frozen_weights=False, quantization=None, trust_remote_code=False)
        work = chain.started(folder / "ref_logps/one")
        outcome = ref_logps.build(spec, work, pack=self.packs["dpo"], model=[self.model])
        self.reference = chain.made(work.folder, outcome, spec)
        self.reference.manifest["inputs"] = {
            "model": [self.model.content],
            "pack": [self.packs["dpo"].manifest["pairs"]],
        }

    def spec(self, run: Sft | Dpo) -> SftSpec | DpoSpec:
        learning = spec_from(Learning, run.training)
        if isinstance(run, Sft):
            return spec_from(SftSpec, run, base=self.base, training=learning)
        return spec_from(DpoSpec, run, training=learning, trust_remote_code=False)

    def inputs(self, run: Sft | Dpo) -> dict[str, Any]:
        """The inputs of a run, and of its timings."""
        if isinstance(run, Sft):
            pack = self.packs["raw" if run.packing.strategy == "none" else "sft"]
            return {"pack": pack, "tokenizer": self.tokenizer, "base": []}
        references = [self.reference] if run.needs_reference else []
        return {"pack": self.packs["dpo"], "model": self.model, "ref_logps": references}

    def _build(self, run: Sft | Dpo, folder: Path):
        spec, work = self.spec(run), chain.started(folder)
        kind = "sft" if isinstance(run, Sft) else "dpo"
        tracked = TrackedRun.of(kind, {}, Tracking(tensorboard=True), work, folder / "out")
        build = sft.build if kind == "sft" else dpo.build
        return build(spec, work, operation=self.operation(run), tracked=tracked, **self.inputs(run))

    def operation(self, run: Sft | Dpo) -> Execution:
        return spec_from(Execution, run.operation, run.training, share_kernels=False)

    def run(self, run: Sft | Dpo, folder: Path) -> tuple[int, list[float]]:
        outcome = self._build(run, folder)
        assert ("held_out" in outcome.run) == bool(run.training.evaluate and outcome.about.get("trainer") != "trl")
        return outcome.counts["steps"], [line["loss"] for line in outcome.run["history"]]

    def calibration(self, run: Sft | Dpo, folder: Path) -> tuple[int, list[float]]:
        spec = spec_from(
            CalibrateSpec, run.operation, run.training, base=self.base, run=calibrated_spec(self.spec(run))
        )
        work, pack = chain.started(folder), self.inputs(run)["pack"]
        built = {"pack": pack, "tokenizer": self.tokenizer, "base": []}
        calibration.build(spec, work, operation=self.operation(run), **built)
        (first, *_) = json.loads((work.payload / "curve.json").read_text())["trials"]
        assert first["fits"], first["why"]
        return timed_steps.MIN_STEPS + 1, [0.0]

    def timing(self, run: Sft | Dpo, folder: Path) -> tuple[int, list[float]]:
        timed = {"run": timed_spec(self.spec(run)), "steps": 2, "repeat": 1}
        spec = spec_from(TimingSpec, run.operation, run.training, **timed)
        inputs, work = self.inputs(run), chain.started(folder)
        inputs |= {"tokenizer": self.tokenizer, "model": [self.model] if "model" in inputs else []}
        timed_training.build(spec, work, operation=self.operation(run), **inputs)
        measured = json.loads((work.payload / "measured.json").read_text())
        assert measured["fits"], measured["why"]
        return measured["steps"], [window["loss"] for window in measured["windows"]]


LAUNCHERS = (Launchers.run, Launchers.calibration, Launchers.timing)
# Those that launchers set up themselves, or that make them differ: tested at each push, with one kind of run each.
SET_UP = {
    **dict.fromkeys(("held-out rows", "best weights", "snapshots"), ("sft",)),
    **dict.fromkeys(("early stop", "average", "adapters"), ("dpo",)),
    "early stop by pairs": ("sft", "dpo"),
}


@pytest.fixture(scope="module")
def launchers(tmp_path_factory, tokenizer):
    return Launchers(tmp_path_factory.mktemp("launchers"), tokenizer)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timed_steps, "SECONDS", 0.0)
    # Layers are compiled in test_compiled; here all else is done for it.
    chosen = lambda wanted, *_: CompileChoice(compiled=wanted is True, reason="configured")  # noqa: E731
    monkeypatch.setattr(trainer_module, "choose_compilation", chosen)
    monkeypatch.setattr(trainer_module, "compile_layers", lambda *_, **__: None)
    monkeypatch.setattr("snaketune.models.load_model._device_for_4_bits", lambda: "cpu")


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        pytest.param(kind, one, marks=[] if kind in SET_UP.get(one, ()) else pytest.mark.slow)
        for kind, one in product(KINDS, FEATURES)
    ],
)
def test_each_launcher_trains_with_the_feature(kind, feature, launchers, tmp_path, capsys):
    edits, refused = FEATURES[feature]
    if kind in refused:
        with pytest.raises(ValidationError, match=refused[kind]):
            run_of(kind, edits)
        return
    run = run_of(kind, edits)
    for launch in LAUNCHERS:
        steps, losses = launch(launchers, run, tmp_path / launch.__name__)
        # Only a run ends early, or measures between its steps.
        assert launch is Launchers.run or steps == 3
        assert steps and losses and all(map(math.isfinite, losses)), launch.__name__
        printed = capsys.readouterr().out
        assert launch is Launchers.run or "held-out rows" not in printed


def test_every_key_of_a_training_is_a_feature_here():
    known = {f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
    used = {f"{section}.{key}" for section in RUN if section in SECTIONS for key in RUN[section]}
    for edits, _ in FEATURES.values():
        for key, value in edits.items():
            used |= {f"{key}.{leaf}" for leaf in value} if key in SECTIONS else {key}
    assert known - used == ELSEWHERE
