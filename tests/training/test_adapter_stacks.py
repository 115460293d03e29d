"""Adapter-only results: whatever is trained or computed from them is bit-identical to the same from merged results."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained, RopeScaling
from snaketune.config.evaluations import ExactMatch
from snaketune.config.generation import Generation
from snaketune.config.lora import Lora, Quantization
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Training
from snaketune.errors import SnaketuneError
from snaketune.evaluation import model_scores as evaluation
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.load_model import load_pretrained
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import DpoSpec, EvalSpec, RefLogpsSpec, SftSpec
from snaketune.tables import read_table
from snaketune.training import dpo, sft
from snaketune.training.reference import gather as ref_logps
from snaketune.training.reference.logps_table import FILE
from tests.models.conftest import tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import messages
from tests.training.executed import executed

from .sft_runs import packed_rows
from .test_resume import model_of


@dataclass
class Made:
    """A model: its results from the top adapter down, and its base."""

    results: list[Artifact]
    base: Pretrained | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        return {"model": self.results[:1], "base_layers": self.results[1:]}

    @property
    def contents(self) -> dict[str, list[str]]:
        """The inputs as recorded in a manifest."""
        return {role: [one.content for one in some] for role, some in self.inputs.items()}

    def stack(self, tokenizer: Artifact) -> AdapterStack:
        return AdapterStack(results=tuple(self.results), base=self.base, tokenizer=tokenizer.folder)


class Chain:
    """sft → sft → reference → dpo → eval, all of them with adapters, in one folder."""

    def __init__(self, folder: Path, tokenizer: Artifact, merge: bool):
        self.folder, self.tokenizer, self.merge = folder, tokenizer, merge
        self.rows = packed_rows(folder / "pack", tokenizer)
        pairs = [
            {"id": str(i), "prompt": messages(f"cat {i}?"), "chosen": messages("", f"ton {i}")[1:],
             "rejected": messages("", f"hat {i} sing")[1:]}
            for i in range(6)
        ]  # fmt: skip
        corpus = chain.corpus(folder / "pairs", "preference", pairs, held_out=2)
        self.pairs = chain.pack(folder / "pairs-pack", corpus, tokenizer, "preference", length=64)

    def work(self, name: str) -> WorkFolder:
        work = WorkFolder(self.folder / name)
        work.start()
        return work

    def finish(self, work: WorkFolder, outcome, spec, inputs) -> Artifact:
        result = chain.made(work.folder, outcome, spec)
        result.manifest["inputs"] = inputs
        return result

    def made(self, result: Artifact, below: Made) -> Made:
        return Made([result], None) if self.merge else Made([result, *below.results], below.base)

    def sft(self, name: str, start: Made, lora: Lora, quantization=None, **settings) -> Made:
        spec = SftSpec(
            base=start.base, training=training(**settings), lora=lora.model_copy(update={"merge": self.merge}),
            quantization=quantization,
        )  # fmt: skip
        work = self.work(name)
        outcome = sft.build(
            spec,
            work,
            operation=executed(spec.training),
            pack=self.rows,
            tokenizer=self.tokenizer,
            base=[],
            **start.inputs,
        )
        return self.made(self.finish(work, outcome, spec, start.contents), start)

    def dpo(self, name: str, start: Made, lora: Lora | None, quantization=None) -> tuple[Made, Artifact, list[float]]:
        made = training(epochs=3, warmup_fraction=0)
        reference_spec = RefLogpsSpec(
            precision=made.precision, frozen_weights=lora is not None, quantization=quantization, base=start.base,
            trust_remote_code=False,
        )  # fmt: skip
        work = self.work(f"{name}-reference")
        outcome = ref_logps.build(reference_spec, work, pack=self.pairs, **start.inputs)
        contents = start.contents | {"pack": [self.pairs.manifest["pairs"]]}
        reference = self.finish(work, outcome, reference_spec, contents)
        lora = lora and lora.model_copy(update={"merge": self.merge})
        spec = DpoSpec(
            loss="sigmoid", beta=0.5, label_smoothing=0.0, lora=lora, quantization=quantization, base=start.base,
            trust_remote_code=False, training=made,
        )  # fmt: skip
        work = self.work(name)
        outcome = dpo.build(
            spec,
            work,
            operation=executed(spec.training, log_steps=1),
            pack=self.pairs,
            ref_logps=[reference],
            model=start.results[0],
            base_layers=start.results[1:],
        )
        result = self.finish(work, outcome, spec, start.contents)
        made = self.made(result, start) if lora else Made([result])
        return made, reference, [entry["loss"] for entry in outcome.run["history"]]

    def scores(self, name: str, model: Made, references: list[Artifact]) -> dict[str, Any]:
        spec = EvalSpec(
            base=model.base, trust_remote_code=False, conversations=(), preferences=("pairs",),
            generation=Generation(max_new_tokens=2), exact_match=ExactMatch(), tasks=None, samples=0, judged=0,
        )  # fmt: skip
        work = self.work(name)
        evaluation.build(
            spec, work, tokenizer=self.tokenizer, corpora=[], packs=[self.pairs], ref_logps=references, base=[],
            tasks=[], task_data=[], operation=Execution(), **model.inputs,
        )  # fmt: skip
        return json.loads((work.payload / "scores.json").read_text())


def training(**settings) -> Training:
    return Training(**({"epochs": 1, "batch_rows": 2, "micro_batch_rows": 2, "learning_rate": 0.004} | settings))


FIRST = Lora(rank=4, dora=True, modules_to_save=("embed_tokens",))
SECOND = Lora(rank=2, rslora=True, target_modules=r".*\.(q|v)_proj")
# Families, data types of their bases, and settings: computed in the base's data type or a lower one, saved in a higher one.
CASES = {
    "llama": ("llama", torch.bfloat16, {}),
    "tied": ("qwen2", torch.float32, {"precision": "bfloat16"}),
    "experts": ("mixtral", torch.bfloat16, {"save_dtype": "float32"}),
}


@pytest.mark.parametrize(
    "case", ["llama", pytest.param("tied", marks=pytest.mark.slow), pytest.param("experts", marks=pytest.mark.slow)]
)
def test_results_on_adapters_equal_results_on_merged_weights(tmp_path, tokenizer, case):
    family, dtype, settings = CASES[case]
    model = model_of(family) if family == "mixtral" else tiny_model(family, tie_word_embeddings=case == "tied")
    model.to(dtype).save_pretrained(tmp_path / "base")
    # Merged or not, a result has the scaled positions of its base.
    rope = RopeScaling(type="yarn", factor=2) if case == "llama" else None
    base = Made([], Pretrained(path=str(tmp_path / "base"), rope=rope))
    # Embedding rows that the base lacks are part of the adapters.
    first = Lora(rank=2) if case == "experts" else FIRST
    made: dict[bool, Any] = {}
    for merge in (True, False):
        run = Chain(tmp_path / str(merge), tokenizer, merge)
        one = run.sft("one", base, first, **settings)
        models = [one]
        if case == "llama":
            models += [run.sft("two", one, SECOND)]
        last, reference, losses = run.dpo("last", models[-1], SECOND)
        if case == "tied":
            # A model trained in full is complete and has no base layers.
            models += [run.dpo("full", one, None)[0]]
        scores = run.scores("scores", last, [reference])
        made[merge] = (*models, last), read_table(reference.file(FILE)), losses, scores
    merged, alone = made[True], made[False]
    lengths = {"llama": [1, 2, 3], "tied": [1, 1, 2], "experts": [1, 2]}
    assert [len(model.results) for model in alone[0]] == lengths[case]
    for with_weights, without in zip(merged[0], alone[0], strict=True):
        names = set(without.results[0].manifest["payload"])
        assert {"tokenizer.json", "config.json", "generation_config.json"} <= names
        if len(without.results) > 1:
            assert "adapter/adapter_model.safetensors" in names
            assert not [name for name in names if name.endswith((".safetensors", ".index.json")) and "/" not in name]
        for dtype in (torch.float32, torch.bfloat16):
            wanted = load_pretrained(Pretrained(path=str(with_weights.results[0].folder)), weights_dtype=dtype)
            loaded = without.stack(tokenizer).load(dtype)
            assert loaded.state_dict().keys() == wanted.state_dict().keys()
            for name, tensor in wanted.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor), name
        configs = [
            json.loads((model.results[0].folder / "config.json").read_text()) for model in (with_weights, without)
        ]
        assert configs[0] == configs[1]
        assert (configs[0]["rope_parameters"]["rope_type"] == "yarn") == (case == "llama")
    assert merged[1].equals(alone[1])
    assert merged[2] == alone[2]
    assert merged[2][0] == pytest.approx(math.log(2), abs=1e-6)
    assert merged[2][-1] < merged[2][0]
    assert merged[3] == alone[3]
    assert merged[3]["preferences"]["pairs"]["pairs_with_reference"] == 2


def test_in_4_bits_a_reference_on_adapters_equals_the_initial_policy(tmp_path, tokenizer):
    """QLoRA on the CPU."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, num_key_value_heads=4)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = Made([], Pretrained(path=str(tmp_path / "base")))
    losses, tables, configs = [], [], []
    for merge in (True, False):
        run = Chain(tmp_path / str(merge), tokenizer, merge)
        one = run.sft("one", base, FIRST, Quantization())
        last, reference, history = run.dpo("last", one, SECOND, Quantization())
        losses.append(history)
        tables.append(read_table(reference.file(FILE)))
        configs.append([json.loads((made.results[0].folder / "config.json").read_text()) for made in (one, last)])
        assert last.stack(tokenizer).load(torch.float32)(torch.arange(5, 29)[None]).logits.isfinite().all()
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[0][-1] < losses[0][0]
    assert tables[0].equals(tables[1])
    for merged, alone in zip(*configs, strict=True):
        # transformers' Trainer turns it off in the model that it trains, which isn't the model that is merged here.
        assert merged | {"use_cache": None} == alone | {"use_cache": None}


def test_a_reference_of_other_adapters_or_base_layers_is_refused(tmp_path, tokenizer):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    run = Chain(tmp_path, tokenizer, merge=False)
    one, other = (
        run.sft(name, Made([], Pretrained(path=str(tmp_path / "base"))), SECOND, seed=seed)
        for name, seed in (("one", 1), ("other", 2))
    )
    two = run.sft("two", one, SECOND)
    _, reference, _ = run.dpo("last", two, SECOND)
    spec = DpoSpec(
        loss="sigmoid", beta=0.5, label_smoothing=0.0, lora=SECOND, quantization=None, base=two.base,
        trust_remote_code=False, training=training(),
    )  # fmt: skip
    with pytest.raises(SnaketuneError, match="its adapters were trained on other results"):
        dpo.build(
            spec, run.work("wrong"), operation=executed(spec.training), pack=run.pairs, ref_logps=[reference],
            model=two.results[0], base_layers=other.results,
        )  # fmt: skip


def test_results_without_their_base_layers_are_refused(tmp_path, tokenizer):
    alone, other = (
        Artifact(tmp_path, {"base_dtype": dtype, "payload": {}, "inputs": {}, "spec": {}}, tmp_path)
        for dtype in ("float32", "bfloat16")
    )
    # The same adapter on other weights.
    assert alone.content != other.content
    complete = Artifact(tmp_path, {}, tmp_path)
    base = Pretrained(path="some/model")
    for results, below in (
        ((), None),
        ((alone,), None),
        ((complete,), base),
        ((alone, complete), base),
        ((alone, complete, alone), None),
        ((alone, complete, alone, complete), None),
        ((complete, complete), None),
    ):
        with pytest.raises(SnaketuneError, match="model, base_layers: expected"):
            AdapterStack(results=results, base=below, tokenizer=tokenizer.folder)


def test_adapters_in_another_order_than_trained_are_refused(tmp_path, tokenizer):
    def result(name: str, *below: Artifact, **manifest) -> Artifact:
        made_from = [one.content for one in below]
        inputs = {"model": made_from[:1], "base_layers": made_from[1:]}
        manifest = {"payload": {name: {"digest": name}}, "inputs": inputs, "spec": {}, **manifest}
        return Artifact(tmp_path / name, manifest, tmp_path)

    alone = {"base_dtype": "float32"}
    one = result("one")
    two = result("two", one, **alone)
    three = result("three", two, one, **alone)
    continued = result("continued", three, two, one, spec={"continued": True}, **alone)
    for sound in ((three, two, one), (two, one), (continued, two, one)):
        AdapterStack(results=sound, tokenizer=tokenizer.folder)
    for name, wrong in (
        ("two", (two, three, one)),
        ("three", (three, one)),
        ("continued", (continued, three, two, one)),
    ):
        with pytest.raises(SnaketuneError, match=rf"{name}: its adapters were trained on other results"):
            AdapterStack(results=wrong, tokenizer=tokenizer.folder)
