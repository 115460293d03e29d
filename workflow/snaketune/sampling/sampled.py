"""What is sampled: a model with its tokenizer and decoding parameters, and how its responses are cached."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.generation import Decoding
from snaketune.config.operation import Execution
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.machine import is_out_of_memory
from snaketune.errors import SnaketuneError, first_line
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.load_model import read_config, set_special_tokens
from snaketune.sampling.responses import Engine, ResponseCache
from snaketune.stages.cache.fingerprint import cached_entries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.reference.cache_key import identity

# Settings of an adapter that vLLM reads or that don't matter to it, by their names in PEFT.
PLAIN = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights", "task_type", "inference_mode",
    "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "eva_config", "corda_config", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that vLLM can load: a folder or a model of the Hub, and an adapter on it, as PEFT saves one."""

    base: Pretrained
    adapter: Path | None = None
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A model whose responses a job wants.

    Attributes:
        results: the model's result and its base layers; empty for a base model.
        base: the model itself, or the base layers of its adapters, if that is no result of this workflow.
        frozen: as in `RefLogpsSpec.frozen_weights`; it also decides how a merged copy is rounded.
        base_files: of a local base model.
    """

    results: tuple[Artifact, ...]
    base: Pretrained | Scratch | None
    trust_remote_code: bool
    tokenizer: Artifact
    decoding: Decoding
    frozen: bool
    base_files: Sequence[Path]
    operation: Execution
    work: WorkFolder

    @cached_property
    def stack(self) -> AdapterStack:
        return AdapterStack(
            results=self.results,
            base=self.base,
            tokenizer=self.tokenizer.folder,
            trust_remote_code=self.trust_remote_code,
        )

    @cached_property
    def chat(self) -> ChatTokenizer:
        self.tokenizer.files()
        return ChatTokenizer.load(self.tokenizer.folder)

    @cached_property
    def compute(self) -> Compute:
        return resolve_compute("auto")

    def cache(self, engine: Engine) -> ResponseCache:
        """The cache of its responses by an engine. Stages and evaluations find the same ones."""
        base = self.base
        key = {
            "weights": [artifact.content for artifact in self.results],
            # A local base counts by its files.
            "base": identity(base, named=not self.base_files)
            if isinstance(base, Pretrained)
            else base and base.model_dump(mode="json"),
            "base_files": [entry for _, entry in cached_entries("base", self.base_files, self.work.root)],
            "tokenizer": self.tokenizer.content,
            "decoding": self.decoding.model_dump(mode="json"),
        }
        return ResponseCache(self.work, engine, key)

    def load(self) -> PreTrainedModel:
        """The model in this process, in main memory; its files are verified."""
        self._verify()
        loaded = self.stack.load(self.compute.weights_dtype(frozen=self.frozen))
        set_special_tokens(loaded, self.chat)
        return loaded

    def on_device(self) -> PreTrainedModel:
        """`load`, on the device of `compute`; SnaketuneError if its memory runs out."""
        try:
            return self.load().to(self.compute.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise SnaketuneError(
                f"memory ran out while the model was loaded ({first_line(error)}); use a device with more memory, or for "
                "responses engine: vllm with several gpus"
            ) from None

    def served(self) -> ServedModel:
        """The model for vLLM: the result's own folder; the base with the adapter of the result, unmerged; or a copy in the work
        folder, where vLLM can't load either."""
        self._verify()
        top, below = self.results[:1], self.stack.weights
        if top and not is_adapter_only(top[0]):
            return ServedModel(base=Pretrained(path=str(top[0].folder), trust_remote_code=self.trust_remote_code))
        # With an embedding for each token, and its own positions.
        plain = below is not None and below.rope is None
        plain = plain and read_config(below).get_text_config().vocab_size >= self.chat.vocab_size
        if plain and not top:
            return ServedModel(base=below)
        one_adapter = len([result for result in self.results if is_adapter_only(result)]) == 1
        if plain and one_adapter and (rank := adapter_rank(top[0].folder / ADAPTER)):
            return ServedModel(base=below, adapter=top[0].folder / ADAPTER, rank=rank)
        folder = self.work.state / "served-model"
        print(f"vLLM is given a copy of the model with its adapters merged, in {folder}", flush=True)
        self.load().save_pretrained(folder)
        return ServedModel(base=Pretrained(path=str(folder), trust_remote_code=self.trust_remote_code))

    def _verify(self) -> None:
        for result in self.results:
            result.files()


def adapter_rank(adapter: Path) -> int | None:
    """The rank of a saved adapter that vLLM serves as it is; None for one with anything but PLAIN settings: whole layers, DoRA,
    other ranks in some layers, or an initialization that changed the base."""
    from peft import LoraConfig

    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    usual = {key: value for key, value in LoraConfig().to_dict().items() if key not in PLAIN}
    other = [key for key, value in usual.items() if (config.get(key) or None) != (value or None)]
    initialized = config.get("init_lora_weights", True) in (True, False, "gaussian")
    return int(config["r"]) if not other and initialized else None
