"""`lm_eval.json`: what lm-evaluation-harness itself would have written, for tools that read it.

Without what differs from run to run (times, addresses in memory) and from machine to machine (paths, hardware), so that the
same scores are the same bytes. Seeds and versions stay.
"""

import json
import re
from pathlib import Path
from typing import Any

# What `simple_evaluate` gives besides: date, git_hash, the environment's description, paths.
RESULT_KEYS = (
    "results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples",
    "transformers_version", "lm_eval_version", "tokenizer_pad_token", "tokenizer_eos_token", "tokenizer_bos_token",
    "eot_token_id", "max_length",
)  # fmt: skip
# Of its `config`; the others name a model by its folder, or a device.
SETTINGS = (
    "batch_size", "limit", "bootstrap_iters", "gen_kwargs", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed",
    "model_num_parameters",
)  # fmt: skip
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def harness_results(found: dict[str, Any], folders: list[Path], **asked: Any) -> dict[str, Any]:
    """As JSON.

    Args:
        found: from `simple_evaluate`.
        folders: whose files are named relative to them; of others, only the name is kept.
        asked: further entries, as lm-evaluation-harness writes them beside its results.
    """
    kept = {key: found[key] for key in RESULT_KEYS if key in found}
    kept["config"] = {"model": "hf"} | {key: found["config"].get(key) for key in SETTINGS}
    # Numbers that aren't would be no JSON.
    plain = json.loads(json.dumps(kept | asked, default=str), parse_constant=lambda name: None)
    return _without(plain, [f"{folder}/" for folder in folders])


def _without(value: Any, folders: list[str]) -> Any:
    if isinstance(value, dict):
        return {_without(key, folders): _without(inner, folders) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without(inner, folders) for inner in value]
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(folder, "")
        return Path(value).name if _is_path(value) else ADDRESS.sub("", value)
    return value


def _is_path(value: str) -> bool:
    return value.startswith("/") and len(value) < 1000 and "\n" not in value and Path(value).exists()
