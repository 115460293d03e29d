"""All results of a report: manifests, run.json files, and the scores and responses of every evaluated model.

What the report reads by key has to have the form that stages write (`check`), since compared results may come from elsewhere;
of other keys, only values that the report can show are shown.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from snaketune.errors import SnaketuneError
from snaketune.publishing.results import Result, Results, is_number, read_json, read_lines
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES
from snaketune.tables import read_table

Number = float | None
Interval = Annotated[list[float], Field(min_length=2, max_length=2)] | None
T = TypeVar("T")
Columns = dict[str, tuple[Callable[[pa.DataType], bool], ...]]
TEXT, NUMBER = (pa.types.is_string,), (pa.types.is_integer, pa.types.is_floating)
LOGPS = ("chosen_logp", "rejected_logp", "reference_chosen_logp", "reference_rejected_logp")
PAIRS = {
    "corpus": TEXT,
    "id": TEXT,
    "source": NUMBER,
    **dict.fromkeys((*LOGPS, "chosen_tokens", "rejected_tokens"), NUMBER),
}
LOSSES = {"corpus": TEXT, "document": NUMBER, "loss_nats": NUMBER, "tokens": NUMBER}

MODEL_KINDS = ("base", "sft", "dpo", "merge")


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """One model in one evaluation, with its scores and responses."""

    result: Result
    scores: dict[str, Any]
    responses: list[dict[str, Any]]

    @property
    def evaluation(self) -> str:
        return self.result.name.partition("/")[0]

    @property
    def model(self) -> str:
        """`base:NAME`, `sft:NAME` or `dpo:NAME`."""
        kind, _, name = self.result.name.partition("/")[2].partition("-")
        return f"{kind}:{name}"

    @cached_property
    def pairs(self) -> pa.Table:
        """Log-probabilities of the held-out pairs (columns: `evaluation.preference_accuracy.PAIRS`)."""
        return self._table("pairs.arrow", PAIRS)

    @cached_property
    def losses(self) -> dict[str, dict[tuple[str, int], tuple[float, int]]]:
        """Summed loss and tokens of each held-out document: corpus → (pack digest, document) → (nats, tokens)."""
        manifest, table = self.result.manifest, self._table("losses.arrow", LOSSES)
        packs = dict(zip(manifest["spec"].get("conversations", ()), manifest["inputs"].get("packs", ())))
        losses: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
        for row in table.to_pylist():
            document = packs.get(row["corpus"], ""), row["document"]
            losses.setdefault(row["corpus"], {})[document] = row["loss_nats"], row["tokens"]
        return losses

    def _table(self, name: str, columns: Columns) -> pa.Table:
        path = self.result.artifact.file(name)
        return check_table(path, read_table(path), columns)


class ResultSet(Results):
    """All results of a report, in an order that doesn't depend on the order of the arguments."""

    def __init__(self, jobs: tuple[ReportedJob, ...], manifests: list[Path], runs: list[Path]):
        super().__init__(jobs, manifests, runs)
        order = list(STAGES)
        self.all = sorted(self.by_key.values(), key=lambda result: (order.index(result.stage), natural(result.name)))
        self.by_key = {f"{result.stage}/{result.name}": result for result in self.all}
        self.stages = {result.stage for result in self.all}

    @cached_property
    def evaluations(self) -> dict[str, list[ScoredModel]]:
        """The models of each evaluation, from base to DPO, by its name."""
        by_name: dict[str, list[ScoredModel]] = {}
        for scored in map(scored_of, self.of("eval")):
            by_name.setdefault(scored.evaluation, []).append(scored)
        return {name: sorted(models, key=lambda model: model_order(model.model)) for name, models in by_name.items()}

    @property
    def scored(self) -> list[ScoredModel]:
        return [scored for models in self.evaluations.values() for scored in models]

    @cached_property
    def initial_models(self) -> dict[str, str]:
        """The label of the initial model of each DPO run, by the label of the run."""
        return {run.label: inputs[0].label for run in self.of("dpo") if (inputs := self.made_from(run, "model"))}

    @property
    def models(self) -> list[str]:
        """Labels of all models, from base to DPO."""
        trained = {result.label for result in self.of("sft", "dpo")}
        return sorted({scored.model for scored in self.scored} | trained, key=model_order)


def scored_of(result: Result) -> ScoredModel:
    """Read the scores and responses of an evaluation. Raises SnaketuneError if they can't be read."""
    path, lines = (result.artifact.file(name) for name in ("scores.json", "responses.jsonl"))
    return ScoredModel(
        result=result,
        scores=check(path, Scores, read_json(path)),
        responses=check(lines, list[Response], read_lines(lines)),
    )


def by_whole(results: list[Result]) -> dict[tuple[str, str], list[Result]]:
    """The parts of each result, by its stage and its name without the number of the part (`demo` for `demo/1-of-3`)."""
    parts: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        in_parts = "{part}" in STAGES[result.stage].job_name
        name = result.name.partition("/")[0] if in_parts else result.name
        parts.setdefault((result.stage, name), []).append(result)
    return parts


def natural(name: str) -> list[tuple[int, Any]]:
    """Sort key that puts `lr-2` before `lr-10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def model_order(label: str) -> tuple[int, list[tuple[int, Any]], float]:
    """Sort key: base, then SFT, then DPO; the snapshots of a run before it, in the order of its steps."""
    kind, _, name = label.partition(":")
    run, _, share = name.partition("@")
    return MODEL_KINDS.index(kind), natural(run), float(share or 1)


def unique(values: Iterable[Any]) -> list[Any]:
    """Distinct values in order of first appearance."""
    return list(dict.fromkeys(values))


def logged_numbers(run: Result, key: str) -> list[float]:
    """All logged values of a key that are finite numbers."""
    return [float(entry[key]) for entry in run.history if isinstance(entry, dict) and is_number(entry.get(key))]


def is_gpu(run: dict[str, Any]) -> bool:
    return str(run.get("device") or "").partition(":")[0] not in ("", "cpu", "mps")


class Form(BaseModel):
    """A mapping with some known keys."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)


class File(Form):
    digest: str


class Stop(Form):
    step: int
    reason: str


class Spec(Form):
    loss: str | dict[str, float] | None = None
    conversations: list[str] = []


class Manifest(Form):
    """manifest.json of a training or an evaluation."""

    stage: str
    fingerprint: str
    code: str
    spec: Spec
    inputs: dict[str, list[str]]
    counts: dict[str, Any]
    versions: dict[str, str | None]
    payload: dict[str, File]
    records: dict[str, File]
    stopped: Stop | None = None


class TrainingRun(Form):
    """run.json of a training."""

    history: list[Any] = []
    tokens_per_second_median: Number = None


class Share(Form):
    share: Number = None
    share_interval: Interval = None
    prompts: int = 0


class ExactMatch(Share):
    by_task: dict[str, Share] = {}
    mean_response_tokens: Number = None
    mean_response_tokens_interval: Interval = None


class Conversations(Form):
    held_out_loss: Number = None
    held_out_loss_interval: Interval = None
    perplexity: Number = None
    perplexity_interval: Interval = None
    exact_match: ExactMatch | None = None


class Preferences(Form):
    by_source: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], dict[str, Number | Interval]] = {}
    __pydantic_extra__: dict[str, Number | Interval]


class Scores(Form):
    """scores.json of an evaluation, by corpus or task."""

    conversations: dict[str, Conversations] = {}
    preferences: dict[str, Preferences] = {}
    tasks: dict[str, dict[str, Number]] | None = None
    task_intervals: dict[str, dict[str, Interval]] | None = None


class Response(Form):
    """A line of responses.jsonl."""

    corpus: str
    id: str
    correct: bool | float | None


def check(path: Path, form: Any, value: T) -> T:
    """A value that has the form; SnaketuneError, with the file, the key and what was expected, if it hasn't."""
    try:
        TypeAdapter(form).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "its content"
        raise SnaketuneError(
            f"{path} isn't in the form that a stage writes: {key}: {first['msg']}, found {str(first['input'])[:80]!r}; remove "
            "this result, or make it again"
        ) from None
    return value


def check_table(path: Path, table: pa.Table, columns: Columns) -> pa.Table:
    """A table whose buffers are valid and that has these columns; SnaketuneError if it isn't so."""
    try:
        table.validate(full=True)
        problem = next(
            (name for name, kinds in columns.items() if not any(is_kind(table.field(name).type) for is_kind in kinds)),
            None,
        )
    except (pa.ArrowException, KeyError) as error:
        problem = str(error)
    if problem:
        raise SnaketuneError(
            f"{path} isn't in the form that a stage writes: {problem}; remove this result, or make it again"
        )
    return table


def measurements(run: Result) -> list[dict[str, Any]]:
    """The measurements of a training, in order; empty if it has none."""
    held_out = run.run.get("held_out")
    points = held_out.get("points") if isinstance(held_out, dict) else None
    return [point for point in points or () if isinstance(point, dict) and is_number(point.get("step"))]
