"""The `corpora:` section: what a corpus is made from, how its rows are cleaned, selected and split."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from snaketune.config.base import Fraction, Model, PositiveInt, Regex, RegexWithOneGroup, ShortText
from snaketune.config.corpus_sources import EmptyReasoning, Reasoning, Source, check_selection
from snaketune.config.source_lists import listed_sources

Repair = Literal[
    "merge-same-role", "drop-empty-turns", "drop-leading-assistant", "drop-trailing-user", "open-reasoning"
]
PersonalData = Literal["email", "phone", "credit_card", "ip_address", "ssn"]
Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


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
                check_selection(kind, source)
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
