"""The stages: what each reads, where its code is, and how one is run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from snaketune.artifacts.code import check_code, import_checked, templates
from snaketune.artifacts.manifest import read_artifact
from snaketune.artifacts.stage import run_stage
from snaketune.config import specs
from snaketune.config.base import Model
from snaketune.config.jobs import PAYLOADS
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.libraries import Inputs, always, of_corpus, of_evaluation, of_tokenizer, of_training
from snaketune.models.gpus import claimed_gpus, visible_gpus


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        spec: the model of its spec.
        module: where its `build(spec, work, **inputs)` is; imported only if there is something to build.
        one, many: roles filled by one artifact, or by any number of them.
        files: roles filled by files from outside.
        libraries: distributions whose version shapes the result, by its spec and artifacts.
        gpu: whether `build` also takes the `operation` and claims GPUs.
        launches: whether `build` starts another process, which imports what shapes the result, and checks that itself.
    """

    spec: type[Model]
    module: str
    one: tuple[str, ...] = ()
    many: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    libraries: Callable[[Any, Inputs], tuple[str, ...]] = always()
    gpu: bool = False
    launches: bool = False


STAGES: dict[str, Stage] = {
    "corpus": Stage(
        spec=specs.CorpusSpec,
        module="snaketune.corpus.stage",
        many=("against",),
        files=("files", "against_files"),
        libraries=of_corpus,
    ),
    "tokenizer": Stage(
        spec=specs.TokenizerSpec,
        module="snaketune.tokenization.stage",
        many=("corpora",),
        files=("chat_template", "base"),
        libraries=of_tokenizer,
    ),
    "tokenize": Stage(
        spec=specs.TokenizeSpec,
        module="snaketune.tokenization.tokenize",
        one=("corpus", "tokenizer"),
        libraries=always("tokenizers", "transformers", "jinja2", "pyarrow"),
    ),
    "plan": Stage(
        spec=specs.PlanSpec,
        module="snaketune.packing.plan_rows",
        many=("tokens",),
        libraries=always("numpy", "pyarrow"),
    ),
    "write": Stage(
        spec=specs.WriteSpec,
        module="snaketune.packing.write_shards",
        one=("plan",),
        many=("tokens", "corpus"),
        libraries=always("pyarrow"),
    ),
    "pack": Stage(
        spec=specs.PackSpec,
        module="snaketune.packing.collect",
        one=("plan",),
        many=("shards",),
        libraries=always("pyarrow"),
    ),
    "sft": Stage(
        spec=specs.SftSpec,
        module="snaketune.training.sft",
        one=("pack", "tokenizer"),
        files=("base",),
        libraries=of_training,
        gpu=True,
        launches=True,
    ),
    "ref_logps": Stage(
        spec=specs.RefLogpsSpec,
        module="snaketune.training.ref_logps",
        one=("model", "pack"),
        libraries=always("torch", "transformers"),
        gpu=True,
    ),
    "dpo": Stage(
        spec=specs.DpoSpec,
        module="snaketune.training.dpo",
        one=("model", "pack", "ref_logps"),
        libraries=of_training,
        gpu=True,
        launches=True,
    ),
    "eval": Stage(
        spec=specs.EvalSpec,
        module="snaketune.evaluation.stage",
        one=("tokenizer",),
        many=("model", "corpora", "packs", "ref_logps"),
        files=("base", "tasks", "task_data"),
        libraries=of_evaluation,
        gpu=True,
    ),
    "report": Stage(
        spec=specs.ReportSpec,
        module="snaketune.report.stage",
        files=("manifests", "runs"),
        libraries=always("matplotlib", "jinja2"),
    ),
}


def run(
    stage_name: str,
    *,
    spec: str,
    code: str,
    inputs: dict[str, list[Path]],
    out: Path,
    operation: Operation,
    reruns_on: str = "code",
) -> None:
    """Run one stage from paths, as the command line does.

    Args:
        spec: the spec as JSON.
        inputs: by role, manifests of artifacts or files from outside.
        out: folder that the result is published in.
        reruns_on: `versions` if a result made with other versions of the stage's libraries isn't taken.
    Raises:
        SnaketuneError: a spec or an input that doesn't fit the stage.
    """
    stage = STAGES[stage_name]
    try:
        typed = stage.spec.model_validate_json(spec)
    except ValidationError as error:
        raise SnaketuneError(f"--spec doesn't fit stage {stage_name}: {error}") from None
    artifacts = {role: [_artifact(path) for path in inputs.get(role, [])] for role in (*stage.one, *stage.many)}
    for role in stage.one:
        if len(artifacts[role]) != 1:
            raise SnaketuneError(f"stage {stage_name} needs exactly one {role}, got {len(artifacts[role])}")
    files = {role: inputs.get(role, []) for role in stage.files}

    def build(work):
        (check_code if stage.launches else import_checked)(stage.module, code, stage_name)
        arguments: dict[str, Any] = {role: artifacts[role][0] for role in stage.one}
        arguments |= {role: artifacts[role] for role in stage.many} | files
        if stage.gpu:
            with claimed_gpus(operation.gpus):
                return import_module(stage.module).build(typed, work, operation=operation, **arguments)
        outcome = import_module(stage.module).build(typed, work, **arguments)
        if templates(stage.module):
            # Read while it worked.
            check_code(stage.module, code, stage_name)
        return outcome

    run_stage(
        stage=stage_name,
        spec=json.loads(specs.canonical(typed)),
        artifacts=artifacts,
        files=files,
        code=code,
        out=out,
        payload=PAYLOADS[stage_name],
        build=build,
        libraries=stage.libraries(typed, artifacts),
        reruns_on=reruns_on,
        device=("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else "",
    )


def _artifact(manifest: Path):
    """An input artifact; its payload's folder follows from the stage that wrote the manifest."""
    if not manifest.is_file():
        raise SnaketuneError(f"{manifest} doesn't exist; make it with: snakemake {manifest}")
    try:
        stage = json.loads(manifest.read_text(encoding="utf-8"))["stage"]
        return read_artifact(manifest, PAYLOADS[stage])
    except (ValueError, KeyError, TypeError) as error:
        raise SnaketuneError(f"{manifest} is no snaketune manifest ({error!r}); remove it and run again") from None
