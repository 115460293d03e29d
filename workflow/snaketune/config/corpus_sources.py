"""The `corpora:` section: sources of rows, cleaning, splits, and how rows are read."""

import codecs
import json
import re
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, field_validator, model_validator

from snaketune.config.base import DataPath, Fraction, Model, PositiveInt, Revision, ScoreName, ShortText, files_at
from snaketune.config.conditions import Conditions
from snaketune.config.row_fields import Fields
from snaketune.config.source_lists import listed_sources

Layout = Literal[
    "auto", "messages", "turns", "contents", "moss", "dialogue", "prompt-response", "instances", "message-tree", "message-rows",
    "pairs", "votes", "rated", "unpaired", "text",
]  # fmt: skip
Role = Literal["system", "user", "assistant", "tool"]
Repair = Literal[
    "merge-same-role", "drop-empty-turns", "drop-leading-assistant", "drop-trailing-user", "open-reasoning"
]
TemplateVariables = dict[str, JsonValue]
PersonalData = Literal["email", "phone", "credit_card", "ip_address", "ssn"]
Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def _with_one_group(pattern: str) -> str:
    if (groups := re.compile(pattern).groups) != 1:
        raise ValueError(f"expected exactly one group in parentheses, found {groups}")
    return pattern


Regex = Annotated[str, AfterValidator(_compiles)]
RegexWithOneGroup = Annotated[Regex, AfterValidator(_with_one_group)]


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


class Cleaning(Model):
    """Cleaning steps for the text of rows, applied in this order. All are off by default, and what each one changes is counted
    in the manifest."""

    fix_mojibake: bool = False
    """Repairs text that was decoded with the wrong encoding (`schÃ¶n`), with ftfy."""
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    """Unicode normalization form."""
    mask_personal_data: tuple[PersonalData, ...] = ()
    """Replaces text that looks like personal data of these kinds by a placeholder, such as `[EMAIL]`."""
    min_characters: PositiveInt | None = None
    """Drops rows with fewer characters."""
    max_characters: PositiveInt | None = None
    """Drops rows with more characters."""
    drop_matching: tuple[Regex, ...] = ()
    """Regular expressions; rows that match any of them are dropped."""
    languages: tuple[Language, ...] = ()
    """Drops rows in other languages than these (ISO 639-1 codes), as detected by py3langid. Default: keeps all languages."""

    @model_validator(mode="after")
    def _non_empty_range(self) -> Self:
        if self.min_characters and self.max_characters and self.min_characters > self.max_characters:
            raise ValueError(f"min_characters {self.min_characters} is more than max_characters {self.max_characters}")
        return self


class NearDuplicates(Model):
    """Near-duplicate detection by MinHash (Broder, 1997) over word shingles."""

    threshold: Annotated[float, Field(ge=0.5, le=1.0)] = 0.8
    """Jaccard similarity of their shingles from which two rows count as near duplicates."""
    shingle: PositiveInt = 5
    """Words per shingle."""
    drop: bool = True
    """Drops all but the first row of each group. `false` drops none, but puts a group on one side of the split."""


class Decontamination(Model):
    """Drops train rows that share an n-gram with the evaluation data of the same config."""

    ngram: Annotated[int, Field(ge=3)] = 13
    """Words per n-gram; an evaluation text with fewer words is compared as a whole."""


def _check_selection(kind: str, source: Source) -> None:
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


class CorpusContent(Model):
    """The keys of a corpus that determine its rows."""

    kind: Literal["conversations", "preferences", "unpaired", "text"]
    """Kind of rows. `unpaired` holds single completions, each labelled good or bad, for `kto` and `apo_zero_unpaired`. `text`
    holds documents for continued pre-training; every token of them is supervised."""
    sources: Annotated[
        tuple[Source, ...],
        Field(min_length=1),
        BeforeValidator(
            listed_sources, json_schema_input_type=str | Annotated[tuple[Source, ...], Field(min_length=1)]
        ),
    ]
    """Sources of the rows; rows are written in this order. A text names a YAML file that holds the list: what it holds counts,
    and not its name."""
    held_out: Fraction = 0.05
    """Share of the prompts held out for evaluation. 1 makes the whole corpus an evaluation set."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Seed that selects the held-out prompts. Corpora with the same seed and share hold out the same of their common
    prompts."""
    order_column: ShortText | None = None
    """Column with a number in every row, such as a difficulty, for `packing.order: column`."""
    answer_pattern: RegexWithOneGroup | None = None
    """Regular expression with one group that extracts the checkable answer from the last assistant turn, for rows without an
    answer column."""
    repair: tuple[Repair, ...] = ()
    """Repairs that may be applied to an invalid conversation instead of quarantining it; each repair is counted."""
    cleaning: Cleaning = Cleaning()
    near_duplicates: NearDuplicates | None = None
    decontamination: Decontamination | None = None
    max_quarantined_fraction: Fraction = 0.01
    """Maximum share of malformed rows; the stage fails if it is exceeded."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        kind = self.kind
        for source in self.sources:
            layout, fields = source.layout, source.fields
            if source.scores:
                _check_selection(kind, source)
                continue
            if kind != "text" and (layout == "text" or fields.text):
                raise ValueError(
                    f"layout text and fields.text apply to corpora of kind text; this corpus is of kind {kind}"
                )
            if kind == "text":
                others = sorted(fields.model_dump(exclude={"text"}, exclude_defaults=True))
                if layout not in ("auto", "text") or others:
                    other = f"fields.{others[0]}" if others else f"layout {layout}"
                    raise ValueError(f"documents have one column, named by fields.text; found {other}")
                if source.speakers:
                    raise ValueError("documents have no speakers; remove `speakers`")
                if source.template_variables:
                    raise ValueError("documents have no chat template; remove `template_variables`")
            if fields.weight and kind != "conversations":
                raise ValueError(f"fields.weight weighs conversations, and this corpus is of kind {kind}; remove it")
            if kind != "preferences" and (source.margin or source.pairing != "each"):
                key = "margin" if source.margin else "pairing"
                raise ValueError(f"{key} applies to rated preferences; this corpus is of kind {kind}; remove it")
            unlabelled = (fields.prompt or fields.conversation) and not fields.label
            if kind == "unpaired" and (layout not in ("auto", "unpaired") or unlabelled):
                other = "fields without label" if unlabelled else f"layout {layout}"
                raise ValueError(f"a corpus of kind unpaired is read from completions with a label; found {other}")
        if kind == "text" and (self.repair or self.answer_pattern):
            key = "repair" if self.repair else "answer_pattern"
            raise ValueError(f"{key} applies to turns, and documents have none; remove it")
        if self.decontamination and self.held_out == 1:
            raise ValueError("held_out is 1, so there are no train rows to decontaminate; remove decontamination")
        return self

    def reading(self, sources: tuple[Source, ...]) -> dict[str, Any]:
        """What sources of the corpus are read by, without what selects rows: the keys of the spec of stage `read`."""
        near, against = self.near_duplicates, self.decontamination
        return {
            "kind": self.kind,
            "sources": tuple(source.model_copy(update={"weight": 1.0, "max_rows": None}) for source in sources),
            "split_seed": self.split_seed,
            "order_column": self.order_column,
            "answer_pattern": self.answer_pattern,
            "repair": self.repair,
            "cleaning": self.cleaning,
            "near_duplicates": near and near.model_copy(update={"drop": True}),
            "ngram": against and against.ngram,
            "own_held_out": bool(against) and 0 < self.held_out < 1,
        }


class Corpus(CorpusContent):
    """A corpus: raw rows converted to conversations, preference pairs, labelled completions or documents, and split by
    prompt."""

    parts: Annotated[int, Field(ge=1, le=512)] | None = None
    """Number of parallel jobs that read, tokenize and write the corpus; it doesn't change the result. Default: one per 256 MB
    of files, 128 at most. A file is read by one job, JSON lines and Parquet above 16 MB by several."""
    reasoning: Reasoning | None = None
    """Reasoning of assistants, and whatever else the chat template writes in the last turn only. `exact` trains every turn as
    it is generated: the conversation as later turns see it is a trunk, each rewritten turn a branch of it, computed together.
    `last` trains only the turns that aren't rewritten. `all` writes the reasoning of all turns into one sequence, which the
    model doesn't see when it is used. `none` leaves reasoning out. Default: `exact`. In preferences and labelled completions,
    the template decides, and only `none` can be set."""
    empty_reasoning: EmptyReasoning = "mask"
    """Block that a chat template writes for the reasoning of turns without any (Qwen3: an empty `<think></think>`). `mask`
    writes it and takes no loss on it, as if it were part of the prompt; `supervise` takes loss on it; `omit` leaves it out."""
    license: ShortText | None = None
    """License of the rows, such as `cc-by-4.0`, for model cards."""
    description: Annotated[str, Field(max_length=2000)] | None = None
    """Description of the corpus in a few sentences, for model cards."""

    @model_validator(mode="after")
    def _has_reasoning(self) -> Self:
        if self.reasoning and self.kind == "text":
            raise ValueError("reasoning applies to turns, and documents have none; remove it")
        if self.empty_reasoning != "mask" and self.kind == "text":
            raise ValueError("empty_reasoning applies to turns, and documents have none; remove it")
        if self.reasoning not in (None, "none") and self.kind != "conversations":
            raise ValueError(f"reasoning: in {self.kind}, only `none` has an effect; found {self.reasoning}")
        return self

    @property
    def sampled(self) -> tuple[str, ...]:
        """The entries of `score:` whose responses are among its rows."""
        return tuple(source.scores for source in self.sources if source.scores)

    @property
    def may_have_answers(self) -> bool:
        """Whether rows can have a checkable answer, as far as the config shows. A column `answer` is detected when rows are
        read, unless `fields` names the columns to read."""
        from_columns = any(source.fields.answer or not source.fields.prompt for source in self.sources)
        return self.kind != "text" and bool(self.answer_pattern or from_columns)
