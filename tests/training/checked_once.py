"""What is checked before each training and depends on model and rows alone, kept for the hundreds of small trainings here."""

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.engine.model import selftest
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.selftest import SelfTest
from snaketune.engine.packing.rows import PackedRows
from snaketune.models import memory
from snaketune.models.memory import TracedModel

first_passing = selftest._first_passing
TRACED: dict[tuple[Any, ...], TracedModel | None] = {}
PASSED: dict[str, SelfTest] = {}


def trace_model(config: PretrainedConfig, compute: Compute, **settings: Any) -> TracedModel | None:
    """Do what `memory.trace_model` does, once per config and settings."""
    key = (type(config), config.to_json_string(), compute, *(repr(value) for value in settings.values()))
    if key not in TRACED:
        TRACED[key] = memory.trace_model(config, compute, **settings)
    return TRACED[key]


def self_test(
    model: PreTrainedModel, packs: Sequence[PackedRows], compute: Compute, training: bool, synthetic_only: bool
) -> SelfTest:
    """Test a model as `selftest` does; a test that passed isn't repeated on the same weights and rows."""
    digest = xxhash.xxh3_128(repr((type(model), model.config.to_json_string(), compute, training)).encode())
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    for rows in packs:
        for row in range(len(rows)):
            digest.update(repr([(name, column.tolist()) for name, column in rows[row].items()]).encode())
    key = digest.hexdigest()
    if key in PASSED:
        prefixes = not packs or any(rows.has_prefixes for rows in packs)
        return selftest._allow(model, compute, prefixes, PASSED[key].share)
    tested = first_passing(model, packs, compute, training, synthetic_only)
    # Mixers are set up by the test itself.
    if tested.compute == compute and not tested.mixers and not synthetic_only:
        PASSED[key] = tested
    return tested
