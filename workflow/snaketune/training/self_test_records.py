"""Records of passed self-tests, so that a training on the same weights, rows, code and versions needn't repeat them (another
variant of a sweep, or a resumed run), and an evaluation of other weights on the same rows repeats a part only."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.machine import processor
from snaketune.engine.model.self_test_record import SelfTestRecord
from snaketune.stages.cache.attempt import Attempt, read_attempt
from snaketune.stages.cache.clean import SELF_TESTS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TrainingSpec


def record_of_test(spec: TrainingSpec, work: WorkFolder, compute: Compute) -> SelfTestRecord | None:
    """Return the record of a run's self-test, whether or not it has passed; None if its weights or rows can't be identified."""
    attempt, base = read_attempt(work.state), spec.base
    # A model of the Hub without a revision may change.
    unknown = isinstance(base, Pretrained) and not base.revision and not Path(base.path).is_dir()
    if attempt is None or unknown:
        return None
    key = {
        "inputs": {role: digests for role, digests in attempt.inputs.items() if role != "ref_logps"},
        "base": base and base.model_dump(mode="json"),
        "quantization": spec.quantization and spec.quantization.model_dump(mode="json"),
        "adapters": [spec.lora is not None, getattr(spec, "continued", False)],
        # Of a model from scratch.
        "seed": spec.training.seed,
    }
    return _record(key, attempt, work, compute)


def record_of_evaluation(
    config: PretrainedConfig, packs: Sequence[Artifact], work: WorkFolder, compute: Compute
) -> SelfTestRecord | None:
    """Return the record of the self-test of models with this config on the held-out rows of these packs."""
    attempt = read_attempt(work.state)
    values = json.loads(config.to_json_string(use_diff=False))
    # Without the path that a model was loaded from.
    values = {name: value for name, value in values.items() if not name.startswith("_")}
    key = {"config": values, "packs": [pack.content for pack in packs]}
    return attempt and _record(key, attempt, work, compute)


def _record(key: dict[str, Any], attempt: Attempt, work: WorkFolder, compute: Compute) -> SelfTestRecord:
    on_gpu = compute.device.type == "cuda"
    key |= {
        "code": attempt.code,
        "versions": attempt.versions,
        "compute": compute.about(),
        "device": torch.cuda.get_device_name(compute.device) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
    }
    return SelfTestRecord(work.root / SELF_TESTS / digest_json(key))
