"""The stages: what each is told and reads, where its payload lies, and where its code is. All else follows from this table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base import Model
from snaketune.stages import specs
from snaketune.stages.libraries import (
    Inputs,
    always,
    of_calibration,
    of_corpus,
    of_evaluation,
    of_reference,
    of_tokenizer,
    of_training,
)


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
        operation: keys of `Execution` that it goes by; a launched `build` takes them.
        launcher: the module whose `launch` lets `build` run in processes of its own, one per GPU.
        links: name of a link that is made beside the stages' folders, to the payload that its manifest names there.
        measures: whether its result is of one machine and moment: where it runs again, it is made again.
        by: roles of which one entry of the manifest counts in the place of the content, and which.
        keyed: the module whose `keys` says, on the machine that it runs on, what of its spec counts, and what counts as the
            same; the rest of the spec doesn't shape the result.
        told: whether `build` takes the operation though nothing is launched.
        through: roles of which another input is made as well, and with which they are there: of parts that each read all parts
            there is the square of edges, and none of them tells Snakemake anything.
        name: the folder of one of its jobs below `results/<stage>/`, as a pattern of wildcards.
    """

    spec: type[Model]
    payload: str
    module: str
    one: tuple[str, ...] = ()
    many: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    libraries: Callable[[Any, Inputs], tuple[str, ...]] = always()
    operation: tuple[str, ...] = ()
    launcher: str = ""
    links: str = ""
    name: str = "{name}"
    measures: bool = False
    by: dict[str, str] = field(default_factory=dict)
    keyed: str = ""
    told: bool = False
    through: tuple[str, ...] = ()

    def arguments(self, artifacts: dict[str, list[Artifact]], files: dict[str, list[Path]]) -> dict[str, Any]:
        """What `build` takes by role: one artifact, a list of them, or files."""
        many = {role: artifacts.get(role, []) for role in self.many}
        return {role: artifacts[role][0] for role in self.one} | many | files

    @property
    def tells(self) -> bool:
        """Whether it tells of results: it reads their manifests as they are, counts and all."""
        return "manifests" in self.files

    @property
    def gpu(self) -> bool:
        """Whether it claims GPUs, and computes on the CPU where there are none."""
        return "gpus" in self.operation


LAUNCHER = "snaketune.training.attempts"
DEVICES = ("gpus", "nodes", "launch", "zero_stage", "allow_cpu")
PORTIONS = ("micro_batch_rows", "gradient_checkpointing", "calibration")
PASS = ("gpus", "allow_cpu", "share_kernels")
TRAINING = (*DEVICES, "checkpoint_steps", "log_steps", "load_in_memory", "preflight", *PORTIONS)

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
        name="{name}/{part}",
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
        name="{name}/{part}",
        module="snaketune.packing.write",
        one=("plan",),
        many=("tokens", "corpus"),
        through=("tokens",),
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
    "preflight": Stage(
        spec=specs.PreflightSpec,
        payload="findings",
        module="snaketune.diagnostics.preflight",
        one=("tokenizer",),
        many=("packs", "corpora", "evaluated"),
        files=("base",),
        operation=("gpus",),
        measures=True,
    ),
    "calibrate": Stage(
        spec=specs.CalibrateSpec,
        payload="curve",
        module="snaketune.training.calibrate",
        one=("pack", "tokenizer"),
        files=("base",),
        libraries=of_calibration,
        operation=(*DEVICES, "load_in_memory", "micro_batch_rows"),
        launcher="snaketune.training.calibrating",
        measures=True,
    ),
    "sft": Stage(
        spec=specs.SftSpec,
        payload="model",
        module="snaketune.training.sft",
        one=("pack", "tokenizer"),
        many=("model", "beneath"),
        files=("base",),
        libraries=of_training,
        operation=TRAINING,
        launcher=LAUNCHER,
    ),
    "ref_pass": Stage(
        spec=specs.RefPassSpec,
        payload="logps",
        name="{name}/{part}",
        module="snaketune.training.ref_pass",
        one=("pack",),
        many=("model", "beneath", "tokenizer"),
        files=("base",),
        libraries=of_reference,
        operation=PASS,
        keyed="snaketune.training.keyed",
    ),
    "ref_logps": Stage(
        spec=specs.RefLogpsSpec,
        payload="logps",
        module="snaketune.training.ref_logps",
        one=("pack",),
        many=("model", "beneath", "tokenizer"),
        files=("base",),
        libraries=of_reference,
        operation=(*PASS, "parts"),
        by={"pack": "pairs"},
        keyed="snaketune.training.keyed",
        told=True,
    ),
    "dpo": Stage(
        spec=specs.DpoSpec,
        payload="model",
        module="snaketune.training.dpo",
        one=("model", "pack"),
        many=("beneath", "ref_logps"),
        files=("base",),
        libraries=of_training,
        operation=(*TRAINING, "share_kernels"),
        launcher=LAUNCHER,
    ),
    "trial": Stage(
        spec=specs.TrialSpec,
        payload="measured",
        name="{name}/{variant}/{repeat}",
        module="snaketune.diagnostics.trial",
        one=("pack", "tokenizer"),
        many=("model", "beneath", "ref_logps"),
        files=("base",),
        libraries=of_calibration,
        operation=(*TRAINING, "share_kernels"),
        launcher="snaketune.diagnostics.trying",
        measures=True,
    ),
    "diagnosis": Stage(
        spec=specs.DiagnosisSpec,
        payload="attribution",
        module="snaketune.diagnostics.diagnosis",
        many=("trials",),
        libraries=always("matplotlib"),
    ),
    "audit": Stage(
        spec=specs.AuditSpec,
        payload="audit",
        module="snaketune.diagnostics.audit",
        one=("pack", "preflight", "calibrate"),
        many=("trials",),
    ),
    "eval": Stage(
        spec=specs.EvalSpec,
        payload="scores",
        name="{evaluation}/{model}",
        module="snaketune.evaluation.eval",
        one=("tokenizer",),
        many=("model", "beneath", "corpora", "packs", "ref_logps"),
        files=("base", "tasks", "task_data"),
        libraries=of_evaluation,
        operation=("gpus",),
    ),
    "card": Stage(
        spec=specs.CardSpec,
        payload="card",
        name="{model}",
        module="snaketune.publishing.card",
        files=("manifests",),
        libraries=always("huggingface_hub"),
    ),
    "convert": Stage(
        spec=specs.ConvertSpec,
        payload="gguf",
        module="snaketune.publishing.convert",
        one=("model",),
        # Of the converter that is there when it runs.
        measures=True,
    ),
    "report": Stage(
        spec=specs.ReportSpec,
        payload="pages",
        name="",
        module="snaketune.report.report",
        files=("manifests", "runs", "compared", "compared_runs", "compared_evals"),
        links="best",
        libraries=always("matplotlib", "jinja2"),
    ),
}
