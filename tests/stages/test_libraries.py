"""A stage names the libraries that shape its result with the spec that it has, and no others."""

import gc

import pytest

from snaketune.config.base_models import Scratch
from snaketune.config.corpus_sources import CorpusContent
from snaketune.config.lora import Lora, Quantization
from snaketune.config.training_runs import Training
from snaketune.stages.cache.libraries import importing, of_corpus, of_evaluation, of_reference, of_training
from snaketune.stages.specs import EvalSpec, RefLogpsSpec, SftSpec

CORPUS = {"kind": "conversations", "sources": [{"files": ["a.jsonl"]}]}


def test_garbage_is_searched_for_again_after_imports_that_fail_too():
    with pytest.raises(ModuleNotFoundError), importing():
        assert not gc.isenabled()
        import no_such_module  # noqa: F401
    assert gc.isenabled()


def test_a_corpus_names_what_it_was_cleaned_with():
    assert of_corpus(CorpusContent(**CORPUS), {}) == ("pyarrow",)
    near = CorpusContent(**CORPUS, near_duplicates={"threshold": 0.8}, cleaning={"fix_mojibake": True})
    assert set(of_corpus(near, {})) == {"pyarrow", "rensa", "ftfy"}


class Pack:
    def __init__(self, version: str):
        self.manifest = {"format_version": version}


def test_a_training_names_what_trained_it():
    shape = Scratch(hidden_size=8, intermediate_size=8, layers=1, heads=1)
    full = SftSpec(base=shape, training=Training(learning_rate=1.0), lora=None, quantization=None)
    assert set(of_training(full, {"pack": [Pack("3.0")]})) == {"torch", "transformers", "accelerate"}
    adapters = full.model_copy(update={"lora": Lora()})
    assert "peft" in of_training(adapters, {"pack": [Pack("3.0")]})
    assert {"trl", "datasets"} <= set(of_training(full, {"pack": [Pack("2.0")]}))
    # Not all that bitsandbytes has are in 8 bits.
    for optimizer, named in (("paged_adamw_32bit", True), ("lion_8bit", True), ("adafactor", False)):
        training = full.training.model_copy(update={"optimizer": optimizer})
        libraries = of_training(full.model_copy(update={"training": training}), {"pack": [Pack("3.0")]})
        assert ("bitsandbytes" in libraries) == named


class Model:
    def __init__(self, **manifest: str):
        self.manifest = manifest


def test_results_with_adapters_add_peft_to_the_libraries():
    reference = RefLogpsSpec(precision="auto", frozen_weights=True, quantization=None, trust_remote_code=False)
    in_4_bits = reference.model_copy(update={"quantization": Quantization()})
    requested = EvalSpec.model_construct(tasks=None)
    full = SftSpec(base=None, training=Training(learning_rate=1.0), lora=None, quantization=None)
    for model, named in ((Model(), set()), (Model(base_dtype="float32"), {"peft"})):
        inputs = {"model": [model], "pack": [Pack("3.0")]}
        assert set(of_reference(reference, inputs)) == {"torch", "transformers"} | named
        assert set(of_reference(in_4_bits, inputs)) == {"torch", "transformers", "bitsandbytes"} | named
        assert set(of_evaluation(requested, inputs)) == {"torch", "transformers"} | named
        assert set(of_training(full, inputs)) == {"torch", "transformers", "accelerate"} | named
