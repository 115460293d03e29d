"""Adapters are added by the config, trained, saved and loaded: by this package and by plain peft."""

import json
import traceback
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora
from snaketune.engine.checkpoints import copy_trained, load_weights, save_weights, trained_tensors
from snaketune.engine.model.adapters import cast_parameters, leave_casts_to_autocast, load_adapter, merge, save_adapter
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import grow_vocabulary, load_pretrained, reload_model
from snaketune.models.lora import add_lora
from tests.training.test_resume import model_of

from .conftest import VOCABULARY, tiny_model

IDS = torch.arange(5, 29)[None]


def by_plain_peft(folder: Path) -> dict[str, torch.Tensor]:
    """The logits of an adapter that peft and transformers load alone."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.resize_token_embeddings(int((folder / "tokens").read_text()))
    loaded = {"given": PeftModel.from_pretrained(base, folder / "adapter")}
    if base.config.vocab_size == VOCABULARY:
        loaded["found"] = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    with torch.no_grad():
        return {name: model(IDS).logits for name, model in loaded.items()}


# Family, adapter settings and model settings of each case.
KINDS = {
    "llama": ("llama", {}, Lora(rank=4)),
    "fused qkv": ("phi3", {}, Lora(rank=4)),
    "Conv1D": ("gpt2", {}, Lora(rank=4)),
    "experts": ("mixtral", {}, Lora(rank=2)),
    "more experts": ("qwen3_moe", {}, Lora(rank=2)),
    "rslora": ("llama", {}, Lora(rank=4, rslora=True)),
    "dora": ("llama", {}, Lora(rank=4, dora=True)),
    "dora on Conv1D": ("gpt2", {}, Lora(rank=4, dora=True)),
    "by a pattern": (
        "qwen2",
        {},
        Lora(rank=4, target_modules=r"model\.layers\.1\..*(q|v)_proj", dora=True, rslora=True),
    ),
    "whole": ("llama", {}, Lora(rank=4, modules_to_save=("embed_tokens", "lm_head", "model.norm"))),
    "whole, tied": ("llama", {"tie_word_embeddings": True}, Lora(rank=4, modules_to_save=("embed_tokens",))),
    "whole, tied by another name": ("gpt2", {}, Lora(rank=4, modules_to_save=("wte",))),
    "whole router": ("mixtral", {}, Lora(rank=2, target_modules=("q_proj",), modules_to_save=("gate",))),
    "more tokens": ("llama", {}, Lora(rank=4)),
    "more tokens, tied": ("qwen2", {"tie_word_embeddings": True}, Lora(rank=4)),
    "more tokens, trained": ("llama", {"tie_word_embeddings": True}, Lora(rank=4, modules_to_save=("lm_head",))),
    "more tokens, half of them trained": ("llama", {}, Lora(rank=4, modules_to_save=("embed_tokens",))),
    "gaussian": ("llama", {}, Lora(rank=4, init_lora_weights="gaussian")),
    "orthogonal": ("llama", {}, Lora(rank=4, init_lora_weights="orthogonal")),
    "pissa": ("llama", {}, Lora(rank=4, init_lora_weights="pissa")),
    "pissa, fast": ("qwen2", {}, Lora(rank=4, init_lora_weights="pissa_niter_16", rslora=True)),
    "pissa on Conv1D": ("gpt2", {}, Lora(rank=4, init_lora_weights="pissa")),
    "pissa, more tokens": (
        "llama",
        {},
        Lora(rank=4, init_lora_weights="pissa", modules_to_save=("embed_tokens",)),
    ),
    "olora": ("llama", {}, Lora(rank=4, init_lora_weights="olora")),
    "olora, dora": ("llama", {}, Lora(rank=4, init_lora_weights="olora", dora=True)),
    "gaussian, experts": ("mixtral", {}, Lora(rank=2, init_lora_weights="gaussian")),
    "adapter on the embedding": ("llama", {}, Lora(rank=4, target_modules=("embed_tokens", "lm_head", "q_proj"))),
}
# Where initial adapters changed the base, a loaded adapter sums other numbers than the training did.
ROUNDING = {False: 1e-5, True: 2e-4}


def learned(adapted: torch.nn.Module) -> torch.nn.Module:
    """Change every trained parameter, as a training does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in trained_tensors(adapted).values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn(tensor.shape))
    return adapted.eval()


def base_of(family: str, settings: dict) -> torch.nn.Module:
    return (model_of(family) if family in ("mixtral", "qwen3_moe") else tiny_model(family, **settings)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Base, adapter and trained model's logits of each kind."""
    root = tmp_path_factory.mktemp("adapters")
    for kind, (family, settings, lora) in KINDS.items():
        folder, tokens = root / kind, VOCABULARY + (3 if "more tokens" in kind else 0)
        model = base_of(family, settings)
        model.save_pretrained(folder / "base")
        grow_vocabulary(model, tokens)
        adapted = learned(add_lora(model, lora))
        save_adapter(adapted, folder / "adapter", base=Pretrained(path=str(folder / "base")), grown=tokens > VOCABULARY)
        (folder / "tokens").write_text(str(tokens))
        with torch.no_grad():
            save_file({"logits": adapted(IDS).logits}, folder / "expected.safetensors")
            merged = merge(adapted, torch.float32)
            save_file({"logits": merged(IDS).logits}, folder / "merged.safetensors")
    return root


def logits(path: Path, name: str = "logits") -> torch.Tensor:
    return load_file(path)[name]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_peft_and_the_merged_model_compute_the_trained_model(folders, kind):
    expected = logits(folders / kind / "expected.safetensors")
    torch.testing.assert_close(logits(folders / kind / "merged.safetensors"), expected, rtol=1e-4, atol=2e-4)
    rounding = ROUNDING[KINDS[kind][2].changes_base]
    for plain in by_plain_peft(folders / kind).values():
        torch.testing.assert_close(plain, expected, rtol=rounding, atol=rounding)
    with torch.no_grad():
        before = load_pretrained(Pretrained(path=str(folders / kind / "base")), weights_dtype=torch.float32)(IDS).logits
    assert (expected[..., :VOCABULARY] - before).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_loads_unchanged(folders, kind):
    model = load_pretrained(Pretrained(path=str(folders / kind / "base")), weights_dtype=torch.float32)
    grow_vocabulary(model, int((folders / kind / "tokens").read_text()))
    with torch.no_grad():
        loaded = load_adapter(model, folders / kind / "adapter").eval()(IDS).logits
    expected = logits(folders / kind / "expected.safetensors")
    if KINDS[kind][2].changes_base:
        torch.testing.assert_close(loaded, expected, rtol=ROUNDING[True], atol=ROUNDING[True])
    else:
        assert torch.equal(loaded, expected)


@pytest.mark.parametrize(
    "kind", [kind for kind, case in KINDS.items() if case[2].init_lora_weights is not True and case[0] != "mixtral"]
)
def test_initial_adapters_leave_the_model_as_it_is_and_are_pefts(folders, kind):
    family, settings, lora = KINDS[kind]
    torch.manual_seed(3)
    adapted = add_lora(base_of(family, settings), lora)
    with torch.no_grad():
        torch.testing.assert_close(adapted(IDS).logits, base_of(family, settings)(IDS).logits, rtol=1e-4, atol=1e-4)
    torch.manual_seed(3)
    config, ours = LoraConfig(r=lora.rank, lora_alpha=lora.alpha), adapted.peft_config["default"]
    config.init_lora_weights, config.use_rslora, config.use_dora = lora.init_lora_weights, lora.rslora, lora.dora
    config.target_modules, config.exclude_modules = ours.target_modules, ours.exclude_modules
    expected = get_peft_model(base_of(family, settings), config).state_dict()
    matrices = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    assert matrices
    assert not [name for name, tensor in matrices.items() if not torch.equal(tensor, expected[name])]


def test_an_adapter_names_its_base_as_the_config_does_and_is_the_same_in_every_process(tmp_path):
    for name, base in (("hub", Pretrained(path="some/model", revision="f00")), ("result", None)):
        save_adapter(add_lora(model_of("mixtral"), Lora()), tmp_path / name, base=base, grown=False)
    config, result_config = (
        json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("hub", "result")
    )
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "f00")
    assert (result_config["base_model_name_or_path"], result_config["revision"]) == (None, None)
    for key in ("target_modules", "target_parameters"):
        assert config[key] == sorted(config[key])
        assert len(config[key]) > 1


def test_an_adapter_on_another_model_is_refused(folders, tmp_path):
    with pytest.raises(SnaketuneError, match=r"does not fit its base model: .*size mismatch"):
        load_adapter(tiny_model("llama", hidden_size=64), folders / "llama/adapter")
    adapter = tmp_path / "adapter"
    save_adapter(add_lora(tiny_model("llama"), Lora(rank=2)), adapter, base=None, grown=False)
    tensors = load_file(adapter / "adapter_model.safetensors")
    gone = sorted(tensors)[3]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, adapter / "adapter_model.safetensors")
    with pytest.raises(SnaketuneError, match=r"does not fit its base model: it has no .*lora_"):
        load_adapter(tiny_model("llama"), adapter)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ("q_prj",)}, r"target_modules: the model has no module 'q_prj'; did you mean 'q_proj'"),
        ({"target_modules": ("q_proj", "w3")}, r"target_modules: the model has no module 'w3'; known: .*down_proj"),
        ({"target_modules": "q_proj"}, r"'q_proj' matches no full module name; examples of names: model\.layers\.0"),
        ({"target_modules": ("mlp",)}, r": Target module LlamaMLP.* are supported"),
        ({"target_modules": r"(.|..)+q_prox|.*"}, r"target_modules: the pattern .* takes more than"),
        ({"modules_to_save": ("lm_hed",)}, r"modules_to_save: the model has no module 'lm_hed'; did you mean 'lm_head'"),
        # peft compares the ends of names as text.
        ({"modules_to_save": ("proj",)}, r"modules_to_save: the model has no module 'proj'"),
        ({"modules_to_save": ("mlp", "up_proj")}, r"model\.layers\.0\.mlp\.up_proj is a part of model\.layers\.0\.mlp"),
    ],
)  # fmt: skip
def test_unknown_module_names_are_refused_with_examples(lora, message, monkeypatch):
    monkeypatch.setattr("snaketune.patterns.SECONDS", 0.05)
    with pytest.raises(SnaketuneError, match=f"lora.*{message}"):
        add_lora(tiny_model("llama"), Lora(rank=2, **lora))


@pytest.mark.parametrize(
    ("family", "initial", "targets"),
    [
        ("mixtral", "pissa", "all-linear"),
        ("mixtral", "orthogonal", "all-linear"),
        ("mixtral", "eva", "all-linear"),
        ("llama", "olora", ("embed_tokens", "q_proj")),
    ],
)
def test_initial_adapters_of_linear_layers_are_refused_on_others(family, initial, targets):
    lora = Lora(rank=2, init_lora_weights=initial, target_modules=targets)
    with pytest.raises(SnaketuneError, match=rf"{initial} is for linear layers, and lora\.target_modules has others"):
        add_lora(base_of(family, {}), lora)


def test_a_name_matches_full_components_only():
    adapted = add_lora(tiny_model("llama"), Lora(rank=2, target_modules=("q_proj",), modules_to_save=("norm",)))
    whole = {name for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    assert whole == {"base_model.model.model.norm.modules_to_save.default.weight"}


def test_one_name_trains_both_tied_embeddings_as_one_tensor():
    for name in ("embed_tokens", "lm_head"):
        adapted = add_lora(tiny_model("llama", tie_word_embeddings=True), Lora(rank=2, modules_to_save=(name,)))
        trained = [name for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name]
        assert trained == ["base_model.model.model.embed_tokens.modules_to_save.default.weight"]
        merged = merge(learned(adapted), torch.bfloat16)
        cast_parameters(merged, torch.bfloat16)
        assert merged.lm_head.weight is merged.model.embed_tokens.weight
        assert type(merged.lm_head) is torch.nn.Linear


def test_modules_to_save_are_trained_in_float32_and_start_as_the_same_model():
    model = tiny_model("llama").to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(IDS).logits
    adapted = add_lora(model, Lora(rank=2, modules_to_save=("embed_tokens", "lm_head", "norm")))
    trained = {p.dtype for p in adapted.parameters() if p.requires_grad}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(adapted(IDS).logits, before)
    assert trained == {torch.float32}


def test_modules_to_save_are_in_checkpoints(tmp_path):
    lora = Lora(rank=2, dora=True, modules_to_save=("embed_tokens", "norm"))
    first, second = (add_lora(tiny_model("llama", tie_word_embeddings=True), lora).eval() for _ in range(2))
    learned(first)
    save_weights(tmp_path, first)
    load_weights(tmp_path, second)
    third = copy_trained(first, add_lora(tiny_model("llama", tie_word_embeddings=True), lora)).eval()
    with torch.no_grad():
        assert torch.equal(second(IDS).logits, first(IDS).logits)
        assert torch.equal(third(IDS).logits, first(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reload_model_equals_save_and_load(tmp_path, family, dtype):
    model = base_of(family, {"tie_word_embeddings": True}).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    expected = load_pretrained(Pretrained(path=str(tmp_path)), weights_dtype=dtype).state_dict()
    loaded = reload_model(model, weights_dtype=dtype)
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (family != "mixtral")


def test_gpt2_conv1d_layers_get_adapters():
    adapted = add_lora(tiny_model("gpt2"), Lora(rank=2, dora=True))
    layers = [m for m in adapted.modules() if hasattr(m, "base_layer") and isinstance(m.base_layer, Conv1D)]
    assert len(layers) == 2 * 4


class Casts(TorchDispatchMode):
    """Counts casts of 16-bit tensors to float32 inside peft's layers."""

    def __init__(self):
        super().__init__()
        self.lifted_count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        lifts = function.overloadpacket.__name__ == "_to_copy" and keywords.get("dtype") == torch.float32
        callers = (
            frame.filename for frame in reversed(traceback.extract_stack()[:-1]) if "/torch/" not in frame.filename
        )
        self.lifted_count += lifts and "/peft/" in next(callers)
        return function(*arguments, **keywords or {})


@pytest.mark.parametrize(
    ("lora", "casts"),
    [(Lora(rank=4), False), (Lora(rank=4, dropout=0.2), False), (Lora(rank=4, dora=True), True)],
)
def test_under_autocast_adapter_inputs_are_not_cast_to_float32(lora, casts):
    """Logits are equal up to dropout's scaling, without two casts of each adapter's inputs."""
    results = []
    for without_casts in (False, True):
        model = add_lora(tiny_model("llama").bfloat16(), lora).train()
        if without_casts:
            leave_casts_to_autocast(model)
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16), Casts() as counted:
            logits = model(IDS).logits
        results.append((logits, counted.lifted_count > 0))
    (before, lifted), (after, still) = results
    assert (lifted, still) == (True, casts)
    torch.testing.assert_close(after, before, rtol=0.02 if lora.dropout else 0, atol=0.02 if lora.dropout else 0)
