"""What is checked before each training and depends on the kind of model, kept for the hundreds of small trainings here."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from snaketune.engine.model import selftest
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.selftest import SelfTest
from snaketune.engine.packing.rows import PackedRows
from snaketune.models import traced_model
from snaketune.models.traced_model import TracedModel

check_kernel_again = selftest.check_kernel
TRACED: dict[tuple[Any, ...], TracedModel | None] = {}
PASSED: dict[tuple[Any, ...], SelfTest] = {}
# Entries of a config that say where it came from.
ORIGIN = {"architectures", "dtype", "transformers_version"}


def kind_of(config: PretrainedConfig) -> tuple[type[PretrainedConfig], str]:
    return type(config), repr([item for item in sorted(config.to_dict().items()) if item[0] not in ORIGIN])


def trace_model(config: PretrainedConfig, compute: Compute, *, batch: Any, **settings: Any) -> TracedModel | None:
    """Do what `traced_model.trace_model` does, but for activations, once per config and settings."""
    key = (*kind_of(config), compute, *(repr(value) for value in settings.values()))
    if key not in TRACED:
        TRACED[key] = traced_model.trace_model(config, compute, **settings)
    return TRACED[key]


def check_kernel(model: PreTrainedModel, packs: Sequence[PackedRows], compute: Compute, *, training: bool) -> SelfTest:
    """Do what `selftest.check_kernel` does; a test that passed isn't repeated on other weights and rows."""
    prefixes = not packs or any(rows.has_prefixes for rows in packs)
    key = (type(model), *kind_of(model.config), compute, training, prefixes)
    if key in PASSED:
        return selftest._allow(model, compute, prefixes, PASSED[key].share)
    tested = check_kernel_again(model, packs, compute, training=training)
    # Mixers are set up by the test itself.
    if not tested.mixers:
        PASSED[key] = tested
    return tested
