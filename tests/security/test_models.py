"""Files of models: pickles, code, adapters and indexes that lead elsewhere. Nothing of it runs unless configured."""

import builtins
import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from snaketune.config.base_models import Pretrained
from snaketune.config.evaluations import TaskSettings
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.evaluation.tasks import prepared_tasks
from snaketune.models.load_model import load_pretrained, own_tokenizer, read_config
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.vocabulary import adopt
from snaketune.training.save_model import warn_if_tokenizer_differs
from tests.models.conftest import tiny_model
from tests.tokenization.small_tokenizers import save_tokenizer

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "hostile"
class Model(LlamaForCausalLM): config_class = Config
class Tok(PreTrainedTokenizerFast): pass
"""
AUTO = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model", "AutoTokenizer": [None, "hostile.Tok"]}


@pytest.fixture(autouse=True)
def said_yes(monkeypatch, tmp_path):
    """Answer yes to any prompt at the terminal whether code may run."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def base(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = save_tokenizer(
        tmp_path / "made", tokenizer, "{{ messages }}", eos_token="w1", pad_token="w0", unk_token="w2"
    )
    for path in made.iterdir():
        path.rename(tmp_path / "base" / path.name)
    return tmp_path / "base"


def edit(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def with_code(base, mark):
    """A base that brings Python, under the type of a model that transformers knows and of one that it doesn't."""
    (base / "hostile.py").write_text(mark.code(CODE))
    edit(base / "config.json", auto_map=AUTO, model_type="hostile")
    edit(base / "tokenizer_config.json", auto_map={"AutoTokenizer": AUTO["AutoTokenizer"]}, tokenizer_class="Tok")
    return base


@pytest.mark.parametrize("known", [False, True])
def test_code_that_comes_with_a_model_does_not_run(with_code, mark, known):
    if known:
        edit(with_code / "config.json", model_type="llama")
    for look in (
        lambda: load_pretrained(Pretrained(path=str(with_code)), weights_dtype=torch.float32),
        lambda: read_config(Pretrained(path=str(with_code))),
        lambda: own_tokenizer(Pretrained(path=str(with_code))),
    ):
        try:
            look()
        except SnaketuneError as error:
            assert "custom code" in str(error)
        mark.check()


def test_code_that_comes_with_a_tokenizer_does_not_run(with_code, tmp_path, mark):
    with pytest.raises(SnaketuneError, match="can't be loaded as a tokenizer"):
        adopt(TokenizerSpec(adopt=str(with_code)), None, tmp_path)
    mark.check()


def test_no_prompt_asks_whether_the_code_of_a_result_may_run(with_code, tmp_path, mark):
    warn_if_tokenizer_differs(with_code)
    mark.check()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/t.yaml").write_text("task: t\ndataset_path: json\n")
    requested = prepared_tasks(TaskSettings(names=("t",)), tmp_path / "tasks", with_code, tmp_path)
    with pytest.raises(ValueError, match="custom code"), requested:
        pass
    mark.check()


def test_it_runs_if_configured(with_code, mark):
    load_pretrained(Pretrained(path=str(with_code), trust_remote_code=True), weights_dtype=torch.float32)
    assert mark.path.exists()
    mark.path.unlink()


def test_a_way_to_generate_that_comes_with_a_model_does_not_run(base, mark):
    (base / "custom_generate").mkdir()
    (base / "custom_generate/generate.py").write_text(mark.code("def generate(model, **_): pass"))
    loaded = load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)
    loaded.generate(torch.tensor([[3, 4]]), max_new_tokens=1)


def test_a_kernel_that_a_config_names_is_not_fetched(base):
    edit(base / "config.json", attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    with pytest.raises((SnaketuneError, ImportError), match="kernel"):
        load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)


def test_pickled_weights_are_not_read(base, mark, monkeypatch):
    weights = base / "model.safetensors"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt"):
        (base / name).write_bytes(mark.bomb())
    load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)
    weights.unlink()
    with pytest.raises(SnaketuneError, match=r"can't be loaded"):
        load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)
    mark.check()
    run = {"base": {"path": str(base)}, "corpus": "c", "tokenizer": "t", "training": {"learning_rate": 1e-4}}
    corpora = {"c": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "main"}}]}}
    with pytest.raises(SnaketuneError, match=r"config\.json and \*\.safetensors"):
        load({"corpora": corpora, "tokenizers": {"t": {"adopt": str(base)}}, "sft": {"r": run}})


def test_a_pickle_that_is_called_safetensors_is_none(base, mark):
    (base / "model.safetensors").write_bytes(mark.bomb())
    with pytest.raises(SnaketuneError, match="can't be loaded"):
        load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)


@pytest.mark.parametrize("pickled", [True, False])
def test_an_adapter_beside_a_model_is_refused(base, mark, pickled):
    """transformers would add it; where it isn't in safetensors, from a pickle that is in no fingerprint."""
    (base / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "somebody/else"})
    )
    if pickled:
        torch.save({"x": torch.ones(1)}, base / "adapter_model.bin")
    else:
        save_file({"x": torch.ones(1)}, base / "adapter_model.safetensors")
    with pytest.raises(SnaketuneError, match="comes with an adapter"):
        load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "deep/x.safetensors", "x.bin", 5]
)
def test_an_index_that_leads_elsewhere_is_refused(base, mark, tmp_path, name):
    (base / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (base / "x.bin").write_bytes(mark.bomb())
    names = [key for key, _ in tiny_model("llama").named_parameters()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SnaketuneError, match=r"model\.safetensors\.index\.json"):
        load_pretrained(Pretrained(path=str(base)), weights_dtype=torch.float32)


@pytest.mark.parametrize("config", ["config.json", "config.4.0.0.json"])
@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.bin",
        "w/v1.safetensors",
        "other.safetensors",
        "other.safetensors.index.json",
        "../elsewhere.safetensors",
        "{tmp}/elsewhere.safetensors",
    ],
)
def test_a_config_that_names_other_weights_is_refused(base, mark, tmp_path, config, name):
    """transformers would load them in place of model.safetensors."""
    (base / "w").mkdir()
    for path in ("w/v1.safetensors", "other.safetensors", "../elsewhere.safetensors"):
        (base / path).write_bytes((base / "model.safetensors").read_bytes())
    (base / "adapter_model.bin").write_bytes(mark.bomb())
    names = [key for key, _ in tiny_model("llama").named_parameters()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (base / "other.safetensors.index.json").write_text(json.dumps(index))
    (base / config).write_bytes((base / "config.json").read_bytes())
    edit(base / config, transformers_weights=name.replace("{tmp}", str(tmp_path)))
    edit(base / "config.json", configuration_files=["config.4.0.0.json"])
    for look in (read_config, lambda model: load_pretrained(model, weights_dtype=torch.float32)):
        with pytest.raises(SnaketuneError, match=r"transformers_weights|index\.json names"):
            look(Pretrained(path=str(base)))
    mark.check()


def test_a_tokenizer_from_outside_of_its_folder_is_refused(base, tmp_path):
    (base / "tokenizer.json").rename(tmp_path / "tokenizer.4.0.0.json")
    edit(base / "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.0.json"])
    with pytest.raises(SnaketuneError, match="fast_tokenizer_files names"):
        adopt(TokenizerSpec(adopt=str(base)), None, tmp_path)
