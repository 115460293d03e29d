"""The stages: what each is told and reads, where its payload lies, and where its code is. All else follows from this table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snaketune.config.base import Model
from snaketune.stages import specs
from snaketune.stages.libraries import Inputs, always, of_corpus, of_evaluation, of_tokenizer, of_training


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        spec: the model of its spec.
        payload: the folder beside its manifest that holds what it makes.
        module: where its `build(spec, work, **inputs)` is; imported only if there is something to build.
        one, many: roles filled by one artifact, or by any number of them.
        files: roles filled by files from outside.
        libraries: distributions whose version shapes the result, by its spec and artifacts.
        gpu: whether `build` also takes the `operation` and claims GPUs.
        launches: whether `build` starts another process, which imports what shapes the result, and checks that itself.
    """

    spec: type[Model]
    payload: str
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
        payload="rows",
        module="snaketune.corpus.corpus",
        many=("against",),
        files=("files", "against_files"),
        libraries=of_corpus,
    ),
    "tokenizer": Stage(
        spec=specs.TokenizerSpec,
        payload="tokenizer",
        module="snaketune.tokenization.tokenizer",
        many=("corpora",),
        files=("chat_template", "base"),
        libraries=of_tokenizer,
    ),
    "tokenize": Stage(
        spec=specs.TokenizeSpec,
        payload="tokens",
        module="snaketune.tokenization.tokenize",
        one=("corpus", "tokenizer"),
        libraries=always("tokenizers", "transformers", "jinja2", "pyarrow"),
    ),
    "plan": Stage(
        spec=specs.PlanSpec,
        payload="plan",
        module="snaketune.packing.plan",
        many=("tokens",),
        libraries=always("numpy", "pyarrow"),
    ),
    "write": Stage(
        spec=specs.WriteSpec,
        payload="shards",
        module="snaketune.packing.write",
        one=("plan",),
        many=("tokens", "corpus"),
        libraries=always("pyarrow"),
    ),
    "pack": Stage(
        spec=specs.PackSpec,
        payload="shards",
        module="snaketune.packing.pack",
        one=("plan",),
        many=("shards",),
        libraries=always("pyarrow"),
    ),
    "sft": Stage(
        spec=specs.SftSpec,
        payload="model",
        module="snaketune.training.sft",
        one=("pack", "tokenizer"),
        files=("base",),
        libraries=of_training,
        gpu=True,
        launches=True,
    ),
    "ref_logps": Stage(
        spec=specs.RefLogpsSpec,
        payload="logps",
        module="snaketune.training.ref_logps",
        one=("model", "pack"),
        libraries=always("torch", "transformers"),
        gpu=True,
    ),
    "dpo": Stage(
        spec=specs.DpoSpec,
        payload="model",
        module="snaketune.training.dpo",
        one=("model", "pack", "ref_logps"),
        libraries=of_training,
        gpu=True,
        launches=True,
    ),
    "eval": Stage(
        spec=specs.EvalSpec,
        payload="scores",
        module="snaketune.evaluation.eval",
        one=("tokenizer",),
        many=("model", "corpora", "packs", "ref_logps"),
        files=("base", "tasks", "task_data"),
        libraries=of_evaluation,
        gpu=True,
    ),
    "report": Stage(
        spec=specs.ReportSpec,
        payload="pages",
        module="snaketune.report.report",
        files=("manifests", "runs"),
        libraries=always("matplotlib", "jinja2"),
    ),
}
