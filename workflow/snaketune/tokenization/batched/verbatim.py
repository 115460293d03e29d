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

from functools import cache

from jinja2 import nodes

PLAIN, CONTENT, MESSAGE, MESSAGES = "plain", "content", "message", "messages"
TYPE_TESTS = {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number"}
COUNTS = {"length", "count"}
MAX_ROUNDS = 20


class NotVerbatim(Exception):
    """A content may change more of the text than its own part; the message is the reason."""


@cache
def check_verbatim(template: str) -> None:
    """Check a template.

    Raises:
        NotVerbatim: it uses a content in a way that may change other text.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    kinds = _Kinds()
    for _ in range(MAX_ROUNDS):
        before = dict(kinds.kinds)
        kinds.statements(tree.body)
        if kinds.kinds == before:
            return
    raise NotVerbatim("the chat template's variables depend on each other in too long a chain")


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
                    if self._kind(part) not in (PLAIN, CONTENT):
                        raise NotVerbatim(f"the chat template writes out a whole message (line {part.lineno})")
            case nodes.If():
                self._kind(node.test)
                for body in (node.body, node.elif_, node.else_):
                    self.statements(body)
            case nodes.For():
                self._loop(node)
            case nodes.Assign():
                self._assign(node.target, self._kind(node.node))
            case nodes.CallBlock() if isinstance(node.call.node, nodes.ExtensionAttribute):
                # {% generation %}, the only extension with a body.
                self.statements(node.body)
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                raise NotVerbatim(f"the chat template has a {type(node).__name__} block (line {node.lineno})")

    def _loop(self, node: nodes.For) -> None:
        kind = self._kind(node.iter)
        if kind in (CONTENT, MESSAGE) or node.recursive:
            raise NotVerbatim(
                f"the chat template loops over a message or a content, or recursively (line {node.lineno})"
            )
        self._assign(node.target, MESSAGE if kind == MESSAGES else PLAIN)
        if node.test is not None:
            self._kind(node.test)
        self.statements(node.body)
        self.statements(node.else_)

    def _assign(self, target: nodes.Node, kind: str) -> None:
        match target:
            case nodes.Name():
                key: str | tuple[str, str] = target.name
            case nodes.NSRef():
                key = (target.name, target.attr)
            case nodes.Tuple() if kind == PLAIN:
                for item in target.items:
                    self._assign(item, PLAIN)
                return
            case _:
                raise NotVerbatim(f"the chat template unpacks messages (line {target.lineno})")
        self.kinds[key] = _joined(self.kinds.get(key, PLAIN), kind, target)

    def _kind(self, node: nodes.Node) -> str:
        """Return the kind of an expression; raise NotVerbatim if it isn't allowed."""
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
                kind = self._kind(node.node)
                self._all_plain(node.args, node)
                if kind != PLAIN and node.name not in TYPE_TESTS:
                    raise NotVerbatim(f"the chat template tests whether a content is {node.name} (line {node.lineno})")
                return PLAIN
            case nodes.Call():
                return self._call(node)
            case nodes.Add() | nodes.Concat():
                parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
                kinds = {self._kind(part) for part in parts}
                if not kinds <= {PLAIN, CONTENT}:
                    raise NotVerbatim(f"the chat template adds to a list of messages (line {node.lineno})")
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
            case nodes.Compare() if self._tests_key(node):
                return PLAIN
        self._all_plain(list(node.iter_child_nodes()), node)
        return PLAIN

    def _tests_key(self, node: nodes.Compare) -> bool:
        """Whether a comparison tests for a key of a message, as `'tool_calls' in message` does."""
        return (
            isinstance(node.expr, nodes.Const)
            and len(node.ops) == 1
            and node.ops[0].op in ("in", "notin")
            and self._kind(node.ops[0].expr) == MESSAGE
        )

    def _member(self, node: nodes.Node, of: nodes.Node, key: nodes.Node) -> str:
        kind = self._kind(of)
        name = key.value if isinstance(key, nodes.Const) else None
        if kind == PLAIN:
            self._all_plain([] if isinstance(node, nodes.Getattr) else [key], node)
            if isinstance(of, nodes.Name):
                if of.name == "loop" and name in ("previtem", "nextitem"):
                    return MESSAGE
                return self.kinds.get((of.name, str(name)), PLAIN)
            return PLAIN
        if kind == MESSAGE and isinstance(name, str) and not hasattr(dict, name):
            return CONTENT if name == "content" else PLAIN
        if kind == MESSAGES and not isinstance(name, str):
            self._all_plain(list(key.iter_child_nodes()) if isinstance(key, nodes.Slice) else [key], node)
            return MESSAGES if isinstance(key, nodes.Slice) else MESSAGE
        raise NotVerbatim(f"the chat template takes a part of a content, or a method of a message (line {node.lineno})")

    def _filter(self, node: nodes.Filter) -> str:
        kind = self._kind(node.node)
        self._all_plain([*node.args, *node.kwargs], node)
        by_role = bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "role"
        match kind, node.name:
            case ("plain", _):
                return PLAIN
            case ("content", "trim") if not node.args:
                return CONTENT
            case ("messages", name) if name in COUNTS:
                return PLAIN
            case ("messages", "first" | "last"):
                return MESSAGE
            case ("messages", "list"):
                return MESSAGES
            case ("messages", "selectattr" | "rejectattr") if by_role:
                return MESSAGES
        raise NotVerbatim(f"the chat template passes a {kind} through the filter {node.name} (line {node.lineno})")

    def _call(self, node: nodes.Call) -> str:
        arguments = [*node.args, *node.kwargs, *filter(None, (node.dyn_args, node.dyn_kwargs))]
        self._all_plain(arguments, node)
        called = node.node
        if not isinstance(called, nodes.Getattr) or (kind := self._kind(called.node)) == PLAIN:
            self._all_plain([called], node)
            return PLAIN
        if kind == CONTENT and called.attr == "strip" and not arguments:
            return CONTENT
        if kind == MESSAGE and called.attr == "get" and arguments and isinstance(arguments[0], nodes.Const):
            return CONTENT if arguments[0].value == "content" else PLAIN
        raise NotVerbatim(f"the chat template calls the method {called.attr} of a {kind} (line {node.lineno})")

    def _all_plain(self, parts: list[nodes.Node], node: nodes.Node) -> None:
        if any(self._kind(part) != PLAIN for part in parts):
            raise NotVerbatim(f"the chat template does more with a content than write it (line {node.lineno})")


def _joined(one: str, other: str, node: nodes.Node) -> str:
    if PLAIN in (one, other) or one == other:
        return other if one == PLAIN else one
    raise NotVerbatim(
        f"the chat template uses a variable or expression as a {one} and as a {other} (line {node.lineno})"
    )
