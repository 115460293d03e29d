"""A base model is loaded completely, from its own files, with its own tokens."""

import json
import re
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Lora, Quantization
from snaketune.engine.model.parameters import parameter_count
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import grow_vocabulary, load_base, load_pretrained, own_tokenizer, read_config
from snaketune.models.lora import add_lora
from snaketune.tokenization.chat import ChatTokenizer

from .conftest import VOCABULARY, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def rewrite(folder, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (lambda weights: {k: v for k, v in weights.items() if "mlp" not in k}, r"layers.0.mlp.*\(6 in all\)"),
        (lambda weights: {k.replace("layers", "blocks"): v for k, v in weights.items()}, "layers.0"),
        (lambda weights: weights | {"lm_head.weight": torch.ones(VOCABULARY, 3)}, "lm_head.weight"),
    ],
)
def test_weights_that_would_be_random_are_refused(folder, change, lacks):
    load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32)
    rewrite(folder, change)
    with pytest.raises(SnaketuneError, match=lacks):
        load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32)


def test_unused_weights_are_listed(folder, capsys):
    rewrite(folder, lambda weights: weights | {"vision.weight": torch.ones(2)})
    load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32)
    assert "has weights that this model doesn't use: vision.weight (1 in all)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "can't be loaded: "),
        (lambda folder: (folder / "model.safetensors").unlink(), "can't be loaded: .*safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"), "can't be loaded: "),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nothing known"}'), "can't be loaded: "),
    ],
)
def test_a_folder_without_a_model_is_refused_by_name(folder, change, message):
    change(folder)
    with pytest.raises(SnaketuneError, match=f"the model '{folder}' {message}"):
        load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32)


def test_weights_in_pickles_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SnaketuneError, match="can't be loaded"):
        load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32)


def test_remote_code_is_not_run_by_default(folder):
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto_map}))
    (folder / "own.py").write_text("raise AssertionError('run')")
    for load in (read_config, lambda base: load_pretrained(base, weights_dtype=torch.float32)):
        with pytest.raises(SnaketuneError, match=r"can't be loaded: .*contains custom code"):
            load(Pretrained(path=str(folder)))


def test_4_bit_weights_are_trained_on_a_cpu_that_has_evaluated_them(folder):
    """bitsandbytes would repack them for a kernel without a backward pass."""
    model = load_pretrained(Pretrained(path=str(folder)), weights_dtype=torch.float32, quantization=Quantization())
    adapted = add_lora(model, Lora(rank=4))
    ids = torch.arange(4, 36)[None]
    with torch.no_grad():
        evaluated = adapted.eval()(input_ids=ids, labels=ids).loss
    trained = adapted.train()(input_ids=ids, labels=ids).loss
    assert trained == evaluated
    trained.backward()
    gradients = [
        p.grad.abs().max() for name, p in adapted.named_parameters() if "layers.0.self_attn.q_proj.lora_B" in name
    ]
    assert gradients and min(gradients) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_requested_data_type(folder, dtype):
    saved = load_file(folder / "model.safetensors")
    for name, parameter in load_pretrained(Pretrained(path=str(folder)), weights_dtype=dtype).named_parameters():
        assert torch.equal(parameter, saved[name].to(dtype)), name


class Chat:
    """The part of a tokenizer that loading needs."""

    pad_id, stop_ids = 0, (1,)

    def __init__(self, vocabulary: dict[str, int]):
        self.ids = vocabulary
        self.vocab_size = len(vocabulary)

    def mismatched_tokens(self, vocabulary: dict[str, int]) -> list[str]:
        return [token for token, id in vocabulary.items() if self.ids.get(token) != id]


def test_a_missing_model_is_reported_as_missing(folder, tmp_path, monkeypatch):
    # Read from the environment when it was imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert own_tokenizer(Pretrained(path=str(folder))) is None
    for path in (str(tmp_path / "nowhere"), "no-such/model-anywhere"):
        with pytest.raises(SnaketuneError, match=f"the model '{path}' can't be loaded"):
            own_tokenizer(Pretrained(path=path))


def test_a_tokenizer_of_another_model_is_refused_and_added_tokens_are_not(folder):
    own = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(own, unk_token="t0")).save(str(folder / "tokenizer.json"))
    base = Pretrained(path=str(folder))
    more = Chat(own | {"<new>": VOCABULARY})
    assert load_base(base, more, weights_dtype=torch.float32).get_input_embeddings().weight.shape[0] == VOCABULARY + 1
    swapped = Chat(own | {"t5": 6, "t6": 5})
    with pytest.raises(SnaketuneError, match=r"2 of 97 tokens have another id, for instance 't[56]'"):
        load_base(base, swapped, weights_dtype=torch.float32)


# Control tokens of a run's tokenizer; their ids follow the words, as the base's own `<start>`, `<end>` and `<spare>` do.
@pytest.mark.parametrize(
    ("control", "refused"),
    [
        (["<start>", "<end>", "<spare>"], None),
        (["<start>", "<end>", "<spare>", "<pad>"], None),
        (["<start>", "<end>"], None),
        # Swapped; those of another model with the same words; one added in another order.
        (["<end>", "<start>", "<spare>"], "2 of 100 tokens have another id, for instance '<(start|end)>'"),
        (["<user>", "<end>", "<spare>"], "1 of 100 tokens have another id, for instance '<start>'"),
        (["<start>", "<end>", "<pad>"], None),
        (["<start>", "<end>", "<pad>", "<spare>"], "1 of 100 tokens have another id, for instance '<spare>'"),
    ],
)
def test_control_tokens_of_a_base_keep_their_ids(folder, control, refused):
    own = {f"t{i}": i for i in range(VOCABULARY)}
    base = _with_control(own, ["<start>", "<end>", "<spare>"])
    base.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "pad_token": "t0"}
    chat = ChatTokenizer(json.loads(_with_control(own, control).to_str()), config, "")
    model = Pretrained(path=str(folder))
    if refused:
        with pytest.raises(SnaketuneError, match=f"{refused}; adopt the base's tokenizer"):
            load_base(model, chat, weights_dtype=torch.float32)
    else:
        load_base(model, chat, weights_dtype=torch.float32)


def _with_control(own: dict[str, int], control: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(own, unk_token="t0"))
    tokenizer.add_special_tokens(control)
    return tokenizer


def test_a_model_from_scratch_depends_on_its_own_seed_alone():
    def made(seed: int) -> torch.Tensor:
        shape = Scratch(hidden_size=8, intermediate_size=8, layers=1, heads=1, tie_embeddings=False, seed=seed)
        model = load_base(shape, Chat({f"t{i}": i for i in range(50)}), weights_dtype=torch.float32)
        assert (model.config.pad_token_id, model.generation_config.eos_token_id) == (0, [1])
        assert read_config(shape) is None
        return model.lm_head.weight

    torch.manual_seed(1)
    first = made(3)
    torch.manual_seed(2)
    assert torch.equal(made(3), first)
    assert not torch.equal(made(4), first)
    assert len(first) == 50


def test_new_rows_of_the_vocabulary_are_the_same_at_every_load():
    models = []
    for seed, dtype in ((1, torch.float32), (2, torch.float32), (3, torch.bfloat16)):
        model = tiny_model("llama", initializer_range=0.02).to(dtype)
        torch.manual_seed(seed)
        grow_vocabulary(model, VOCABULARY + 3)
        models.append(model)
    for pick in (lambda model: model.get_input_embeddings(), lambda model: model.get_output_embeddings()):
        first, second, rounded = (pick(model).weight[-3:] for model in models)
        assert first.shape == (3, 32)
        assert first.std() > 0.01
        assert torch.equal(first, second)
        assert torch.equal(first.to(torch.bfloat16), rounded)


def test_a_vocabulary_never_shrinks_and_existing_rows_do_not_change():
    model = tiny_model("llama", tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    grow_vocabulary(model, VOCABULARY - 5)
    assert torch.equal(model.get_input_embeddings().weight, before)
    grow_vocabulary(model, VOCABULARY + 5)
    assert torch.equal(model.get_input_embeddings().weight[:VOCABULARY], before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.vocab_size == VOCABULARY + 5


def test_only_adapters_train():
    model = tiny_model("llama")
    layers = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    everywhere = add_lora(model, Lora(rank=2))
    trained = [name for name, parameter in everywhere.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(layers)
    assert all("lora_" in name for name in trained)
    some = add_lora(tiny_model("llama"), Lora(rank=2, target_modules=("q_proj",)))
    assert all("q_proj" in name for name, parameter in some.named_parameters() if parameter.requires_grad)
    with pytest.raises(SnaketuneError, match=r"lora\.target_modules: .*no_such_layer"):
        add_lora(tiny_model("llama"), Lora(rank=2, target_modules=("no_such_layer",)))


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_an_adapter_on_tied_embeddings_is_refused(module):
    """Merging it into one of them would change the other."""
    targets = Lora(rank=2, target_modules=("q_proj", module))
    with pytest.raises(
        SnaketuneError, match=r"lora\.target_modules: the output head of this model is tied to its embedding"
    ):
        add_lora(tiny_model("llama", tie_word_embeddings=True), targets)
    trained = add_lora(tiny_model("llama"), targets)
    assert any(module in name and p.requires_grad for name, p in trained.named_parameters())


def test_tied_parameters_are_counted_once():
    tied, own = (tiny_model("llama", tie_word_embeddings=both) for both in (True, False))
    assert parameter_count(own) - parameter_count(tied) == VOCABULARY * 32


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")
def test_variants_by_lora_share_one_base_in_memory(tmp_path):
    """Frozen weights in the data type that they are stored in stay the mapped file's pages, which all processes share."""
    tiny_model("llama", hidden_size=256, intermediate_size=1024).save_pretrained(tmp_path / "base")
    model = load_pretrained(Pretrained(path=str(tmp_path / "base")), weights_dtype=torch.float32)
    size = (tmp_path / "base/model.safetensors").stat().st_size
    adapted = add_lora(model, Lora(rank=2))
    ids_1T = torch.arange(8)[None]
    adapted(input_ids=ids_1T, labels=ids_1T).loss.backward()
    torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=0.1).step()
    mapped, kept = False, {"Rss": 0, "Anonymous": 0}
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-", line):
            mapped = line.endswith(str(tmp_path / "base/model.safetensors"))
        elif mapped and (name := line.partition(":")[0]) in kept:
            kept[name] += int(line.split()[1]) * 1024
    assert kept["Rss"] > 0.9 * size
    assert kept["Anonymous"] < 0.1 * size
