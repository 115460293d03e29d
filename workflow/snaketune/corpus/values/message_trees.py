"""Trees of messages, each with any number of replies, to the best conversation or to preference pairs.

    flat      one row per message: message_id, parent_id, role, text, rank; in any order, so the file is held in memory
    nested    one row per tree: a message that holds its `replies`, or is in `prompt`

The best conversation takes the reply of the lowest rank at every step, the first of several without rank, and the first
answered one of several by a user. Each ranked reply but the best gives a pair with the best one: neighbours in rank are often
nearly the same, and pairs with the same chosen reply share their prompt. Deleted messages are dropped with all their replies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from snaketune.corpus.rows import Conversation, Dropped, Malformed, Message, Outcome, Preference
from snaketune.corpus.values.cells import Raw, kind_of, number_of, plain_text, wrong_type
from snaketune.corpus.values.roles import Speakers, role_of

# Keys of a message that are read.
MESSAGE_KEYS = {"message_id", "parent_id", "role", "text", "rank", "deleted", "synthetic", "replies"}
# Also an empty cell of a table.
NO_PARENT = (None, "")
# As databases and tables write them.
YES, NO = {"true", "t", "yes", "1"}, {"false", "f", "no", "0", "", "nan", "null", "none"}


@dataclass(slots=True, eq=False)
class Node:
    """A message in its tree. `number` is that of its row, in a flat file."""

    turn: Message
    rank: float | None
    deleted: bool
    synthetic: bool
    number: int = 0
    parent: "Node | None" = None
    replies: list["Node"] = field(default_factory=list)

    @property
    def ranked_replies(self) -> list["Node"]:
        replies = [reply for reply in self.replies if not reply.deleted]
        return sorted(replies, key=lambda reply: math.inf if reply.rank is None else reply.rank)


def rows_of_tree(root: Raw, kind: str, speakers: Speakers) -> list[Outcome]:
    """Return the rows of a nested tree: one conversation, or any number of pairs."""
    top = _nested(root, speakers)
    if top.deleted:
        return [Dropped("deleted")]
    rows = [row for _, _, row in _rows_below(top, kind)]
    return rows or [Dropped("unanswered" if kind == "conversations" else "unpaired")]


def rows_of_flat_tree(raws: list[Raw], kind: str, speakers: Speakers) -> list[Outcome]:
    """Return the result for each message, in order.

    A conversation is the result for its root, a pair the result for its rejected reply; the result for other messages in
    them is None, and for messages in none Dropped.
    """
    outcomes, roots = _link(raws, speakers)
    for node in _walk(roots, include_deleted=True):
        outcomes[node.number] = Dropped("deleted")
    for node in _walk(roots):
        outcomes[node.number] = Dropped("other_branch" if kind == "conversations" else "unpaired")
    for root in (root for root in roots if not root.deleted):
        if kind == "conversations":
            outcomes[root.number] = Dropped("unanswered")
        for node, others, row in _rows_below(root, kind):
            for other in others:
                # A rejected reply may have replies, and then has a pair and is part of others.
                if isinstance(outcomes[other.number], Dropped):
                    outcomes[other.number] = None
            outcomes[node.number] = row
    return outcomes


def _rows_below(root: Node, kind: str) -> Iterator[tuple[Node, list[Node], Conversation | Preference]]:
    """Yield each row of a tree, after the message whose result it is, and the other messages in it."""
    if kind == "conversations":
        if path := _best_path(root):
            yield root, path[1:], Conversation(messages=[node.turn for node in path], notes=_notes(path))
        return
    for node in _walk([root]):
        replies = [
            reply for reply in node.ranked_replies if reply.turn["role"] == "assistant" and reply.rank is not None
        ]
        for lower in replies[1:]:
            if lower.rank > replies[0].rank:
                *prompt, best = path = _path_to(replies[0])
                turns, notes = [node.turn for node in prompt], _notes([*path, lower])
                yield lower, path, Preference(prompt=turns, chosen=[best.turn], rejected=[lower.turn], notes=notes)


def _link(raws: list[Raw], speakers: Speakers) -> tuple[list[Outcome], list[Node]]:
    """Return the error of each message, or None, and the roots of the valid ones."""
    outcomes: list[Outcome] = [None] * len(raws)
    by_id: dict[str | int, Node] = {}
    for number, raw in enumerate(raws):
        try:
            node, id_ = _node(raw, speakers, number), _identifier(raw, "message_id")
            if raw.get("parent_id") not in NO_PARENT:
                _identifier(raw, "parent_id")
            if id_ in by_id:
                raise Malformed("duplicate_message_id", f"{str(id_)[:40]!r} is already the id of an earlier message")
            by_id[id_] = node
        except Malformed as error:
            outcomes[number] = error
    roots, orphans = [], []
    for node in by_id.values():
        parent_id = raws[node.number].get("parent_id")
        node.parent = by_id.get(parent_id)
        if node.parent:
            node.parent.replies.append(node)
        else:
            (roots if parent_id in NO_PARENT else orphans).append(node)
    for orphan in orphans:
        missing = f"{str(raws[orphan.number]['parent_id'])[:40]!r}, isn't in the file, or isn't valid"
        for node in _walk([orphan], include_deleted=True):
            what = "its parent" if node is orphan else "one of its ancestors"
            outcomes[node.number] = Malformed("orphan_node", f"{what}, {missing}")
    reachable = {node.number for node in _walk(roots + orphans, include_deleted=True)}
    for node in by_id.values():
        if node.number not in reachable:
            outcomes[node.number] = Malformed("cyclic_tree", "the parent_ids form a cycle")
    return outcomes, roots


def _nested(root: Raw, speakers: Speakers) -> Node:
    top = _node(root, speakers)
    pending = [(top, root)]
    while pending:
        node, raw = pending.pop()
        replies = raw.get("replies")
        if replies is not None and not isinstance(replies, list):
            raise wrong_type("replies", replies, "a list of messages")
        for reply in replies or ():
            below = _node(reply, speakers)
            below.parent = node
            node.replies.append(below)
            pending.append((below, reply))
    return top


def _node(raw: Any, speakers: Speakers, number: int = 0) -> Node:
    if not isinstance(raw, dict):
        raise wrong_type("a reply", raw, "a message")
    speaker, text, rank = raw.get("role"), raw.get("text"), raw.get("rank")
    deleted, synthetic = (_is_set(raw.get(key), key) for key in ("deleted", "synthetic"))
    if speaker is None:
        raise Malformed("missing_speaker", "a message has no role")
    role = role_of(speaker, speakers) if isinstance(speaker, str) else None
    if role is None:
        raise Malformed("unknown_role", f"a message has the unknown role {str(speaker)[:40]!r}; map it with `speakers`")
    if not isinstance(text, str) and not deleted:
        raise Malformed("non_string_content", f"the text of a message holds {kind_of(text)}, expected a text")
    place = number_of(rank)
    if place is None and not (rank in (None, "") or rank != rank):
        raise wrong_type("rank", rank, "a number")
    turn = {"role": role, "content": text}
    return Node(turn=turn, rank=place, deleted=deleted, synthetic=synthetic, number=number)


def _is_set(value: Any, key: str) -> bool:
    text = "" if value is None or value != value else plain_text(value)
    if text is None or text.strip().lower() not in YES | NO:
        raise wrong_type(key, value, "true or false")
    return text.strip().lower() in YES


def _identifier(raw: Raw, column: str) -> str | int:
    value = raw.get(column)
    if value is None:
        raise Malformed("missing_column", f"a message has no {column}")
    if not isinstance(value, (str, int)):
        raise wrong_type(column, value, "a text or a number")
    return value


def _walk(roots: list[Node], *, include_deleted: bool = False) -> Iterator[Node]:
    """Yield all messages of these trees, parents first."""
    pending = roots[::-1]
    while pending:
        node = pending.pop()
        if include_deleted or not node.deleted:
            yield node
            pending.extend(reversed(node.replies))


def _best_path(root: Node) -> list[Node]:
    """Return the messages of the best conversation; an empty list if the root has no answer."""
    path, step = [], root
    while step:
        path.append(step)
        replies = step.ranked_replies
        if step.turn["role"] == "assistant":
            replies = [reply for reply in replies if reply.ranked_replies]
        step = replies[0] if replies else None
    while path and path[-1].turn["role"] != "assistant":
        path.pop()
    return path


def _path_to(node: Node | None) -> list[Node]:
    path = []
    while node:
        path.append(node)
        node = node.parent
    return path[::-1]


def _notes(nodes: list[Node]) -> tuple[str, ...]:
    return ("synthetic_message",) if any(node.synthetic for node in nodes) else ()
