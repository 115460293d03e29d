"""Turns of conversations and pairs in Arrow columns, with the turns that are to be supervised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.config.corpus_sources import Reasoning
from snaketune.corpus.rows import VARIABLES
from snaketune.engine.packing.ragged import gather, offsets_of
from snaketune.tokenization.reasoning import without_reasoning
from snaketune.tokenization.template import Message


@dataclass(frozen=True)
class Turns:
    """n conversations: turns `index[offsets[i] : offsets[i + 1]]` of `roles` and `contents` are conversation i.

    Attributes:
        index, offsets: int64, the turns of all conversations, concatenated, and int64[n + 1].
        wanted: bool, shaped like `index`: which assistant turns are supervised; with `everything`, which turns of any role. If
            turns have other weights in the loss than 0 and 1, these weights, float32.
        everything: bool[n]: whether all tokens of the conversation are supervised, except those of unwanted turns.
        tools, variables: strings[n], the tools and the template variables as JSON; null if a conversation has none.
        rewritten: what becomes of assistant turns that the template writes otherwise where others follow (see `encode_rows`):
            `exact`, each is a branch of a tree; `last`, they aren't supervised; `all`, each is written as it is generated, in
            one sequence; None, conversations are as the template writes them (pairs, documents).
    """

    roles: pa.StringArray
    contents: pa.StringArray
    index: np.ndarray
    offsets: np.ndarray
    wanted: np.ndarray
    everything: np.ndarray
    tools: pa.StringArray
    variables: pa.StringArray
    rewritten: Literal["exact", "last", "all"] | None = None

    def __len__(self) -> int:
        return len(self.everything)

    def rows(self, rows: np.ndarray) -> "Turns":
        at, offsets = gather(self.offsets[rows], np.diff(self.offsets)[rows])
        return replace(
            self,
            index=self.index[at],
            offsets=offsets,
            wanted=self.wanted[at],
            everything=self.everything[rows],
            tools=self.tools.take(pa.array(rows)),
            variables=self.variables.take(pa.array(rows)),
        )

    @property
    def assistants(self) -> np.ndarray:
        """bool, shaped like `index`: which turns are the assistant's."""
        return _are_assistants(self.roles)[self.index]

    def messages(self) -> list[list[Message]]:
        """The turns of each conversation as templates expect them."""
        turns = pa.array(self.index)
        roles, contents = self.roles.take(turns).to_pylist(), self.contents.take(turns).to_pylist()
        flat = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        return [flat[start:end] for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]


def conversation_turns(table: pa.Table, train_on: str, reasoning: Reasoning | None = None) -> Turns:
    """The turns of the column `messages`; `assistant`, `last` or `all` are supervised, but never those with weight 0."""
    roles, contents, wanted, offsets = _column(table, "messages", reasoning)
    if train_on == "last":
        assistants = np.flatnonzero(_are_assistants(roles))
        conversation = np.searchsorted(offsets, assistants, side="right")
        earlier = assistants[:-1][conversation[:-1] == conversation[1:]]
        wanted[earlier] = False
    everything = np.full(len(table), train_on == "all")
    # With `all`, nothing is generated.
    rewritten = None if train_on == "all" else "exact" if reasoning == "none" else reasoning
    of_rows = (_texts(table, name) for name in ("tools", VARIABLES.name))
    return Turns(roles, contents, np.arange(len(roles)), offsets, wanted, everything, *of_rows, rewritten)


def pair_turns(
    table: pa.Table, completions: Sequence[str] = ("chosen", "rejected"), reasoning: Reasoning | None = None
) -> Turns:
    """Prompt + chosen and prompt + rejected of each row in turn: 2n conversations, whose completions are supervised."""
    roles, contents, wanted, offsets = zip(*(_column(table, name, reasoning) for name in ("prompt", *completions)))
    wanted[0][:] = False
    bases = offsets_of(np.array([len(column) for column in roles]))
    # The prompt before each completion.
    order = [part for completion in range(1, len(roles)) for part in (0, completion)]
    index, ends = gather(
        np.stack([bases[part] + offsets[part][:-1] for part in order], 1).reshape(-1),
        np.stack([np.diff(offsets[part]) for part in order], 1).reshape(-1),
    )
    repeated = pa.array(np.repeat(np.arange(len(table)), len(completions)))
    return Turns(
        pa.concat_arrays(roles),
        pa.concat_arrays(contents),
        index,
        np.ascontiguousarray(ends[::2]),
        np.concatenate(wanted)[index],
        np.zeros(len(completions) * len(table), bool),
        *(_texts(table, name).take(repeated) for name in ("tools", VARIABLES.name)),
    )


def turns_of(table: pa.Table, train_on: str, reasoning: Reasoning | None) -> Turns:
    """The turns of a corpus' rows, which are conversations, pairs, or prompts with one completion each."""
    if "messages" in table.column_names:
        return conversation_turns(table, train_on, reasoning)
    return pair_turns(table, ("chosen", "rejected") if "chosen" in table.column_names else ("completion",), reasoning)


def has_weights(table: pa.Table) -> bool:
    """Whether the conversations of a table have turns of other weights in the loss than 0 and 1."""
    names = table.column_names
    return "messages" in names and table.schema.field("messages").type.value_type.get_field_index("weight") >= 0


def _are_assistants(roles: pa.StringArray) -> np.ndarray:
    return pc.equal(roles, "assistant").to_numpy(zero_copy_only=False)


def _texts(table: pa.Table, name: str) -> pa.StringArray:
    """Strings[n], a column; all null if the table has no such column."""
    if name not in table.column_names:
        return pa.nulls(len(table), pa.string())
    return pa.concat_arrays([pa.array([], pa.string()), *table.column(name).chunks])


def _column(
    table: pa.Table, name: str, reasoning: Reasoning | None
) -> tuple[pa.StringArray, pa.StringArray, np.ndarray, np.ndarray]:
    """Roles, contents and supervision (as `Turns.wanted`) of a column's turns, and int64[n + 1], the rows' offsets."""
    chunks = table.column(name).chunks or [pa.array([], table.schema.field(name).type)]
    column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    offsets = column.offsets.to_numpy().astype(np.int64)
    turns = column.flatten()
    fields = dict(zip((field.name for field in turns.type), turns.flatten()))
    roles, contents = (fields[part].cast(pa.string()) for part in ("role", "content"))
    if reasoning == "none":
        contents = without_reasoning(roles, contents)
    supervised = np.ones(len(roles), bool)
    if "supervised" in fields:
        supervised = fields["supervised"].to_numpy(zero_copy_only=False).astype(bool)
    elif "weight" in fields:
        supervised = fields["weight"].to_numpy(zero_copy_only=False).astype(np.float32)
    return roles, contents, supervised, offsets - offsets[0]
