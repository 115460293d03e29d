"""Positions scaled by `base.rope`: right in packed rows beyond the original length, saved with the model, or refused."""

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.families.tiny import tiny_config
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from snaketune.config.base_models import Pretrained, RopeScaling
from snaketune.diagnostics.run_checks import check_positions
from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.selftest import self_test
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import load_base, read_config
from snaketune.models.rope_scaling import check_scaled, scaled_config

from .conftest import CPU, VOCABULARY, tiny_model

ORIGINAL = 32
DEFAULT = {"rope_theta": 10000.0}
# As a user of transformers alone would set them.
PARAMETERS = {
    "linear": DEFAULT | {"rope_type": "linear", "factor": 4.0},
    "yarn": DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": DEFAULT | {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
# Longer documents than the original length, and one within it.
LENGTHS = (70, 11, 45)


class Rows(list):
    longest, fullest, has_prefixes = (max(LENGTHS), 0), 0, False


def row() -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(4, VOCABULARY, sum(LENGTHS)).astype(np.int32)
    labels = ids.copy()
    labels[np.cumsum([0, *LENGTHS[:-1]])] = -100
    columns = {"segment_lengths": LENGTHS, "prefix_lengths": [0] * len(LENGTHS)}
    return {"input_ids": ids, "labels": labels} | {name: np.array(value, np.int32) for name, value in columns.items()}


def base_of(folder, rope: RopeScaling | None, **settings) -> Pretrained:
    tiny_model("llama", **({"max_position_embeddings": ORIGINAL} | settings)).save_pretrained(folder / "base")
    return Pretrained(path=str(folder / "base"), rope=rope)


class Chat:
    """The part of a tokenizer that loading needs, for a base without one."""

    vocab_size, pad_id, stop_ids = VOCABULARY, 0, (1,)


def load(base: Pretrained) -> torch.nn.Module:
    return load_base(base, Chat(), weights_dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", PARAMETERS)
def test_packed_losses_equal_those_of_transformers_own_model_and_the_saved_one(tmp_path, kind):
    base = base_of(tmp_path, RopeScaling(type=kind, factor=4))
    model = load(base)
    model.save_pretrained(tmp_path / "saved")
    own = AutoModelForCausalLM.from_pretrained(
        base.path, rope_parameters=copy.deepcopy(PARAMETERS[kind]), max_position_embeddings=4 * ORIGINAL
    ).eval()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    plain = AutoModelForCausalLM.from_pretrained(base.path).eval()
    for one in (model, saved):
        assert one.config.rope_parameters == PARAMETERS[kind]
        assert one.config.max_position_embeddings == 4 * ORIGINAL
    self_test(model, [Rows([row()])], CPU, training=True)
    with torch.no_grad():
        losses_N = token_losses(model, collate([row()], "sdpa"))
        for reference, close in ((own, True), (saved, True), (plain, False)):
            alone = []
            for ids in np.split(row()["input_ids"].astype(np.int64), np.cumsum(LENGTHS)[:-1]):
                ids_L = torch.from_numpy(ids)
                alone.append(F.cross_entropy(reference(ids_L[None]).logits[0, :-1], ids_L[1:], reduction="none"))
            assert bool((losses_N - torch.cat(alone)).abs().max() < 1e-5) == close


def test_a_model_without_the_key_is_loaded_as_it_is(tmp_path):
    base = base_of(tmp_path, None)
    assert load(base).config.rope_parameters == DEFAULT | {"rope_type": "default"}
    scaled = Pretrained(path="a/b", rope={"type": "yarn", "factor": 2})
    assert Pretrained(**scaled.model_dump(mode="json")) == scaled


def test_the_original_length_is_the_config_s_own(tmp_path):
    """As in Llama 3.1, whose positions are scaled already; or it is given, where a config names another length."""
    llama3 = PARAMETERS["llama3"] | {"low_freq_factor": 2.0}
    base = base_of(tmp_path, RopeScaling(type="llama3", factor=8), rope_parameters=llama3, max_position_embeddings=128)
    config = read_config(base)
    assert (config.max_position_embeddings, config.rope_parameters) == (256, llama3 | {"factor": 8.0})
    given = RopeScaling(type="yarn", factor=8, original_max_position_embeddings=20)
    config = read_config(base.model_copy(update={"rope": given}))
    wanted = DEFAULT | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 20}
    assert (config.max_position_embeddings, config.rope_parameters) == (160, wanted)


def linear(**settings) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=4096, rope_parameters=PARAMETERS["linear"], **settings)


@pytest.mark.parametrize(
    ("config", "kind", "found", "do"),
    [
        (tiny_config("gpt2"), "yarn", "gpt2 has no rotary position embeddings", "remove the key"),
        (tiny_config("falcon", alibi=True), "yarn", "falcon has no rotary position embeddings", "remove the key"),
        (tiny_config("gemma3_text"), "linear", "for full_attention and sliding_attention layers", "own config.json"),
        (tiny_config("phi3"), "yarn", "phi3 can't be scaled by yarn", "another type"),
        (linear(), "yarn", r"already \(linear, factor 4.0\)", "set original_max_position_embeddings"),
        (LlamaConfig(rope_parameters=PARAMETERS["yarn"], max_position_embeddings=4096), "yarn",
         "makes 128 positions of the original 32, but the model has 4096 already", "a factor above 128"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_scaled_are_refused(config, kind, found, do):
    with pytest.raises(SnaketuneError, match=r"base.rope .* of the model 'some/model': ") as caught:
        scaled_config(config, RopeScaling(type=kind, factor=4), "some/model")
    assert re.search(found, str(caught.value))
    assert do in str(caught.value).rpartition(";")[2]


def test_a_model_that_ignores_the_config_is_refused():
    config = scaled_config(tiny_config("granitemoehybrid"), RopeScaling(type="yarn", factor=4), "some/model")
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        SnaketuneError, match="granitemoehybrid computes no rotary embeddings of type yarn; remove the key"
    ):
        check_scaled(model, RopeScaling(type="yarn", factor=4), "some/model")


@pytest.mark.parametrize("rope", [{"type": "dynamic", "factor": 2}, {"type": "yarn", "factor": 1}, {"type": "yarn"}])
def test_scaling_that_depends_on_the_batch_or_scales_nothing_is_refused(rope):
    with pytest.raises(ValidationError, match=r"depend on the longest sequence of a batch|greater than 1|required"):
        Pretrained(path="a/b", rope=rope)


def test_sequences_are_compared_with_the_scaled_length():
    config = AutoConfig.for_model("llama", max_position_embeddings=ORIGINAL)
    scaled = scaled_config(config, RopeScaling(type="yarn", factor=4), "some/model")
    [note] = check_positions("sft.run", 100, config, False)
    assert not note.certain
    assert "base.rope: {type: yarn, factor: 4}" in note.do
    assert not [*check_positions("sft.run", 128, scaled, True)]
    [finding] = check_positions("sft.run", 129, scaled, True)
    assert finding.certain
    assert "sft.run.packing.length: the longest sequence has 129 tokens, but the model was made for 128" in str(finding)
