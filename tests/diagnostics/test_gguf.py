"""The check of a GGUF file: it passes on a file as llama.cpp's converter writes it, and fails on one with another weight."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM

from snaketune.diagnostics import verified_training
from snaketune.diagnostics.checks import sequences
from snaketune.diagnostics.verified_training import FinishedTraining
from tests.models.conftest import CPU

STORED = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a small Llama with fewer heads for keys than for queries."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_gguf(path: Path, folder: Path, kind: str, changed: str = "") -> None:
    """Write a model as llama.cpp's converter does: names and metadata of its own, queries and keys in its order of dimensions,
    norms in float32. Args: changed: a weight that is halved."""
    model = LlamaForCausalLM.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy() * (0.5 if name == changed else 1.0)
        if count := heads.get(".".join(name.split(".")[-2:])):
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        stored = STORED[kind] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = quantize(weight.astype(np.float32), stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_of(model: Path, file: Path, kind: str):
    random = np.random.default_rng(0)
    ids = [random.integers(4, 96, 24) for _ in range(4)]
    finished = SimpleNamespace(
        spec=SimpleNamespace(gguf_type=kind, run=SimpleNamespace(trust_remote_code=False)),
        gguf=[SimpleNamespace(files=lambda: [file])],
        model=SimpleNamespace(folder=model),
        compute=CPU,
        texts=[sequences.Sequence(ids=one, labels=one, own=0) for one in ids],
    )
    finished.plain = partial(FinishedTraining.plain, finished)
    finished.loaded = finished.plain()
    return verified_training.gguf(finished)


@pytest.mark.parametrize("kind", STORED)
def test_a_converted_file_is_the_model_and_one_with_another_weight_is_not(model, tmp_path, kind):
    write_gguf(tmp_path / "right.gguf", model, kind)
    check = check_of(model, tmp_path / "right.gguf", kind)
    assert check.status == "passed" and check.figure > 0, check
    write_gguf(tmp_path / "wrong.gguf", model, kind, changed="model.layers.1.mlp.down_proj.weight")
    assert check_of(model, tmp_path / "wrong.gguf", kind).status == "failed"


def test_a_file_that_is_none_is_not_checked_with_the_reason(model, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"another kind of file, of some length")
    result = verified_training.attempted("a", "b", lambda: check_of(model, tmp_path / "broken.gguf", "f16"))
    assert result.status == "not checked" and "transformers can't read broken.gguf" in result.reason
