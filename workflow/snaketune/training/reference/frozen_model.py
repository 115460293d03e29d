"""Models that compute on packed rows and aren't trained, and whether their tokens are those of the rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.model_files import model_files
from snaketune.engine.model.devices import Compute, use_threads
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.selftest import SelfTest, self_test
from snaketune.engine.packing.rows import PackedRows
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, is_adapter_only
from snaketune.models.load_model import DeviceMap, own_tokenizer
from snaketune.stages.cache.fingerprint import cached_entries
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import FrozenSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.reference.cache_key import computation


@dataclass(frozen=True)
class FrozenModel:
    """A model that computes on packed rows and isn't trained: a reference or a teacher.

    Attributes:
        results: the model's result and its base layers, from the top down; empty for an external model, `spec.base`.
        tokenizer: tokenizer of the rows; only for an external model.
    """

    spec: FrozenSpec
    results: tuple[Artifact, ...]
    tokenizer: Sequence[Artifact] = ()

    def stack(self, *, merged: bool = False) -> AdapterStack:
        """The adapter stack without an adapter that stays unmerged. Args: merged: with it, merged as its run saved it."""
        spec, results = self.spec, self.results
        layers, base = results[1:] if spec.apart and not merged else results, spec.base
        if merged and not is_adapter_only(results[0]):
            # The result holds complete weights, so it needs no base layers.
            layers, base = results[:1], None
        folder = (*self.tokenizer, *results)[0].folder
        return AdapterStack(results=layers, base=base, tokenizer=folder, trust_remote_code=spec.trust_remote_code)

    def load(
        self, compute: Compute, packs: list[PackedRows], *, merged: bool = False
    ) -> tuple[torch.nn.Module, SelfTest]:
        """Load the model and run its self-test. Args: merged: as evaluations load it, not as the policies' trainings do."""
        stack, spec = self.stack(merged=merged), self.spec
        longest = max(rows.longest[0] for rows in packs)
        prefixes = any(rows.has_prefixes for rows in packs)
        compute = choose_kernel(compute, stack.config(), longest, prefixes=prefixes, dropout=False)
        device_map = device_map_of(compute)
        if device_map and self.results and is_adapter_only(self.results[0]):
            raise SnaketuneError(
                f"{self.results[0].manifest_path} is an adapter alone, which isn't divided among GPUs; set lora.merge: "
                "true for its run, or operation.gpus: 1 here"
            )
        loaded = stack.load(compute.weights_dtype(frozen=spec.frozen_weights), spec.quantization, device_map)
        if not (spec.quantization or device_map):
            loaded = loaded.to(compute.device)
        use_threads(loaded.config, compute)
        tested = self_test(loaded, packs, compute, training=False)
        if spec.apart and not merged:
            from snaketune.engine.model.adapters import load_adapter

            loaded = load_adapter(loaded, self.results[0].folder / ADAPTER)
        return loaded, tested

    def key_of_units(self, tested: SelfTest, work: WorkFolder, **entries: Any) -> dict[str, Any]:
        """What affects the values of a unit besides its tokens. Args: entries: of the values themselves."""
        spec, device = self.spec, tested.compute.device
        files = map(Path, model_files(spec.base.path if isinstance(spec.base, Pretrained) else None))
        machine = [torch.cuda.get_device_name(device)] if device.type == "cuda" else [torch.get_num_threads()]
        return computation(spec, tested.compute.about()["dtype"]) | {
            "computation": tested.about(),
            "device": [device.type, *machine],
            "weights": [result.content for result in self.results],
            "files": [entry for _, entry in cached_entries("base", files, work.root)],
            "versions": [installed_version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")],
            **entries,
        }


def device_map_of(compute: Compute) -> DeviceMap | None:
    """How a model is divided among the GPUs of the job; None if there is one, or none."""
    return "auto" if compute.device.type == "cuda" and torch.cuda.device_count() > 1 else None


def check_same_tokens(key: str, model: Pretrained, chat: ChatTokenizer, used: set[int], by_whom: str) -> None:
    """Check that token ids stand for the same text in a model's own tokenizer.

    Args:
        key, by_whom: the key of the model in the config, and the run that needs the same tokens, for messages.
        chat: tokenizer of the rows.
    Raises:
        SnaketuneError: some tokens differ, or the model has no tokenizer.json.
    """
    tokenizer = own_tokenizer(model)
    if tokenizer is None:
        raise SnaketuneError(
            f"{key}: {model.path!r} has no tokenizer.json, so its vocabulary can't be compared with that of the rows; add the "
            "file, or choose a model that has one"
        )
    if chat.pad_id not in chat.stop_ids:
        # It is only padding: no document contains it.
        used = used - {chat.pad_id}
    if other := sorted(id for id in used if tokenizer.id_to_token(id) != chat.id_to_token(id)):
        first = other[0]
        raise SnaketuneError(
            f"{key}: {len(other)} of {len(used)} tokens are different in {model.path!r}, for instance {first}, which is "
            f"{chat.id_to_token(first)!r} here and {tokenizer.id_to_token(first)!r} there; it needs the same vocabulary as "
            f"{by_whom}"
        )


def tokens_in(packs: Iterable[PackedRows]) -> set[int]:
    """The token ids that occur in packed rows."""
    return set().union(*(np.unique(batch["input_ids"]).tolist() for rows in packs for batch in rows.batches))
