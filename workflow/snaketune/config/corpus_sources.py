"""The sources of a corpus, and how their rows are read."""

import codecs
import json
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from snaketune.config.base import DataPath, Model, PositiveInt, Revision, ScoreName, ShortText, files_at
from snaketune.config.conditions import Conditions
from snaketune.config.row_fields import Fields

Layout = Literal[
    "auto", "messages", "turns", "contents", "moss", "dialogue", "prompt-response", "instances", "message-tree", "message-rows",
    "pairs", "votes", "rated", "unpaired", "text",
]  # fmt: skip
Role = Literal["system", "user", "assistant", "tool"]
TemplateVariables = dict[str, JsonValue]


class HubDataset(Model):
    """A dataset on the Hugging Face Hub, read through `datasets`."""

    path: str
    """Repository id, for instance `openai/gsm8k`."""
    name: str | None = None
    """Configuration (subset) of the dataset, if it has several."""
    split: str = "train"
    """Split of the dataset to read. The held-out rows are drawn from it by `held_out`."""
    revision: Revision
    """Commit, tag or branch. Only a commit is immutable: a branch or tag can change without being noticed."""


# More than a person would write down.
MANY_FILES = 10


class Frame(Model):
    """Texts around the turns of nearly all rows, such as the marks of a chat template, that are removed."""

    before: str = ""
    """Beginning of users' turns."""
    after: str = ""
    """End of users' turns. A turn without beginning and end is left as it is."""
    answer_end: str = ""
    """End of answers."""
    system: str = ""
    """System turn of the conversations that the frame is removed from, as `before` contains its text."""


# Treatment of turns that a chat template rewrites where others follow.
Reasoning = Literal["exact", "last", "all", "none"]
# Treatment of the block that a chat template writes for reasoning in turns that have none.
EmptyReasoning = Literal["mask", "supervise", "omit"]


class Source(Model):
    """Source of rows: files, a Hub dataset, or scored responses of a model; exactly one of the three."""

    files: tuple[DataPath, ...] = ()
    """Files, folders (with all files below, but hidden ones and those that begin with `_`) and patterns such as
    `data/**/*.jsonl`: JSON, JSON lines, CSV, Parquet or Arrow, optionally compressed as .gz, .xz or .zst, or in a .zip or .tar
    archive. Corpora of kind `text` also take plain text, one document per file. The format is detected from the content of a
    file, not from its name. Paths are relative to the working directory; URLs begin with `s3://`, `gs://`, `az://`,
    `hf://datasets/`, `https://` or `http://`, and that of a folder ends with `/`."""
    encoding: str = "utf-8"
    """Encoding of text files (JSON, CSV, plain text), by its Python name: `cp1252`, `utf-16`, `shift_jis`."""
    delimiter: str | None = None
    """Delimiter of CSV files: one character, or `tab`. Default: comma, tab, `;` or `|`, whichever occurs equally often in the
    header and in the first rows."""
    header: tuple[ShortText, ...] = ()
    """Column names of CSV files that have no header line."""
    hub: HubDataset | None = None
    scores: ScoreName | None = None
    """Entry of `score:`, whose responses become rows: pairs of a corpus of preferences, conversations, or labelled
    completions."""
    pairs: Literal["best-worst"] | None = None
    """Of scored responses: pairs the best response to a prompt with the worst, then the second best with the second worst."""
    per_prompt: PositiveInt = 1
    """Of scored responses: maximum number of pairs per prompt."""
    rows: Literal["best", "all"] | None = None
    """Of scored responses: the best response to each prompt becomes a conversation, or all responses do."""
    at_least: float | None = None
    """Of scored responses: the score from which a response becomes a conversation. Default: any."""
    good_from: float | None = None
    """Of scored responses: the score from which a response is labelled good."""
    bad_to: float | None = None
    """Of scored responses: the score up to which a response is labelled bad."""
    min_rows: PositiveInt | None = None
    """Of scored responses: number of rows below which the run stops, since too few prompts still teach anything."""
    layout: Layout = "auto"
    """Layout of the rows; `auto` detects it from the columns."""
    fields: Fields = Fields()
    ignore: tuple[str, ...] = ()
    """Columns that hold text or lists, or mark rows, and aren't read. Where `auto` recognises the layout, any other such column
    stops the run; its message has the entry to paste."""
    frame: Frame | Literal["keep"] | None = None
    """Marks of a chat template in the texts: `{before: ..., after: ..., answer_end: ...}` removes them, `keep` keeps them.
    Where nearly all rows share such marks and this isn't set, the run stops; its message has the entry to paste."""
    template_variables: TemplateVariables = {}
    """Variables of the chat template for all rows, such as `{enable_thinking: false}`. Training, held-out loss and generation
    render rows with them. A variable that the template doesn't use is refused."""
    speakers: dict[str, Role] = {}
    """Roles of speakers or tags whose names aren't known: `{Agent: assistant, Caller: user}`."""
    where: Conditions = ()
    """Reads only rows that fulfil these conditions on their columns, such as `is_correct == true` or `helpfulness >= 3`; one
    condition or a list. A null fulfils only `!=`."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Minimum difference of two ratings, ranks or scores for which completions make a pair. Equal ones never make one."""
    pairing: Literal["each", "worst"] = "each"
    """Pairs made of several rated completions: the best with `each` lower-rated one, or with the `worst` only."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """How often each train row of this source is used: 0.5 takes every second row, 2 takes each row twice."""
    max_rows: PositiveInt | None = None
    """Maximum number of rows to take from this source, selected by a hash of the row. Default: all."""

    def entry(self, **keys: Any) -> str:
        """The lines of a config for this source with further keys, as YAML; each value in a line, like JSON."""
        keys = self.model_dump(mode="json", exclude_defaults=True) | keys
        if many := len(self.files) > MANY_FILES:
            # A folder or a pattern, most likely.
            del keys["files"]
        lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
        # YAML refuses characters that aren't printable.
        escaped = ("".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in line) for line in lines)
        return "\n  ".join(["- # files: as they are", *escaped] if many else [f"- {next(escaped)}", *escaped])

    @property
    def may_have_ratings(self) -> bool:
        """Whether its pairs can come with ratings, as far as the config shows."""
        return bool(self.scores or self.fields.ratings) or (self.layout in ("auto", "rated") and not self.fields.chosen)

    @field_validator("files")
    @classmethod
    def _expanded(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(map(files_at, files))))

    @field_validator("where", mode="before")
    @classmethod
    def _as_tuple(cls, where: Any) -> Any:
        return (where,) if isinstance(where, str) else where

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str) -> str:
        try:
            "a".encode(encoding)
            return codecs.lookup(encoding).name
        except (LookupError, ValueError):
            raise ValueError(
                f"{encoding!r} is not a text encoding that Python knows; for example utf-8, utf-16, cp1252, shift_jis, gb18030"
            ) from None

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, delimiter: str | None) -> str | None:
        if delimiter == "tab":
            return "\t"
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise ValueError(f"expected one character, no quote or line break, or tab; found {delimiter!r}")
        return delimiter

    @field_validator("header")
    @classmethod
    def _unique_names(cls, header: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"has the column {twice[0]!r} twice")
        return header

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(map(bool, (self.files, self.hub, self.scores))) != 1:
            raise ValueError("give exactly one of `files`, `hub` and `scores`")
        stated = {key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default}
        read = sorted(stated - OF_SCORES)
        if self.scores and read:
            raise ValueError(
                f"{read[0]} applies to rows that are read, and this source has scored responses; remove it"
            )
        selects = sorted(stated & SELECTING)
        if selects and not self.scores:
            raise ValueError(f"{selects[0]} selects scored responses; name them under `scores`, or remove it")
        for key in ("encoding", "delimiter", "header"):
            if self.hub and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} applies to files, and this source is a Hub dataset; remove it")
        return self


# The keys of a source of scored responses, by the kind of the corpus and for all kinds, and those of them that select.
BY_KIND = {
    "preferences": {"pairs", "margin", "per_prompt"},
    "conversations": {"rows", "at_least"},
    "unpaired": {"good_from", "bad_to"},
}
OF_ANY_KIND = {"min_rows"}
SELECTING = set().union(OF_ANY_KIND, *BY_KIND.values()) - {"margin"}
OF_SCORES = SELECTING | {"scores", "margin", "weight", "max_rows"}


def check_selection(kind: str, source: Source) -> None:
    """Check that a source of scored responses says how rows of this kind are selected, and nothing else."""
    if kind not in BY_KIND:
        raise ValueError(f"scored responses make no rows of kind {kind}; expected {', '.join(BY_KIND)}")
    fields = Source.model_fields
    stated = {key for key in SELECTING | {"margin"} if getattr(source, key) != fields[key].default}
    others = sorted(stated - BY_KIND[kind] - OF_ANY_KIND)
    if others:
        raise ValueError(f"{others[0]} doesn't select {kind}; expected {', '.join(sorted(BY_KIND[kind]))}")
    needed = {"preferences": ("pairs",), "conversations": ("rows",), "unpaired": ("good_from", "bad_to")}[kind]
    if missing := [key for key in needed if getattr(source, key) is None]:
        example = {
            "preferences": "pairs: best-worst",
            "conversations": "rows: best",
            "unpaired": "good_from: 7, bad_to: 4",
        }
        raise ValueError(f"{kind} from scores need {missing[0]}, such as {example[kind]}")
    good, bad = source.good_from, source.bad_to
    if good is not None and bad is not None and bad >= good:
        raise ValueError(f"bad_to {bad:g} is not below good_from {good:g}")
