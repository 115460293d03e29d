"""A base is what its folder says, all of it, with the tokens that it knows."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from snaketune.config.runs import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.models.loading import load_base, load_folder

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
    load_folder(folder, weights_dtype=torch.float32)
    rewrite(folder, change)
    with pytest.raises(SnaketuneError, match=lacks):
        load_folder(folder, weights_dtype=torch.float32)


def test_weights_without_a_place_are_named(folder, capsys):
    rewrite(folder, lambda weights: weights | {"vision.weight": torch.ones(2)})
    load_folder(folder, weights_dtype=torch.float32)
    assert "has no place for: vision.weight (1 in all)" in capsys.readouterr().out


class Chat:
    """As much of a tokenizer as loading looks at."""

    pad_id, stop_ids = 0, (1,)

    def __init__(self, vocabulary: dict[str, int]):
        self.ids = vocabulary
        self.vocab_size = len(vocabulary)

    def strangers(self, vocabulary: dict[str, int]) -> list[str]:
        return [token for token, id in vocabulary.items() if self.ids.get(token) != id]


def test_a_tokenizer_of_another_model_is_refused_and_added_tokens_are_not(folder):
    own = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(own, unk_token="t0")).save(str(folder / "tokenizer.json"))
    base = Pretrained(path=str(folder))
    more = Chat(own | {"<new>": VOCABULARY})
    assert load_base(base, more, weights_dtype=torch.float32).get_input_embeddings().weight.shape[0] == VOCABULARY + 1
    swapped = Chat(own | {"t5": 6, "t6": 5})
    with pytest.raises(SnaketuneError, match=r"2 of 97 tokens have another id, for instance 't[56]'"):
        load_base(base, swapped, weights_dtype=torch.float32)
