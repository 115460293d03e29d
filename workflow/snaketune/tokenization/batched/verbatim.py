"""Proof that a chat template writes the contents of messages unchanged, whatever they are.

If it does, the text around the contents depends only on the roles, so one rendering shows how all conversations with the same
roles are rendered. A template is a program, so its syntax tree is checked. Every expression is of one of four kinds, and for
the last three only certain uses are allowed:

    plain      any expression without a message's content
    messages   the conversation, or a part of it: sliced, indexed, looped over, counted, filtered by role
    message    one turn: its role, its content, or another key (which rows of a corpus don't have)
    content    the text of a turn: written out, trimmed, concatenated with other text, assigned to a variable

A content, or a text concatenated from it, may also be a condition by itself (`if message.content`); rows with an empty content
therefore go to the reference path. A variable that is assigned several times has the kind with fewer allowed uses throughout.
Any other use (comparing, searching, slicing or measuring a content, passing it to a macro, an unknown filter) is refused.
"""

from collections.abc import Iterable
from functools import cache

from jinja2 import nodes

from snaketune.tokenization.template import parsed

PLAIN, CONTENT, MESSAGE, MESSAGES = "plain", "content", "message", "messages"
TYPE_TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number"}
MAX_ROUNDS = 20


class NotVerbatim(Exception):
    """A content may change more of the text than its own part; the message is the reason."""


@cache
def check_verbatim(template: str) -> None:
    """Check a template.

    Raises:
        NotVerbatim: it uses a content in a way that may change other text.
    """
    _, tree = parsed(template)
    kinds = _Kinds()
    for _ in range(MAX_ROUNDS):
        before = dict(kinds.kinds)
        kinds.statements(tree.body)
        if kinds.kinds == before:
            return
    raise NotVerbatim("the chat template's variables depend on each other in too long a chain")


def _require(condition: object, what: str, node: nodes.Node) -> None:
    if not condition:
        raise NotVerbatim(f"the chat template {what} (line {node.lineno})")


class _Kinds:
    """The kinds of all variables; those of a namespace are under (name, attribute)."""

    def __init__(self):
        self.kinds: dict[str | tuple[str, str], str] = {"messages": MESSAGES}

    def statements(self, body: list[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for part in node.nodes:
                    _require(self._kind(part) in (PLAIN, CONTENT), "writes out a whole message", part)
            case nodes.If():
                self._kind(node.test)
                for body in (node.body, node.elif_, node.else_):
                    self.statements(body)
            case nodes.For():
                kind = self._kind(node.iter)
                loops = kind in (PLAIN, MESSAGES) and not node.recursive
                _require(loops, "loops over a message or a content, or recursively", node)
                self._assign(node.target, MESSAGE if kind == MESSAGES else PLAIN)
                if node.test is not None:
                    self._kind(node.test)
                self.statements([*node.body, *node.else_])
            case nodes.Assign():
                self._assign(node.target, self._kind(node.node))
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):
                # {% generation %}, the only extension with a body.
                self.statements(node.body)
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                _require(False, f"has a {type(node).__name__} block", node)

    def _assign(self, target: nodes.Node, kind: str) -> None:
        match target:
            case nodes.Tuple() if kind == PLAIN:
                for item in target.items:
                    self._assign(item, PLAIN)
            case nodes.Name() | nodes.NSRef():
                key = target.name if isinstance(target, nodes.Name) else (target.name, target.attr)
                self.kinds[key] = _joined(self.kinds.get(key, PLAIN), kind, target)
            case _:
                _require(False, "unpacks messages", target)

    def _kind(self, node: nodes.Node) -> str:
        """The kind of an expression; raise NotVerbatim if it isn't allowed."""
        match node:
            case nodes.Const() | nodes.TemplateData():
                return PLAIN
            case nodes.Name():
                return self.kinds.get(node.name, PLAIN)
            case nodes.Getattr():
                return self._member(node, node.node, nodes.Const(node.attr))
            case nodes.Getitem():
                return self._member(node, node.node, node.arg)
            case nodes.Filter() if node.node is not None:
                return self._filter(node)
            case nodes.Test():
                self._all_plain(node.args, node)
                harmless = self._kind(node.node) == PLAIN or node.name in TYPE_TESTS
                _require(harmless, f"tests whether a content is {node.name}", node)
                return PLAIN
            case nodes.Call():
                return self._call(node)
            case nodes.Add() | nodes.Concat():
                parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
                kinds = {self._kind(part) for part in parts}
                _require(kinds <= {PLAIN, CONTENT}, "adds to a list of messages", node)
                return CONTENT if CONTENT in kinds else PLAIN
            case nodes.And() | nodes.Or():
                return _joined(self._kind(node.left), self._kind(node.right), node)
            case nodes.Not():
                self._kind(node.node)
                return PLAIN
            case nodes.CondExpr():
                self._kind(node.test)
                otherwise = PLAIN if node.expr2 is None else self._kind(node.expr2)
                return _joined(self._kind(node.expr1), otherwise, node)
            case nodes.Compare(expr=nodes.Const(), ops=[nodes.Operand(op="in" | "notin", expr=of)]):
                # `'tool_calls' in message` tests for a key; nothing else may be compared.
                if self._kind(of) == MESSAGE:
                    return PLAIN
        self._all_plain(node.iter_child_nodes(), node)
        return PLAIN

    def _member(self, node: nodes.Node, of: nodes.Node, key: nodes.Node) -> str:
        """The kind of `of.key` or `of[key]`."""
        kind = self._kind(of)
        name = key.value if isinstance(key, nodes.Const) else None
        if kind == PLAIN:
            self._all_plain([key], node)
            if not isinstance(of, nodes.Name):
                return PLAIN
            neighbour = of.name == "loop" and name in ("previtem", "nextitem")
            return MESSAGE if neighbour else self.kinds.get((of.name, str(name)), PLAIN)
        if kind == MESSAGE and isinstance(name, str) and not hasattr(dict, name):
            return CONTENT if name == "content" else PLAIN
        part = kind == MESSAGES and not isinstance(name, str)
        _require(part, "takes a part of a content, or a method of a message", node)
        self._all_plain(key.iter_child_nodes() if isinstance(key, nodes.Slice) else [key], node)
        return MESSAGES if isinstance(key, nodes.Slice) else MESSAGE

    def _filter(self, node: nodes.Filter) -> str:
        kind = self._kind(node.node)
        self._all_plain([*node.args, *node.kwargs], node)
        match kind, node.name, node.args:
            case ("plain", _, _) | ("messages", "length" | "count", _):
                return PLAIN
            case ("content", "trim", []):
                return CONTENT
            case ("messages", "first" | "last", _):
                return MESSAGE
            case ("messages", "list", _) | ("messages", "selectattr" | "rejectattr", [nodes.Const(value="role"), *_]):
                return MESSAGES
        raise NotVerbatim(f"the chat template passes a {kind} through the filter {node.name} (line {node.lineno})")

    def _call(self, node: nodes.Call) -> str:
        arguments = [*node.args, *node.kwargs, *filter(None, (node.dyn_args, node.dyn_kwargs))]
        self._all_plain(arguments, node)
        called = node.node
        if not isinstance(called, nodes.Getattr) or (kind := self._kind(called.node)) == PLAIN:
            self._all_plain([called], node)
            return PLAIN
        match kind, called.attr, arguments:
            case ("content", "strip", []):
                return CONTENT
            case ("message", "get", [nodes.Const(value=key), *_]):
                return CONTENT if key == "content" else PLAIN
        raise NotVerbatim(f"the chat template calls the method {called.attr} of a {kind} (line {node.lineno})")

    def _all_plain(self, parts: Iterable[nodes.Node], node: nodes.Node) -> None:
        _require(all(self._kind(part) == PLAIN for part in parts), "does more with a content than write it", node)


def _joined(kind: str, other: str, node: nodes.Node) -> str:
    _require(
        PLAIN in (kind, other) or kind == other, f"uses a variable or expression as a {kind} and as a {other}", node
    )
    return other if kind == PLAIN else kind
