"""A smoke run: the whole config on a few rows, a few steps and short answers, with small models of the same families.

`snakemake smoke` writes a config below results/smoke and runs Snakemake there, so that its results lie apart. It is meant for a
CPU and takes minutes for a config of any size. PROVES says what a run that ends well shows, and what it doesn't.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from snaketune.config.base import is_local_path
from snaketune.config.base_models import Pretrained
from snaketune.config.load import written_out
from snaketune.config.overrides import apply_overrides
from snaketune.config.source_lists import listed_sources
from snaketune.config.task_files import TaskFiles, task_files
from snaketune.errors import SnaketuneError, first_line
from snaketune.files import write_json
from snaketune.locations import is_remote

ROWS, HELD_OUT, ANSWERS, NEW_TOKENS, MAX_LENGTH = 20, 0.3, 2, 8, 2048
VOCABULARY = 400
# A new model from scratch, in place of the config's sizes.
SCRATCH = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "key_value_heads": 2}
# On a CPU, by one process.
OPERATION = {"gpus": 0, "nodes": 1, "allow_cpu": True, "log_steps": 1}
NOT_ON_CPU = ("launch", "zero_stage", "activation_offloading")
# A small random model doesn't end its responses, so none can be selected: other rows stand for them.
STAND_INS = "selected-{kind}.jsonl"
LAYOUTS = {"conversations": "messages", "preferences": "pairs", "unpaired": "unpaired"}
SCORER, SCORE = "score.py", "def score(prompt, response, row):\n    return len(response)\n"
# They upload, convert, time or publish, which a smoke run doesn't.
LEFT_OUT = ("push", "gguf", "doctor", "verify", "tracking", "reruns_on")
PROVES = (
    "Shown: the config is complete; every stage runs with its data, templates, losses and evaluations, on at most {rows} rows "
    "of each source, for a few steps.",
    "Not shown: that the real models fit into memory, how long the run takes (snakemake -n), what is in the other rows "
    "(snakemake preview), several GPUs, 4-bit weights on a GPU, and any quality: the models are small and random.",
)


def write_smoke_run(config: str, folder: Path) -> None:
    """Write the config of the smoke run, and the models that it starts from. Args: config: the whole config, as JSON."""
    models: dict[str, str] = {}

    def small_base(base: dict[str, Any]) -> dict[str, Any]:
        """The base that stands for a run's."""
        if "path" not in base:
            return base | SCRATCH
        name = f"model-{len(models)}"
        if base["path"] not in models:
            models[base["path"]] = name
            _write_model(Pretrained.model_validate(base), folder / name)
        return {"path": models[base["path"]]}

    smoke = smoke_config(apply_overrides(json.loads(config)), small_base)
    folder.mkdir(parents=True, exist_ok=True)
    for evaluation in smoke.get("eval", {}).values():
        _link_task_files(evaluation.get("tasks", {}).get("folder"), folder)
    (folder / SCORER).write_text(SCORE, encoding="utf-8")
    for kind in LAYOUTS:
        lines = [json.dumps(_stand_in(kind, number)) + "\n" for number in range(ROWS)]
        (folder / STAND_INS.format(kind=kind)).write_text("".join(lines), encoding="utf-8")
    write_json(folder / "config.json", smoke)


def smoke_config(config: dict[str, Any], small_base: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The config of the smoke run: the same entries, with less of everything."""
    smoke = {key: value for key, value in deepcopy(config).items() if key not in LEFT_OUT}
    if any("rounds" in run for section in ("sft", "dpo") for run in smoke.get(section, {}).values()):
        smoke = _with_rounds_written_out(smoke)
    for corpus in smoke.get("corpora", {}).values():
        if 0 < corpus.get("held_out", HELD_OUT) < 1:
            corpus["held_out"] = HELD_OUT
        corpus["parts"] = 1
        corpus["sources"] = listed_sources(corpus["sources"])
        for source in corpus["sources"]:
            source["max_rows"] = min(source.get("max_rows", ROWS), ROWS)
            if "scores" in source:
                source.clear()
                source |= {"files": [STAND_INS.format(kind=corpus["kind"])], "layout": LAYOUTS[corpus["kind"]]}
            if "files" in source:
                source["files"] = [_absolute(file) for file in source["files"]]
    for tokenizer in smoke.get("tokenizers", {}).values():
        if "train" in tokenizer:
            tokenizer["train"]["vocab_size"] = min(tokenizer["train"].get("vocab_size", VOCABULARY), VOCABULARY)
        for key in ("adopt", "chat_template"):
            if key in tokenizer:
                tokenizer[key] = _absolute(tokenizer[key])
    for section in ("sft", "dpo", "reward"):
        for run in smoke.get(section, {}).values():
            _shorten_training(run, small_base)
    for evaluation in smoke.get("eval", {}).values():
        _shorten_evaluation(evaluation)
    for sample in smoke.get("sample", {}).values():
        _shorten_generation(sample)
        sample["prompts"]["limit"] = ANSWERS
        sample["responses"] = min(sample.get("responses", 1), ANSWERS)
        sample["operation"] = {"engine": "transformers", "gpus": 0}
    for score in smoke.get("score", {}).values():
        # The rows that are left may have no answer; and a smoke run asks no judge, and loads no large model.
        if score["by"].keys() & {"answer", "judge", "reward"}:
            score["by"] = {"python": SCORER}
        elif "python" in score["by"]:
            score["by"]["python"] = _absolute(score["by"]["python"])
    smoke["report"] = smoke.get("report", {}) | {"title": "Smoke run", "compare": []}
    return smoke


def _with_rounds_written_out(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the entries that rounds stand for, which are shortened like any others."""
    config, variants = written_out(raw)
    written = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for name, evaluation in config.eval.items():
        written["eval"][name]["models"] = [*evaluation.every_model(variants)]
    return written


def _shorten_training(run: dict[str, Any], small_base: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    # The rows that stand for scored responses have no ratings.
    run.pop("margin", None)
    for key in ("base", "reference"):
        # A reference may be another run.
        if isinstance(run.get(key), dict):
            run[key] = small_base(run[key])
    _shorten_rows(run)
    if "training" in run:
        # Names of layers differ in a small model, and few optimizers of bitsandbytes have a version for CPUs.
        training = {key: value for key, value in run["training"].items() if key != "trainable"}
        if "bit" in (optimizer := training.get("optimizer", "")) or "paged" in optimizer:
            training["optimizer"] = "adamw_torch_fused"
        run["training"] = training | {"epochs": 1, "batch_rows": 2, "micro_batch_rows": 1, "compile": False}
    kept = {key: value for key, value in run.get("operation", {}).items() if key not in NOT_ON_CPU}
    run["operation"] = kept | OPERATION
    if "grid" in run:
        run["grid"] = {key: values[:2] for key, values in run["grid"].items()}


def _shorten_evaluation(evaluation: dict[str, Any]) -> None:
    _shorten_rows(evaluation)
    evaluation["samples"] = ANSWERS
    _shorten_generation(evaluation)
    evaluation.pop("operation", None)
    # It asks no judge.
    evaluation.pop("judge", None)
    for key in ("exact_match", "tasks"):
        if key in evaluation:
            evaluation[key]["limit"] = ANSWERS


def _stand_in(kind: str, number: int) -> dict[str, Any]:
    """A row in the place of scored responses."""
    prompt = [{"role": "user", "content": f"Question {number}?"}]
    good, bad = ([{"role": "assistant", "content": f"{what} {number}."}] for what in ("Answer", "Something"))
    match kind:
        case "conversations":
            return {"messages": prompt + good}
        case "preferences":
            return {"prompt": prompt, "chosen": good, "rejected": bad}
    return {"prompt": prompt, "completion": good if number % 2 else bad, "label": bool(number % 2)}


def _shorten_generation(entry: dict[str, Any]) -> None:
    generation = entry.setdefault("generation", {})
    generation["max_new_tokens"] = min(generation.get("max_new_tokens", NEW_TOKENS), NEW_TOKENS)


def _shorten_rows(run: dict[str, Any]) -> None:
    length = run.get("packing", {}).get("length")
    if isinstance(length, int):
        run["packing"]["length"] = min(length, MAX_LENGTH)


def _link_task_files(tasks: str | None, folder: Path) -> None:
    """Link the files of local tasks into the smoke run's folder, since their paths of data are relative to where they run."""
    files = task_files(tasks) if tasks else TaskFiles((), ())
    for path in map(Path, (*files.inside, *files.outside)):
        if not path.is_absolute():
            link = folder / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path.absolute())


def _absolute(path: str) -> str:
    """A path of the project as seen from the smoke run's folder; the id of a Hub model or dataset stays."""
    if is_remote(path):
        return path
    return str(Path(path).absolute()) if is_local_path(path) or Path(path).exists() else path


def _write_model(base: Pretrained, folder: Path) -> None:
    """Write a small random model of the base's family, with its vocabulary; a Llama if the family can't be made small."""
    from transformers import AutoConfig

    from snaketune.models.load_model import read_config
    from snaketune.models.small_model import random_model, small_config

    config = read_config(base)
    try:
        model = random_model(small_config(config))
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        print(f"{base.path}: no small {config.model_type} ({first_line(error)}): a Llama stands for it", flush=True)
        llama = AutoConfig.for_model("llama", vocab_size=config.get_text_config().vocab_size)
        model = random_model(small_config(llama))
    model.save_pretrained(folder)
    parameters = sum(weights.numel() for weights in model.parameters())
    print(
        f"{base.path}: a random {model.config.model_type} of {parameters / 1e6:.1f}M parameters stands for it",
        flush=True,
    )


def check_smoke_run(folder: Path) -> None:
    """Print what the run has shown, or raise SnaketuneError if it didn't end."""
    report = folder / "results/report/pages/index.html"
    if not report.is_file():
        raise SnaketuneError(f"the smoke run didn't end: see above, and {folder / 'results/logs'}")
    print(f"The smoke run's report: {report}", *(line.format(rows=ROWS) for line in PROVES), sep="\n")
