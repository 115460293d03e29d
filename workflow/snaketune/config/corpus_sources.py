"""`corpora:`, what goes in."""

import codecs
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Fraction, Model, PositiveInt, Revision, ShortText
from snaketune.config.conditions import Conditions
from snaketune.config.paths import LocalPath

Layout = Literal[
    "auto",
    "messages",
    "sharegpt",
    "turns",
    "dialogue",
    "alpaca",
    "instances",
    "prompt-response",
    "message-tree",
    "pairs",
    "transcripts",
    "votes",
    "rated",
    "contents",
    "moss",
    "unpaired",
    "text",
]
Role = Literal["system", "user", "assistant", "tool"]
Repair = Literal["merge-same-role", "drop-empty-turns", "drop-leading-assistant", "drop-trailing-user"]
PersonalData = Literal["email", "phone", "credit_card", "ip_address", "ssn"]


UTF_8 = "utf-8"


class HubDataset(Model):
    """A dataset on the Hugging Face Hub, read through `datasets`."""

    path: str
    """Repository id, for instance `openai/gsm8k`."""
    name: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    """Which of its splits is read; what is held out is decided here."""
    revision: Revision
    """Commit, tag or branch. A commit is the only one that can't change under you."""


class Fields(Model):
    """Which columns hold what, for files in no known layout.

    A value is a column name, or a template over columns such as `"{Body} {Question}"`; a list of texts fills it line by line.
    """

    messages: str | None = None
    """A whole conversation: turns, turns with a number each, or texts of the user and the assistant in turns."""
    system: str | None = None
    """The system turn."""
    prompt: str | None = None
    """What the user says."""
    context: str | None = None
    """What the prompt is about; it follows the prompt."""
    reasoning: str | None = None
    """What is thought before the response; it stands in `<think>…</think>`."""
    response: str | None = None
    """What the assistant answers."""
    chosen: str | None = None
    """The better completion of a pair."""
    rejected: str | None = None
    """The worse one."""
    tools: str | None = None
    """The tools that the prompt offers, as JSON or as a list of functions; the chat template writes them."""
    answer: str | None = None
    """The checkable answer of the last assistant turn, for exact match."""
    task: str | None = None
    """A label to group exact match by."""
    text: str | None = None
    """A document, for corpora of kind text. Default: the column `text`."""

    @model_validator(mode="after")
    def _whole(self) -> "Fields":
        named = {key for key in ("prompt", "response", "chosen", "rejected") if getattr(self, key)}
        if named and named not in ({"prompt", "response"}, {"prompt", "chosen", "rejected"}):
            raise ValueError("map either prompt and response, or prompt, chosen and rejected")
        if self.messages and self.prompt:
            raise ValueError("messages is a whole conversation; leave prompt out")
        if self.messages and (self.context or self.reasoning):
            raise ValueError(
                "context and reasoning belong to a prompt and its response; messages holds a whole conversation"
            )
        if self.reasoning and self.chosen:
            raise ValueError("reasoning stands before a response; a pair has none")
        return self


class Source(Model):
    """One place that rows come from: local files, or a Hub dataset."""

    files: tuple[LocalPath, ...] = ()
    """Local files, relative to the working directory: JSON, JSON lines, CSV, Parquet or Arrow, each also as .gz, .xz or .zst,
    or within a .zip or .tar; for corpora of kind text also plain text, where a file is a document. What is in a file counts,
    not what it is called."""
    encoding: str = UTF_8
    """What its text files (JSON, CSV, plain text) are in, as Python calls it: `cp1252`, `utf-16`, `shift_jis`."""
    delimiter: str | None = None
    """What separates the cells of its CSV files: one character, or `tab`. Default: a comma, a tab, `;` or `|`, whichever the
    first rows have as many of as the header."""
    header: tuple[ShortText, ...] = ()
    """The columns of its CSV files, where these have no header of their own."""
    hub: HubDataset | None = None
    layout: Layout = "auto"
    """How a row is laid out; `auto` recognises it by its columns."""
    fields: Fields = Fields()
    speakers: dict[str, Role] = {}
    """Who speaks, for speakers or tags that don't say it themselves: `{Agent: assistant, Caller: user}`."""
    where: Conditions = ()
    """Only rows that fulfil these conditions on their columns, such as `is_correct == true` or `helpfulness >= 3`; one or a
    list. A null fulfils `!=` alone."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Of rated preferences, the least difference of two ratings (or ranks) that makes a pair. Equal ones never make one."""
    pairing: Literal["each", "worst"] = "each"
    """Of several rated completions: the best one against each that is rated lower, or against the worst."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """How often a train row of this source is used: 0.5 takes every second one, 2 takes each twice."""
    max_rows: PositiveInt | None = None
    """At most so many rows of this source, drawn by a hash of the row."""

    @field_validator("where", mode="before")
    @classmethod
    def _one_or_several(cls, where: Any) -> Any:
        return (where,) if isinstance(where, str) else where

    @field_validator("encoding")
    @classmethod
    def _is_an_encoding(cls, encoding: str) -> str:
        try:
            "a".encode(encoding)
            return codecs.lookup(encoding).name
        except (LookupError, ValueError):
            raise ValueError(
                f"{encoding!r} is no encoding of text that Python knows; some are utf-8, utf-16, cp1252, shift_jis, gb18030"
            ) from None

    @field_validator("delimiter")
    @classmethod
    def _is_one_character(cls, delimiter: str | None) -> str | None:
        if delimiter == "tab":
            return "\t"
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise ValueError(f"needs one character, or tab, and no quote or end of a line; found {delimiter!r}")
        return delimiter

    @field_validator("header")
    @classmethod
    def _names_each_once(cls, header: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in header if header.count(name) > 1]:
            raise ValueError(f"has {twice[0]!r} twice")
        return header

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
        if bool(self.files) == bool(self.hub):
            raise ValueError("give exactly one of `files` and `hub`")
        for key in ("encoding", "delimiter", "header"):
            if self.hub and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for local files, and this is a dataset of the Hub; leave it out")
        return self


class Cleaning(Model):
    """What is done to the text of rows, in this order; each step is counted, and off unless asked for."""

    fix_mojibake: bool = False
    """Repairs text that was decoded with the wrong encoding (`schÃ¶n`), with ftfy."""
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalization form."""
    mask_personal_data: tuple[PersonalData, ...] = ()
    """Replaces what looks like personal data by its kind, for instance `[EMAIL]`."""
    min_characters: PositiveInt | None = None
    """Rows with less text are dropped."""
    max_characters: PositiveInt | None = None
    """Rows with more text are dropped."""
    drop_matching: tuple[str, ...] = ()
    """Regular expressions; a row in which one is found is dropped."""
    languages: tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...] = ()
    """Rows in another language are dropped (ISO 639-1 codes, found by py3langid)."""

    @field_validator("drop_matching")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            regex(pattern)
        return patterns

    @model_validator(mode="after")
    def _some_length_fits(self) -> "Cleaning":
        if self.min_characters and self.max_characters and self.min_characters > self.max_characters:
            raise ValueError(f"min_characters {self.min_characters} is more than max_characters {self.max_characters}")
        return self


class NearDuplicates(Model):
    """Rows that say nearly the same, found by MinHash (Broder, 1997) over word shingles."""

    threshold: Annotated[float, Field(ge=0.5, le=1.0)] = 0.8
    """Share of their shingles that two rows must have in common (Jaccard similarity)."""
    shingle: PositiveInt = 5
    """Words per shingle."""
    drop: bool = True
    """Keeps the first of each group; false keeps all, on one side of the split."""


class Decontamination(Model):
    """Drops rows that share an n-gram with what the same config evaluates on."""

    ngram: Annotated[int, Field(ge=3)] = 13
    """Words per n-gram; a shorter evaluation text counts as a whole."""


class CorpusContent(Model):
    """Everything that shapes the rows."""

    kind: Literal["conversations", "preferences", "unpaired", "text"]
    """`unpaired` is for the losses of single completions, of which each has a label, good or bad. `text` is for continued
    pre-training: documents, of which every token is supervised."""
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Where the rows come from, in this order."""
    held_out: Fraction = 0.05
    """Share of the prompts held out for evaluation; 1 makes the whole corpus an evaluation set."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Which prompts are held out. Corpora with the same seed and share agree on every prompt they have in common."""
    answer_pattern: str | None = None
    """Regular expression with one group that finds the checkable answer in the last assistant turn,
    where no column holds it."""
    repair: tuple[Repair, ...] = ()
    """What may be done to a conversation that isn't sound, instead of quarantining it; each repair is counted."""
    cleaning: Cleaning = Cleaning()
    near_duplicates: NearDuplicates | None = None
    decontamination: Decontamination | None = None
    max_quarantined_fraction: Fraction = 0.01
    """The stage fails when a larger share of the rows is malformed."""

    @model_validator(mode="after")
    def _suits_its_kind(self) -> "CorpusContent":
        for source in self.sources:
            if self.kind != "text" and (source.layout == "text" or source.fields.text):
                raise ValueError(
                    f"layout text and fields.text are for corpora of kind text, this one holds {self.kind}"
                )
            if self.kind == "text":
                others = sorted(source.fields.model_dump(exclude={"text"}, exclude_none=True))
                if source.layout not in ("auto", "text") or others:
                    found = f"fields.{others[0]}" if others else f"layout {source.layout}"
                    raise ValueError(f"documents have one column, named by fields.text; found {found}")
                if source.speakers:
                    raise ValueError("nobody speaks in documents; leave `speakers` out")
            if self.kind != "preferences" and (source.margin or source.pairing != "each"):
                key = "margin" if source.margin else "pairing"
                raise ValueError(f"{key} is for rated preferences, this corpus holds {self.kind}; leave it out")
            if self.kind == "unpaired" and (source.layout not in ("auto", "unpaired") or source.fields.prompt):
                found = "fields.prompt" if source.fields.prompt else f"layout {source.layout}"
                raise ValueError(f"a corpus of kind unpaired is read from completions with a label; found {found}")
        if self.kind == "text" and (self.repair or self.answer_pattern):
            key = "repair" if self.repair else "answer_pattern"
            raise ValueError(f"{key} is for turns, and documents have none; leave it out")
        return self

    @model_validator(mode="after")
    def _something_to_clean(self) -> "CorpusContent":
        if self.decontamination and self.held_out == 1:
            raise ValueError("held_out is 1, so there are no rows to train on; take decontamination out")
        return self

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return pattern if pattern is None else regex_with_one_group(pattern)


class Corpus(CorpusContent):
    """Raw rows to canonical conversations, preference pairs or labelled completions, split by prompt."""

    parts: Annotated[int, Field(ge=1, le=128)] | None = None
    """Jobs that tokenize and write it side by side; the result is the same for any number. Default: one for each 256 MB
    of its local files."""
    license: ShortText | None = None
    """Under what terms its rows may be used, such as `cc-by-4.0`; model cards say it."""
    description: Annotated[str, Field(max_length=2000)] | None = None
    """What it is, in a few sentences, for model cards."""

    @property
    def may_have_answers(self) -> bool:
        """Whether a row can have a checkable answer, as far as the config tells: a column `answer` is found on reading, and not
        looked for where `fields` say which columns are read."""
        from_columns = any(source.fields.answer or not source.fields.prompt for source in self.sources)
        return self.kind != "text" and bool(self.answer_pattern or from_columns)


def regex(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; ValueError if it is none."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


def regex_with_one_group(pattern: str) -> str:
    """`pattern` itself, if it compiles and has exactly one group; ValueError otherwise."""
    groups = regex(pattern).groups
    if groups != 1:
        raise ValueError(f"needs exactly one group in parentheses, has {groups}")
    return pattern
