"""The forms of files of earlier results, which may come from elsewhere: what the report reads by key has to have the form that
stages write. Of other keys, only values that the report can show are shown."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from snaketune.errors import SnaketuneError

Number = float | None
Interval = Annotated[list[float], Field(min_length=2, max_length=2)] | None
T = TypeVar("T")
LOGPS = ("chosen_logp", "rejected_logp", "reference_chosen_logp", "reference_rejected_logp")
# Columns that the report reads, by the name of the file.
TABLES = {
    "pairs.arrow": pa.schema(
        [("corpus", pa.string()), ("id", pa.string()), ("source", pa.int64())]
        + [(name, pa.float64()) for name in LOGPS]
        + [("chosen_tokens", pa.int64()), ("rejected_tokens", pa.int64())]
    ),
    "losses.arrow": pa.schema(
        [("corpus", pa.string()), ("document", pa.int64()), ("loss_nats", pa.float64()), ("tokens", pa.int64())]
    ),
}


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


class Divergence(Form):
    per_token: Number = None
    per_token_interval: Interval = None
    per_response: Number = None


class Conversations(Form):
    held_out_loss: Number = None
    held_out_loss_interval: Interval = None
    perplexity: Number = None
    perplexity_interval: Interval = None
    exact_match: ExactMatch | None = None
    kl: Divergence | None = None


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


def check_table(path: Path, table: pa.Table) -> None:
    """Check that a table has valid buffers and the columns in TABLES; SnaketuneError if it isn't so."""
    columns = TABLES[path.name]
    try:
        table.validate(full=True)
        table.select(columns.names).cast(columns)
    except (pa.ArrowException, KeyError) as error:
        raise SnaketuneError(
            f"{path} isn't in the form that a stage writes: {error}; remove this result, or make it again"
        ) from None
