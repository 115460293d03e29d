"""The vocabulary of an external reference is compared with the tokens of the pairs, including control tokens."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from snaketune.config.base_models import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.reference.frozen_model import check_same_tokens, tokens_in
from tests.models.conftest import tiny_model
from tests.tokenization.small_tokenizers import CHATML, messages, save_tokenizer

WORDS = {"<unk>": 0, "user": 1, "assistant": 2, "cat": 3, "hat": 4}


def tokenizer_with(folder: Path, *control: str) -> Path:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", *control])
    return save_tokenizer(folder, tokenizer, CHATML.read_text(), pad_token="<pad>", eos_token="<|im_end|>")


def test_a_reference_with_exchanged_control_tokens_is_refused(tmp_path):
    chat = ChatTokenizer.load(tokenizer_with(tmp_path / "run", "<|im_start|>", "<|im_end|>"))
    pairs = SimpleNamespace(batches=[{"input_ids": np.array(chat.encode([messages("cat", "hat")])[0].ids)}])
    same, other = tmp_path / "same", tmp_path / "other"
    tokenizer_with(same, "<|im_start|>", "<|im_end|>")
    tokenizer_with(other, "<|im_end|>", "<|im_start|>")
    for folder in (same, other):
        tiny_model("llama").config.save_pretrained(folder)
    check_same_tokens("dpo.reference", Pretrained(path=str(same)), chat, tokens_in([pairs]), "the SFT run")
    with pytest.raises(SnaketuneError, match=r"2 of \d+ tokens are different in .* is '<\|im_start\|>' here"):
        check_same_tokens("dpo.reference", Pretrained(path=str(other)), chat, tokens_in([pairs]), "the SFT run")
