"""Results of every kind are folders that transformers loads by itself, with the trained weights."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Lora, Quantization
from snaketune.config.training_runs import Training
from snaketune.engine.checkpoints import copy_trained
from snaketune.engine.model.adapters import cast_parameters, merge
from snaketune.engine.model.attention import use_own_attention
from snaketune.models.load_model import grow_vocabulary, load_pretrained
from snaketune.models.lora import add_lora
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import DpoSpec, RefLogpsSpec, SftSpec
from snaketune.training import dpo, pipeline, save_model, sft
from snaketune.training.reference import gather as ref_logps
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import messages
from tests.training.executed import executed

from .sft_runs import packed_rows
from .test_resume import model_of

IDS = torch.arange(5, 29)[None]
LORA = Lora(rank=4)
# Relative RMS error of the logits after rounding the weights; bfloat16 has 8 bits.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}


def load_plainly(folder: Path) -> dict[str, Any]:
    """What transformers loads of a result and generates with it; the logits are beside its files."""
    model, loaded = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "cat 1?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generation = model.generation_config
    written = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    found = {
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}), "config": str(model.config.dtype),
        "wrong": {key: sorted(map(str, names)) for key, names in loaded.items() if names},
        "ids": prompt["input_ids"].tolist(), "new": written.shape[1] - prompt["input_ids"].shape[1],
        "stops": generation.eos_token_id, "pad": generation.pad_token_id, "tied": model.config.tie_word_embeddings,
    }  # fmt: skip
    with torch.no_grad():
        save_file({"logits": model.float()(IDS).logits}, folder / "plain.safetensors")
    return found


def base(folder: Path, model: torch.nn.Module, dtype: torch.dtype) -> Pretrained:
    model.to(dtype).save_pretrained(folder)
    return Pretrained(path=str(folder))


def training(**settings) -> Training:
    return Training(**({"epochs": 1, "batch_rows": 2, "micro_batch_rows": 2, "learning_rate": 0.003} | settings))


class Kinds:
    """Results of all kinds, each made once, with the logits of the trained model before and after rounding."""

    def __init__(self, folder: Path, tokenizer: Artifact, patch: pytest.MonkeyPatch):
        self.folder, self.tokenizer, self.patch = folder, tokenizer, patch
        self.rows = packed_rows(folder / "pack", tokenizer)
        self.results: dict[str, Artifact] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self.rounded: dict[str, torch.Tensor] = {}
        self.histories: dict[str, list[dict[str, float]]] = {}
        save = pipeline.save_trained

        def look_and_save(trainer, training):
            spec = training.run.spec
            seen = model = trainer.accelerator.unwrap_model(trainer.model)
            dtype = save_model.choose_dtype(spec.training.save_dtype, training.config, training.run.compute)
            if spec.quantization:
                # The trained adapter is merged into the weights before quantization.
                seen = copy_trained(model, add_lora(load_pretrained(spec.base, weights_dtype=torch.float32), spec.lora))
            seen = deepcopy(seen).eval().float()
            # accelerate's, which computes in bfloat16.
            seen.__dict__.pop("forward", None)
            use_own_attention(seen.get_base_model() if spec.lora else seen)
            with torch.no_grad():
                self.logits[self.making] = seen(IDS).logits
                seen = seen.merge_and_unload() if spec.lora else seen
                for parameter in seen.parameters():
                    parameter.copy_(parameter.to(dtype))
                self.rounded[self.making] = seen(IDS).logits
            return save(trainer, training)

        patch.setattr(pipeline, "save_trained", look_and_save)

    def work(self, name: str) -> WorkFolder:
        work = WorkFolder(self.folder / name)
        work.start()
        self.making = name
        return work

    def sft(self, name: str, base, lora: Lora | None = None, quantization=None, **settings) -> None:
        spec = SftSpec(base=base, training=training(**settings), lora=lora, quantization=quantization)
        work = self.work(name)
        outcome = sft.build(
            spec, work, operation=executed(spec.training), pack=self.rows, tokenizer=self.tokenizer, base=[]
        )
        self.results[name] = chain.made(work.folder, outcome, spec)

    def dpo(self, name: str, source: str, lora: Lora | None = None, **settings) -> None:
        pairs = [
            {"id": str(i), "prompt": messages(f"cat {i}?"), "chosen": messages("", f"ton {i}")[1:],
             "rejected": messages("", f"hat {i} sing")[1:]}
            for i in range(6)
        ]  # fmt: skip
        corpus = chain.corpus(self.folder / f"{name}-pairs", "preference", pairs, held_out=2)
        packed = chain.pack(self.folder / f"{name}-pack", corpus, self.tokenizer, "preference", length=64)
        model, made = self.results[source], training(**settings)
        reference_spec = RefLogpsSpec(
            precision=made.precision, frozen_weights=lora is not None, quantization=None, trust_remote_code=False,
        )  # fmt: skip
        work = self.work(f"{name}-reference")
        outcome = ref_logps.build(reference_spec, work, model=[model], pack=packed)
        reference = chain.made(work.folder, outcome, reference_spec)
        reference.manifest["inputs"] = {"model": [model.content], "pack": [packed.manifest["pairs"]]}
        spec = DpoSpec(
            loss="sigmoid", beta=0.5, label_smoothing=0.0, lora=lora, quantization=None, trust_remote_code=False,
            training=made,
        )  # fmt: skip
        work = self.work(name)
        outcome = dpo.build(
            spec, work, operation=executed(made, log_steps=1), model=model, pack=packed, ref_logps=[reference]
        )
        self.results[name] = chain.made(work.folder, outcome, spec)
        self.histories[name] = outcome.run["history"]

    def quantized(self, source: str, precision: str) -> None:
        """Quantize to 4 bits on the CPU; a real run does so on CUDA only."""

        with self.patch.context() as patch:
            patch.setattr("snaketune.models.load_model._device_for_4_bits", lambda: "cpu")
            self.sft("qlora", Pretrained(path=source), LORA, Quantization(), precision=precision)


EXPECTED = {
    "full": "bfloat16",
    "full in float32": "float32",
    "scratch": "float32",
    "computed in bfloat16": "bfloat16",
    "tied": "bfloat16",
    "experts": "float32",
    "experts, lora": "bfloat16",
    "float16": "float32",
    "lora": "bfloat16",
    "lora, float32": "float32",
    "qlora": "bfloat16",
    "new tokens": "bfloat16",
    "new tokens, tied": "bfloat16",
    "dpo": "bfloat16",
    "dpo, lora": "bfloat16",
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        kinds = Kinds(folder, tokenizer, patch)
        shape = Scratch(hidden_size=16, intermediate_size=16, layers=1, heads=2, init_std=0.2)
        vocabulary = len(json.loads((tokenizer.folder / "tokenizer.json").read_text())["model"]["vocab"])
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "vocab_size": 512}
        assert vocabulary < 512
        llama = base(folder / "bases/llama", tiny_model("llama", **sizes), torch.bfloat16)
        kinds.sft("full", llama)
        kinds.sft("full in float32", llama, save_dtype="float32")
        kinds.sft("scratch", shape)
        kinds.sft("computed in bfloat16", shape, precision="bfloat16")
        tied = tiny_model("llama", tie_word_embeddings=True)
        with patch.context() as small:
            small.setattr(save_model, "SHARD_SIZE", "20KB")
            kinds.sft("tied", base(folder / "bases/tied", tied, torch.bfloat16))
            kinds.sft("experts", base(folder / "bases/experts", model_of("mixtral"), torch.float32))
        kinds.sft("experts, lora", base(folder / "bases/experts16", model_of("mixtral"), torch.bfloat16), LORA)
        kinds.sft("float16", base(folder / "bases/float16", tiny_model("llama"), torch.float16))
        kinds.sft("lora", llama, LORA, precision="bfloat16")
        kinds.sft("lora, float32", base(folder / "bases/plain", tiny_model("mistral"), torch.float32), LORA)
        kinds.quantized(llama.path, "float32")
        # As the finding of preflight on new tokens says.
        for name, is_tied, whole in (
            ("new tokens", False, ("embed_tokens", "lm_head")), ("new tokens, tied", True, ("embed_tokens",)),
        ):  # fmt: skip
            few = tiny_model("llama", **sizes | {"vocab_size": vocabulary - 3}, tie_word_embeddings=is_tied)
            lora = LORA.model_copy(update={"modules_to_save": whole})
            kinds.sft(name, base(folder / "bases" / name, few, torch.bfloat16), lora)
        kinds.dpo("dpo", "full", epochs=4)
        kinds.dpo("dpo, lora", "tied", LORA, epochs=4)
        kinds.loaded = {name: load_plainly(result.folder) for name, result in kinds.results.items()}
        yield kinds


@pytest.mark.parametrize("kind", EXPECTED)
def test_transformers_loads_a_result_as_the_trained_model(kinds, kind):
    dtype, loaded, result = EXPECTED[kind], kinds.loaded[kind], kinds.results[kind]
    assert loaded["dtypes"] == [f"torch.{dtype}"]
    assert loaded["config"] == f"torch.{dtype}"
    config = json.loads((result.folder / "config.json").read_text())
    assert config["dtype"] == dtype and config["use_cache"]
    assert result.manifest["saved_dtype"] == dtype
    assert loaded["wrong"] == {}
    plain, trained = load_file(result.folder / "plain.safetensors")["logits"], kinds.logits[kind]
    torch.testing.assert_close(plain, kinds.rounded[kind], rtol=1e-4, atol=1e-4)
    assert (plain - trained).square().mean() <= ROUNDING[dtype] ** 2 * trained.square().mean()


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_result_generates(kinds, kind):
    loaded = kinds.loaded[kind]
    assert (result := kinds.results[kind]).folder.joinpath("generation_config.json").is_file()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        p.name for p in result.folder.iterdir()
    }
    assert loaded["ids"] == kinds.loaded["full"]["ids"]
    assert len(loaded["ids"][0]) > 5
    assert 1 <= loaded["new"] <= 4
    assert loaded["stops"] == kinds.loaded["full"]["stops"] is not None
    assert loaded["pad"] == kinds.loaded["full"]["pad"] is not None


@pytest.mark.parametrize("kind", ["new tokens", "new tokens, tied"])
def test_rows_of_new_tokens_are_trained(kinds, kind):
    result = kinds.results[kind]
    weights = load_file(result.folder / "model.safetensors")
    untrained = load_pretrained(Pretrained(path=str(kinds.folder / "bases" / kind)), weights_dtype=torch.float32)
    known = untrained.config.vocab_size
    grow_vocabulary(untrained, len(weights["model.embed_tokens.weight"]))
    head = weights["model.embed_tokens.weight" if kind.endswith("tied") else "lm_head.weight"]
    assert len(head) > known
    moved = (head[known:].float() - untrained.lm_head.weight[known:]).abs().amax(1)
    assert (moved > 1e-3).all()


def test_large_results_are_saved_in_shards_with_an_index(kinds):
    for kind in ("tied", "experts"):
        result = kinds.results[kind]
        shards = sorted(path.name for path in result.folder.glob("model-*.safetensors"))
        assert len(shards) > 1
        assert {*shards, "model.safetensors.index.json"} <= result.manifest["payload"].keys()
        index = json.loads((result.folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(shards)
    # A run that starts from a sharded result has its own weights and not that result's index.
    assert "model.safetensors" in (payload := kinds.results["dpo, lora"].manifest["payload"])
    assert not [name for name in payload if "index" in name or "-of-" in name]


def test_tied_weights_are_written_once(kinds):
    for kind in ("tied", "dpo, lora"):
        names = [
            name for path in kinds.results[kind].folder.glob("model*.safetensors") for name in load_file(path)
        ]  # fmt: skip
        assert "lm_head.weight" not in names
        assert kinds.loaded[kind]["tied"]


@pytest.mark.parametrize("kind", ["dpo", "dpo, lora"])
def test_dpo_from_a_rounded_result_starts_at_its_reference(kinds, kind):
    first = kinds.histories[kind][0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(first["chosen_reward"]) < 1e-5
    assert kinds.histories[kind][-1]["loss"] < first["loss"]


def test_adapters_are_added_in_float32_and_rounded_once(tmp_path):
    weights = tiny_model("llama").to(torch.bfloat16)
    exact, adapted = (add_lora(tiny_model("llama").to(torch.bfloat16), LORA) for _ in range(2))
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.normal_(std=0.05)
    copy_trained(adapted, exact)
    merged = merge(adapted, torch.bfloat16)
    wanted = exact.float().merge_and_unload()
    changed = 0
    for name, tensor in merged.named_parameters():
        assert torch.equal(tensor, wanted.get_parameter(name).to(torch.bfloat16)), name
        changed += not torch.equal(tensor, weights.get_parameter(name))
    assert changed == 2 * 7


def test_weights_that_a_model_requires_in_float32_are_saved_in_float32():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    model._keep_in_fp32_modules_strict = {"norm"}
    cast_parameters(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {n for n in dtypes if "norm" in n}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_contradicting_sampling_settings_do_not_fail_the_save(tmp_path, tokenizer):
    """Some bases on the Hub have such settings."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    odd = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(odd))
    spec = SftSpec(base=Pretrained(path=str(tmp_path / "base")), training=training(), lora=None, quantization=None)
    work = WorkFolder(tmp_path / "work")
    work.start()
    rows = packed_rows(tmp_path / "pack", tokenizer)
    sft.build(spec, work, operation=executed(spec.training), pack=rows, tokenizer=tokenizer, base=[])
    written = json.loads((work.payload / "generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)
    assert written["eos_token_id"]


def test_a_tokenizer_that_autotokenizer_loads_differently_is_noted(tmp_path, tokenizer, capsys):
    for path in tokenizer.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for family, differs in (("llama", False), ("mistral", False), ("phi3", False), ("qwen2", True)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        save_model.warn_if_tokenizer_differs(tmp_path)
        assert ("tokenizes text differently from" in (output := capsys.readouterr().out)) == differs, family
    assert "loads this model's tokenizer as Qwen2Tokenizer" in output
    advised = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(save_model.PROBE).ids
    assert advised(save_model.PROBE)["input_ids"] == own
    assert advised.chat_template


def test_the_saved_data_type():
    bf16 = replace(CPU, dtype=torch.bfloat16)
    named, silent = AutoConfig.for_model("llama", dtype=torch.bfloat16), AutoConfig.for_model("llama")
    assert save_model.choose_dtype("auto", None, CPU) == torch.float32
    assert save_model.choose_dtype("auto", silent, CPU) == torch.float32
    assert save_model.choose_dtype("auto", AutoConfig.for_model("llama", dtype=torch.float16), CPU) == torch.float32
    assert save_model.choose_dtype("auto", named, CPU) == torch.bfloat16
    assert save_model.choose_dtype("auto", silent, bf16) == torch.bfloat16
    assert save_model.choose_dtype("float32", named, bf16) == torch.float32
    assert save_model.choose_dtype("bfloat16", silent, CPU) == torch.bfloat16
