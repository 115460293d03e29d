"""Turns of conversations and pairs in Arrow columns, with the turns that are to be supervised."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.tokenization.ragged import gather, offsets_of
from snaketune.tokenization.template import Message


@dataclass(frozen=True)
class Turns:
    """n conversations: turns `index[offsets[i] : offsets[i + 1]]` of `roles` and `contents` are conversation i.

    Attributes:
        roles, contents: strings, of all turns.
        index: int64, the turns of all conversations, concatenated.
        offsets: int64[n + 1], of the conversations in `index`.
        wanted: bool, shaped like `index`: which assistant turns are supervised; with `everything`, which turns of any role.
        everything: bool[n]: whether all tokens of the conversation are supervised, except those of unwanted turns.
        tools: strings[n], null if a conversation has none.
    """

    roles: pa.StringArray
    contents: pa.StringArray
    index: np.ndarray
    offsets: np.ndarray
    wanted: np.ndarray
    everything: np.ndarray
    tools: pa.StringArray

    def __len__(self) -> int:
        return len(self.everything)

    def rows(self, rows: np.ndarray) -> "Turns":
        """Return some of the conversations, in the given order."""
        at, offsets = gather(self.offsets[rows], np.diff(self.offsets)[rows])
        return Turns(
            self.roles,
            self.contents,
            self.index[at],
            offsets,
            self.wanted[at],
            self.everything[rows],
            self.tools.take(pa.array(rows)),
        )

    @property
    def assistants(self) -> np.ndarray:
        """bool, shaped like `index`: which turns are the assistant's."""
        return pc.equal(self.roles, "assistant").to_numpy(zero_copy_only=False)[self.index]

    def messages(self) -> list[list[Message]]:
        """Return the turns of each conversation as templates expect them."""
        turns = pa.array(self.index)
        roles, contents = self.roles.take(turns).to_pylist(), self.contents.take(turns).to_pylist()
        flat = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        return [flat[start:end] for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]


def conversation_turns(table: pa.Table, train_on: str) -> Turns:
    """Return the turns of the column `messages`.

    Args:
        train_on: which turns are supervised: `assistant`, `last` or `all`; never those with weight 0.
    """
    roles, contents, wanted, offsets = _column(table, "messages")
    if train_on == "last":
        assistants = np.flatnonzero(pc.equal(roles, "assistant").to_numpy(zero_copy_only=False))
        conversation = np.searchsorted(offsets, assistants, side="right")
        earlier = assistants[:-1][conversation[:-1] == conversation[1:]]
        wanted[earlier] = False
    everything = np.full(len(table), train_on == "all")
    return Turns(roles, contents, np.arange(len(roles)), offsets, wanted, everything, _tools(table))


def pair_turns(table: pa.Table) -> Turns:
    """Return prompt + chosen and prompt + rejected of each row in turn: 2n conversations, whose completions are supervised."""
    return _prompt_with(table, "chosen", "rejected")


def completion_turns(table: pa.Table) -> Turns:
    """Return prompt + completion of each row, whose completion is supervised."""
    return _prompt_with(table, "completion")


def _prompt_with(table: pa.Table, *completions: str) -> Turns:
    """Return the prompt of each row with each of its completions in turn."""
    columns = [_column(table, name) for name in ("prompt", *completions)]
    columns[0][2][:] = False
    bases = offsets_of(np.array([len(roles) for roles, *_ in columns]))
    starts, lengths = [], []
    for column in (part for completion in range(1, len(columns)) for part in (0, completion)):
        offsets = columns[column][3]
        starts.append(bases[column] + offsets[:-1])
        lengths.append(np.diff(offsets))
    index, ends = gather(np.stack(starts, 1).reshape(-1), np.stack(lengths, 1).reshape(-1))
    roles, contents = (pa.concat_arrays([column[part] for column in columns]) for part in (0, 1))
    wanted = np.concatenate([column[2] for column in columns])[index]
    tools = _tools(table).take(pa.array(np.repeat(np.arange(len(table)), len(completions))))
    everything = np.zeros(len(completions) * len(table), bool)
    return Turns(roles, contents, index, np.ascontiguousarray(ends[::2]), wanted, everything, tools)


def _tools(table: pa.Table) -> pa.StringArray:
    """Return strings[n], the tools of each row; all null if the table has no such column."""
    if "tools" not in table.column_names:
        return pa.nulls(len(table), pa.string())
    return pa.concat_arrays([pa.array([], pa.string()), *table.column("tools").chunks])


def _column(table: pa.Table, name: str) -> tuple[pa.StringArray, pa.StringArray, np.ndarray, np.ndarray]:
    """Return roles, contents and supervision (bool) of all turns of a column, and int64[n + 1], the offsets of the rows."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    offsets = column.offsets.to_numpy().astype(np.int64)
    turns = column.flatten()
    fields = dict(zip((field.name for field in turns.type), turns.flatten()))
    roles, contents = (fields[part].cast(pa.string()) for part in ("role", "content"))
    supervised = np.ones(len(roles), bool)
    if "supervised" in fields:
        supervised = fields["supervised"].to_numpy(zero_copy_only=False).astype(bool)
    return roles, contents, supervised, offsets - offsets[0]
