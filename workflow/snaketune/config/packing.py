"""`packing:` of trainings and evaluations: how conversations, documents and pairs become rows."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Model

RowLength = Annotated[int, Field(ge=8, le=2**20)]
PackingStrategy = Literal["best-fit-decreasing", "wrapped", "none"]
TrainOn = Literal["assistant", "last", "all"]


class Packing(Model):
    """How conversations or pairs become rows."""

    length: RowLength | Annotated[tuple[RowLength, ...], Field(min_length=2)] = 1024
    """Tokens per row; or several, for instance `[512, 1024]`: each must divide the longest, and a batch has equally many
    tokens whatever rows it is made of."""
    strategy: PackingStrategy = "best-fit-decreasing"
    """`wrapped` cuts conversations wherever a row ends, as pre-training does; `none` writes raw rows (format v2.0), which
    TRL's trainer reads."""
    overflow: Literal["auto", "drop", "truncate", "split", "raise"] = "auto"
    """What happens to what is longer than a row. `auto` truncates conversations, drops pairs and splits documents.
    `truncate` and `split` cut after a turn where they can. Everything is counted, in rows and tokens."""
    train_on: TrainOn = "assistant"
    """Where loss is taken in conversations: on what assistants say, on their last turn, or on every token. Pairs are supervised
    from their completions, documents as a whole."""

    def overflow_of(self, kind: str) -> Literal["drop", "truncate", "split", "raise"]:
        """What `auto` means for a corpus of this kind.

        What is left of a truncated conversation was said in just this context; the second half of a split one wasn't. Nobody
        compared the halves of a pair. Documents have no turns that need each other. Raw rows can't be cut.
        """
        if self.overflow != "auto":
            return self.overflow
        if self.strategy == "none":
            return "drop"
        return {"conversations": "truncate", "text": "split"}.get(kind, "drop")

    @property
    def lengths(self) -> tuple[int, ...]:
        """All row lengths, from short to long."""
        return (self.length,) if isinstance(self.length, int) else self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest rows."""
        return self.lengths[-1]

    @field_validator("length")
    @classmethod
    def _from_short_to_long(cls, length: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(length, int):
            return length
        lengths = tuple(sorted(set(length)))
        if wrong := [n for n in lengths if lengths[-1] % n]:
            raise ValueError(f"{wrong[0]} doesn't divide {lengths[-1]}, so no number of such rows has its tokens")
        return lengths if len(lengths) > 1 else lengths[0]

    @model_validator(mode="after")
    def _fits_together(self) -> "Packing":
        if self.strategy != "best-fit-decreasing" and len(self.lengths) > 1:
            raise ValueError(f"strategy {self.strategy} has rows of one length, found {list(self.lengths)}")
        if self.strategy == "none" and self.train_on != "assistant":
            raise ValueError("strategy none has TRL's trainer learn what assistants say; leave train_on out here")
        if self.strategy == "none" and self.overflow in ("truncate", "split"):
            raise ValueError(
                f"strategy none writes rows as they are; overflow can be drop or raise, found {self.overflow}"
            )
        return self
