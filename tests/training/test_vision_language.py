"""A vision-language model that is trained on text remains one: its other tensors unchanged, its text part trained."""

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks.families.tiny import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora
from snaketune.diagnostics.run_checks import check_tokenizer_match
from snaketune.engine.model.flops import count_flops
from snaketune.engine.model.text_part import other_parameters
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.load_model import load_pretrained, read_config
from snaketune.models.lora import add_lora
from snaketune.models.traced_model import MicroBatch, trace_model
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training import non_text_modules, save_model
from tests.models.conftest import CPU

from .test_save_model import IDS, Kinds

pytestmark = pytest.mark.slow

QWEN = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip
SIGLIP = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 1}
LLAMA4 = SIGLIP | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
VISION = {
    "qwen3_5": QWEN, "qwen3_vl": QWEN, "qwen2_5_vl": QWEN, "gemma3": SIGLIP, "mistral3": SIGLIP, "llama4": LLAMA4,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
TEXT = {"qwen3_vl": MROPE, "qwen2_5_vl": MROPE, "llama4": {"num_local_experts": 2}}
# Families of which AutoModelForCausalLM loads the text part alone.
TEXT_ONLY = ("qwen3_5", "llama4")
WHOLE = ("gemma3", "qwen3_vl", "qwen2_5_vl", "mistral3")


def tiny_base(family: str, folder: Path, *, tied: bool = False, dtype=torch.float32, **save) -> Path:
    """Write a random vision-language model, with a tensor that no class loads, as real checkpoints have them."""
    config = tiny_config(family)
    values = config.to_dict() | {"tie_word_embeddings": tied}
    images = [name for name in values if re.fullmatch("(image|video|vision|boi|eoi).*_token_(id|index)", name)]
    values |= dict.fromkeys(images, 120)
    values["vision_config"] |= {
        name: value for name, value in VISION[family].items() if name in values["vision_config"]
    }
    values["text_config"] |= TEXT.get(family, {}) | {"vocab_size": 512, "tie_word_embeddings": tied}
    if family == "gemma3":
        values["mm_tokens_per_image"] = 4
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(type(config)(**values)).to(dtype)
    model.save_pretrained(folder, **save)
    if not save:
        path = folder / "model.safetensors"
        save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2, dtype=dtype)}, path, metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.fixture
def kinds(tmp_path, tokenizer, monkeypatch):
    return Kinds(tmp_path, tokenizer, monkeypatch)


def check(kinds: Kinds, name: str, base: Path) -> None:
    """Check a result: names and other tensors of the base, trained text, and logits as in the training."""
    folder, before, after = kinds.results[name].folder, tensors(base), tensors(kinds.results[name].folder)
    config, original = (json.loads((one / "config.json").read_text()) for one in (folder, base))
    assert (config["architectures"], config["model_type"]) == (original["architectures"], original["model_type"])
    assert original["vision_config"].keys() <= config["vision_config"].keys()
    assert (folder / "preprocessor_config.json").read_text() == '{"size": 16}'
    unchanged = {key for key, tensor in after.items() if torch.equal(tensor, before[key].to(tensor.dtype))}
    loaded, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    plain = dict(AutoModelForImageTextToText.from_pretrained(base, dtype="auto").named_parameters())
    others, vision = other_parameters(loaded), set()
    for key, parameter in loaded.named_parameters():
        if parameter in others:
            assert parameter.dtype == plain[key].dtype
            assert torch.equal(parameter, plain[key]), key
            vision.add(key)
    assert any("patch" in key for key in vision)
    assert not any("language_model" in key or "lm_head" in key for key in vision)
    assert len(vision) <= len(unchanged) < len(after)
    with torch.no_grad():
        for found in (loaded, load_pretrained(Pretrained(path=str(folder)), weights_dtype=loaded.dtype)):
            logits = found.eval().float()(IDS).logits
            torch.testing.assert_close(logits, kinds.rounded[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3_5", False),
        ("llama4", True),
        pytest.param("qwen3_5", True, marks=pytest.mark.slow),
        pytest.param("llama4", False, marks=pytest.mark.slow),
    ],
)
def test_a_text_part_is_saved_as_the_whole_model(family, tied, kinds, capsys):
    base = tiny_base(family, kinds.folder / "base", tied=tied)
    kinds.sft("full", Pretrained(path=str(base)))
    check(kinds, "full", base)
    assert re.search(
        r"the text part of .* was trained; its other \d+ tensors are copied unchanged", capsys.readouterr().out
    )
    assert tensors(base).keys() == tensors(kinds.results["full"].folder).keys()
    kinds.dpo("dpo", "full", Lora(rank=2))
    check(kinds, "dpo", base)


def test_shards_in_16_bits_stay_as_they_are(kinds, monkeypatch):
    base = tiny_base("qwen3_5", kinds.folder / "base", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 3
    monkeypatch.setattr(save_model, "SHARD_SIZE", "30KB")
    kinds.sft("lora", Pretrained(path=str(base)), Lora(rank=2))
    check(kinds, "lora", base)
    folder = kinds.results["lora"].folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert index["weight_map"].keys() == tensors(base).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(folder).values())


def test_adapters_alone_are_merged_into_the_whole_model(kinds):
    named = Pretrained(path=str(tiny_base("qwen3_5", kinds.folder / "base")))
    kinds.sft("adapter", named, Lora(rank=2, merge=False))
    result, folder = kinds.results["adapter"], kinds.folder / "saved"
    result.manifest["inputs"] = {}
    stack = AdapterStack(results=(result,), base=named, tokenizer=result.folder)
    assert stack.weights == named
    model = stack.load(torch.float32)
    model.save_pretrained(folder)
    non_text_modules.add_non_text_modules(folder, model, stack.weights)
    assert tensors(folder).keys() == tensors(kinds.folder / "base").keys()
    loaded = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, kinds.rounded["adapter"], rtol=1e-4, atol=1e-4)


def test_a_second_copy_of_a_tied_head_is_left_out(kinds):
    base = tiny_base("qwen3_5", kinds.folder / "base", tied=True)
    stored = load_file(base / "model.safetensors")
    embedding = stored["model.language_model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding.clone()}, base / "model.safetensors", metadata={"format": "pt"})
    kinds.sft("full", Pretrained(path=str(base)))
    check(kinds, "full", base)
    assert "lm_head.weight" not in tensors(kinds.results["full"].folder)


def test_names_without_counterpart_leave_the_text_part_alone(kinds, capsys, monkeypatch):
    base = tiny_base("qwen3_5", kinds.folder / "base")
    monkeypatch.setattr(non_text_modules, "names_in_base", lambda *_: None)
    kinds.sft("full", Pretrained(path=str(base)))
    assert f"only the text part of {base} is trained and saved, as a qwen3_5_text model" in capsys.readouterr().out
    model, report = AutoModelForCausalLM.from_pretrained(kinds.results["full"].folder, output_loading_info=True)
    assert model.config.model_type == "qwen3_5_text"
    assert not any(report.values())


def test_other_names_of_a_text_part_are_those_of_the_base(kinds):
    """Llama4ForCausalLM is saved without the prefix that its tensors have in the base."""
    base = tiny_base("llama4", kinds.folder / "base")
    folder = kinds.folder / "saved"
    model = load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(folder, max_shard_size="100KB")
    non_text_modules.add_non_text_modules(folder, model, Pretrained(path=str(base)))
    before, after = tensors(base), tensors(folder)
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"language_model.lm_head.weight"}
    loaded, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.equal(loaded.language_model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        pytest.param(family, lora, marks=[] if (family in WHOLE[:2]) == bool(lora) else pytest.mark.slow)
        for family in WHOLE
        for lora in (None, Lora(rank=2))
    ],
)
def test_of_a_whole_model_the_text_part_is_trained(family, lora, kinds, capsys):
    base = tiny_base(family, kinds.folder / "base", tied=family == "gemma3")
    kinds.sft("sft", Pretrained(path=str(base)), lora)
    check(kinds, "sft", base)
    assert re.search(r"model: [\d.]+k parameters, [\d.]+k of them trained,", capsys.readouterr().out)
    if lora is None:
        kinds.dpo("dpo", "sft")
        check(kinds, "dpo", base)


@pytest.mark.parametrize("family", WHOLE)
def test_other_parts_are_frozen_and_get_no_adapters(family, tmp_path):
    base = tiny_base(family, tmp_path / "base")
    model = load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)
    others = other_parameters(model)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == {
        name for name, parameter in model.named_parameters() if parameter in others
    }
    text = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    config, batch = read_config(Pretrained(path=str(base))), MicroBatch(rows=1, row_length=32, longest=16)
    traced = trace_model(config, CPU, batch=batch)
    assert (traced.trained, traced.parameters) == (text, text + sum(parameter.numel() for parameter in others))
    assert traced.activations
    assert count_flops(model).frozen == 0
    for targets in ("all-linear", ("q_proj", "down_proj")):
        adapted = add_lora(
            load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32),
            Lora(rank=2, target_modules=targets),
        )
        names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        assert names
        assert all("language_model" in name for name in names)


@pytest.mark.parametrize("family", VISION)
def test_preflight_reads_configs_without_token_ids_of_their_own(family, tmp_path, tokenizer):
    config = read_config(Pretrained(path=str(tiny_base(family, tmp_path / "base"))))
    list(check_tokenizer_match("sft.run", ChatTokenizer.load(tokenizer.folder), config))


def test_a_model_that_is_no_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "florence2"}')
    with pytest.raises(SnaketuneError, match=r"base\.path: .* is a model of type florence2"):
        load_pretrained(Pretrained(path=str(tmp_path)), weights_dtype=torch.float32)
