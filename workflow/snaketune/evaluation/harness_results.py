"""`lm_eval.json`: results in lm-evaluation-harness' own format, for tools that read it.

Values that vary between runs (times, memory addresses) or machines (paths, hardware) are removed, so that equal scores give
equal files. Seeds and versions are included.
"""

import json
import re
from pathlib import Path
from typing import Any

# Included keys of `simple_evaluate`'s results; excluded are date, git_hash, the environment's description, and paths.
RESULT_KEYS = (
    "results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples",
    "transformers_version", "lm_eval_version", "tokenizer_pad_token", "tokenizer_eos_token", "tokenizer_bos_token",
    "eot_token_id", "max_length",
)  # fmt: skip
# Included keys of its `config`; the others name the model's folder, or a device.
SETTINGS = (
    "batch_size", "limit", "bootstrap_iters", "gen_kwargs", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed",
    "model_num_parameters",
)  # fmt: skip
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def harness_results(results: dict[str, Any], folders: list[Path], **extra: Any) -> dict[str, Any]:
    """Return the contents of `lm_eval.json`.

    Args:
        results: from `simple_evaluate`.
        folders: paths below these folders become relative; other paths are reduced to the file name.
        extra: further entries that lm-evaluation-harness writes beside its results.
    """
    document = {key: results[key] for key in RESULT_KEYS if key in results}
    document["config"] = {"model": "hf"} | {key: results["config"].get(key) for key in SETTINGS}
    # NaN and infinities aren't valid JSON.
    plain = json.loads(json.dumps(document | extra, default=str), parse_constant=lambda name: None)
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
