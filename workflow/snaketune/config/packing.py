"""The `packing:` section of trainings and evaluations."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Model

RowLength = Annotated[int, Field(ge=8, le=2**20)]
PackingStrategy = Literal["best-fit-decreasing", "wrapped", "none"]
TrainOn = Literal["assistant", "last", "all"]
TrainingOrder = Literal["shuffled", "corpus", "length", "column"]


class Packing(Model):
    """Packing of conversations, documents or pairs into rows of fixed length."""

    length: RowLength | Annotated[tuple[RowLength, ...], Field(min_length=2)] = 1024
    """Tokens per row, or several lengths, such as `[512, 1024]`, each of which must divide the longest. Every batch has the
    same number of tokens, whatever the lengths of its rows."""
    strategy: PackingStrategy = "best-fit-decreasing"
    """`best-fit-decreasing` packs whole conversations; `wrapped` cuts them at the ends of rows, as in pre-training; `none`
    writes unpacked rows (format v2.0) for TRL's trainer."""
    overflow: Literal["auto", "drop", "truncate", "split", "raise"] = "auto"
    """Treatment of conversations, documents and pairs that are longer than a row. `auto` truncates conversations, drops pairs
    and splits documents. `truncate` and `split` cut after a turn if possible. What is cut or dropped is counted in rows and
    tokens."""
    train_on: TrainOn = "assistant"
    """Supervised tokens of conversations: those of all assistant turns (`assistant`), of the last assistant turn (`last`), or
    all tokens (`all`). In pairs, completions are supervised; in documents, all tokens."""

    # Left out of specs where it isn't set, so that results made before the key existed stay current.
    order: TrainingOrder = "shuffled"
    """Order in which a training takes the rows (curriculum). `shuffled` is another random order in every epoch; `corpus` is
    that of the corpus, `length` begins with the shortest conversations or pairs, and `column` follows
    `corpora.NAME.order_column`, ascending. Other orders than `shuffled` are the same in every epoch, and are packed in groups
    of some 64 rows, which takes 1 to 2% more rows."""

    def overflow_of(self, kind: str) -> Literal["drop", "truncate", "split", "raise"]:
        """The treatment of overflow for a corpus of this kind, with `auto` resolved.

        A truncated conversation stays in its original context, unlike the second part of a split one. The parts of a pair were
        never compared with each other. Documents have no turns that depend on each other. Raw rows can't be cut.
        """
        if self.overflow != "auto":
            return self.overflow
        if self.strategy == "none":
            return "drop"
        return "truncate" if kind == "conversations" else "split" if kind == "text" else "drop"

    @property
    def lengths(self) -> tuple[int, ...]:
        """All row lengths, ascending."""
        return (self.length,) if isinstance(self.length, int) else self.length

    @property
    def longest(self) -> int:
        """The largest row length, in tokens."""
        return self.lengths[-1]

    @field_validator("length")
    @classmethod
    def _ascending(cls, length: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(length, int):
            return length
        lengths = tuple(sorted(set(length)))
        if wrong := [n for n in lengths if lengths[-1] % n]:
            raise ValueError(f"{wrong[0]} doesn't divide {lengths[-1]}, the longest length; expected divisors of it")
        return lengths if len(lengths) > 1 else lengths[0]

    @model_validator(mode="after")
    def _fits_together(self) -> "Packing":
        if self.strategy != "best-fit-decreasing" and len(self.lengths) > 1:
            raise ValueError(f"strategy {self.strategy} takes a single length, found {list(self.lengths)}")
        if self.order != "shuffled" and len(self.lengths) > 1:
            raise ValueError(f"order {self.order} takes rows of one length, found {list(self.lengths)}")
        if self.strategy == "none" and self.train_on != "assistant":
            raise ValueError("with strategy none, TRL's trainer supervises the assistant turns; remove train_on")
        if self.strategy == "none" and self.overflow in ("truncate", "split"):
            raise ValueError(f"strategy none doesn't cut rows; expected overflow drop or raise, found {self.overflow}")
        return self
