"""Conversations encoded to token ids, with the tokens that are supervised.

    <|im_start|> user \\n  Hi  <|im_end|> \\n <|im_start|> assistant \\n  Hello !  <|im_end|> \\n
         3        90   5   71       2     5       3          91     5    72   9       2      5     ids
         0         0   0    0       0     0       0           0     0     1   1       1      0     supervised

A whole batch is rendered (about 50 microseconds per conversation) and goes through `tokenizers` in one call (about 4 MB/s
per core, on all cores unless TOKENIZERS_PARALLELISM=false); together 3 MB/s on one core. The supervised
tokens follow from the characters that the template marks as generated or, if it marks nothing, from the roles (see
`assistant_spans`). If a message contains the string of a control token, the row is encoded so that it stays text (see
`control`). No torch is imported.

This is the reference path. Corpora are encoded batch by batch (see `batched`) where that is proved to give the same result.
"""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from snaketune.errors import SnaketuneError
from snaketune.tokenization.assistant_spans import render_unmarked
from snaketune.tokenization.control import ControlTokens, unused_characters
from snaketune.tokenization.encoded_rows import Encoded
from snaketune.tokenization.template import Message, Span, marks_generation, render
from snaketune.tokenization.template_control import OmittedTurn, TemplateControl
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.token_spans import token_spans
from snaketune.tokenization.tool_calls import PLACEHOLDER, check_marked_calls, message_texts, reads_calls, with_calls
from snaketune.tokenization.tools_argument import Tools, texts_in, with_texts

# Variables of templates, as transformers passes them.
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The template of documents, which replaces the chat template: the tokenizer's opening of a text, the text, and eos.
DOCUMENT = "{{ opening }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"


class ChatTokenizer:
    """A tokenizer with its chat template.

    Attributes:
        pad_id: id of the padding token.
        eos_id: id of the end-of-sequence token.
        vocab_size: the smallest number of embeddings with a row for every id, added tokens included.
        template: the chat template.
        marked: whether the template marks what is generated; if not, the assistant's turns are located by role.
        description: `tokenizer.json`, parsed, without post-processor, truncation and padding.
        added: the string of each added token, by id.
        control: the tokens that only the template may write: those marked special, and those that the tokenizer's
            config lists as `chat_control_tokens`. Other added tokens (Qwen's `<think>`) are ordinary words.
    """

    def __init__(self, description: dict[str, Any], config: dict[str, Any], template: str):
        """Build from parsed files.

        Args:
            description: `tokenizer.json`, parsed.
            config: `tokenizer_config.json`, parsed.
        """
        # Without the post-processor, which would only trim whitespace from the offsets: the template writes every special
        # token itself.
        original = description
        description = {**description, "post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        self.description = description
        self.added = {token["id"]: token["content"] for token in description["added_tokens"]}
        self.template = template
        self.marked = marks_generation(template)
        self._variables = {key: _token_string(config[key]) for key in VARIABLES if config.get(key) is not None}
        named = set(config.get("chat_control_tokens") or ())
        self.control = ControlTokens(
            self._tokenizer,
            description,
            [
                token["content"]
                for token in description["added_tokens"]
                if token["special"] or token["content"] in named
            ],
        )
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.pad_id = self._special_id("pad_token")
        self.eos_id = self._special_id("eos_token")
        self._is_control = np.zeros(self.vocab_size, bool)
        self._is_control[list(self.control.ids.values())] = True
        # Unknown characters of any text become unk.
        self._template_only = self._is_control.copy()
        if unk := self._variables.get("unk_token"):
            self._template_only[vocab[unk]] = False
        self._template_control = TemplateControl(
            template, self._variables, self.render, self.encode_text, self._template_only
        )
        self._original = original, config

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Load the folder of a tokenizer artifact; SnaketuneError if a file is missing or unusable."""
        try:
            description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            path = folder / "chat_template.jinja"
            template = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as error:
            raise SnaketuneError(
                f"{folder} has no usable tokenizer: {error}; it needs tokenizer.json and tokenizer_config.json"
            ) from None
        return cls(description, config, template)

    def for_documents(self) -> "ChatTokenizer":
        """Return this tokenizer for documents, each a conversation of one turn.

        A document is what the tokenizer itself puts before a text (bos or nothing), the text, and eos.
        """
        description, config = self._original
        bos = self._variables.get("bos_token")
        first = Tokenizer.from_str(json.dumps(description)).encode("").ids[:1]
        opened = bos is not None and first == [self._tokenizer.token_to_id(bos)]
        documents = ChatTokenizer(description, config, DOCUMENT)
        documents._variables["opening"] = bos if opened else ""
        return documents

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the template has a form of its own for tool calls."""
        return reads_calls(self.template)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a turn: eos, and the control token with which the template ends assistant turns."""
        if not self.template:
            return (self.eos_id,)
        probe = [{"role": "user", "content": PLACEHOLDER}, {"role": "assistant", "content": PLACEHOLDER}]
        encoded = self.encode([probe])[0]
        ends = {int(encoded.ids[end - 1]) for start, end in encoded.spans if end > start}
        return tuple(sorted({self.eos_id} | {id for id in ends if self._is_control[id]}))

    def is_control(self, ids: np.ndarray) -> np.ndarray:
        """Return bool, shaped like `ids`: which of them are control tokens."""
        return self._is_control[ids]

    def written_by_template(self, ids: np.ndarray) -> np.ndarray:
        """Return bool, shaped like `ids`: which of them only a template can write, the control tokens except unk."""
        return self._template_only[ids]

    def turn_ends(self, messages: list[Message], ids: np.ndarray, tools: str | None = None) -> np.ndarray:
        """Return int64[m], the ends of turns: the number of tokens up to and including each.

        A turn ends with the first control token after its content; a turn without one (Mistral's system prompt) has no end of
        its own.

            <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n      5 and 11

        Args:
            ids: int32[n], the encoded messages.
            tools: the tools of the row, as JSON.
        """
        turns = self._template_control.turns(self._with_calls(messages, tools), tools)
        control = np.flatnonzero(self._template_only[ids])
        # The counts differ only if the template writes other control tokens around other contents.
        return control[turns.ends] + 1 if len(control) == turns.count else np.zeros(0, np.int64)

    def encode_text(self, text: str) -> Encoding:
        """Encode rendered text; every string of a control token becomes one."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def render(
        self, conversations: Sequence[list[Message]], add_generation_prompt: bool = False, tools: Tools = ()
    ) -> tuple[list[str], list[list[Span]]]:
        """Render conversations; return the text of each, and the character spans of its assistant turns."""
        if not self.template:
            raise SnaketuneError(
                "the tokenizer has no chat template, so conversations can't be rendered; name one under "
                "tokenizers.NAME.chat_template (resources/chat_templates has some). Only corpora of kind text need none"
            )
        if self.marked:
            texts, spans = render(self.template, conversations, self._variables, add_generation_prompt, tools)
            for messages, text, own in zip(conversations, texts, spans, strict=True):
                check_marked_calls(messages, text, own)
            return texts, spans
        return render_unmarked(
            self.template, conversations, self._variables, add_generation_prompt, list(self.control.ids), tools
        )

    def encode_prompt(self, messages: list[Message], tools: str | None = None) -> np.ndarray:
        """Return int32[n], the ids of the conversation so far, with its tools and the generation prompt."""
        return self.encode([messages], add_generation_prompt=True, tools=[tools])[0].ids

    def mismatched_tokens(self, vocabulary: dict[str, int]) -> list[str]:
        """Return the tokens of `vocabulary` that have another id, or none, in this tokenizer."""
        return [token for token, id in vocabulary.items() if self._tokenizer.id_to_token(id) != token]

    def has_token(self, token: str) -> bool:
        """Whether the vocabulary has this token."""
        return self._tokenizer.token_to_id(token) is not None

    def id_to_token(self, id: int) -> str | None:
        """Return the string of a token in the vocabulary; None if no token has this id."""
        return self._tokenizer.id_to_token(id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` with special tokens, for display."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)

    def encode(
        self, conversations: Sequence[list[Message]], add_generation_prompt: bool = False, tools: Tools = ()
    ) -> list[Encoded]:
        """Render and encode conversations.

        Args:
            tools: the tools of each row, as JSON; empty if no row has any.
        Raises:
            OmittedTurn: the template omits turns.
            SnaketuneError: the template refuses a conversation, or omits its tools.
        """
        if not conversations:
            return []
        tools = tools if any(tools) else ()
        conversations = [
            self._with_calls(messages, own_tools)
            for messages, own_tools in zip(conversations, tools or [None] * len(conversations), strict=True)
        ]
        texts, spans = self.render(conversations, add_generation_prompt, tools)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        encoded: list[Encoded | None] = []
        for messages, own_tools, encoding, own in zip(
            conversations, tools or [None] * len(texts), encodings, spans, strict=True
        ):
            ids = np.array(encoding.ids, np.int32)
            ordinary = self._control_tokens_match(messages, own_tools, ids, add_generation_prompt)
            encoded.append(Encoded(ids, token_spans(encoding, own, self._is_control[ids])) if ordinary else None)
        to_guard = [number for number, done in enumerate(encoded) if done is None]
        if to_guard:
            guarded = self._guarded(
                [conversations[number] for number in to_guard],
                [texts[number] for number in to_guard],
                add_generation_prompt,
                [tools[number] if tools else None for number in to_guard],
            )
            for number, done in zip(to_guard, guarded, strict=True):
                encoded[number] = done
        for messages, own_tools in zip(conversations, tools or [None] * len(texts)):
            if numbers := self.omitted_turns(messages, own_tools, add_generation_prompt):
                raise OmittedTurn(messages[numbers[0]])
        return encoded

    def omitted_turns(
        self, messages: list[Message], tools: str | None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the numbers of the turns that the template doesn't write."""
        return self._template_control.turns(self._with_calls(messages, tools), tools, add_generation_prompt).omitted

    def _with_calls(self, messages: list[Message], tools: str | None) -> list[Message]:
        """Return the messages, with tool calls under `tool_calls` if the template reads that key."""
        return with_calls(messages, tools) if self.reads_calls else messages

    def _control_tokens_match(
        self, messages: list[Message], tools: str | None, ids: np.ndarray, add_generation_prompt: bool
    ) -> bool:
        """Whether the control tokens in `ids` are exactly those that the template writes around any such messages."""
        expected = self._template_control.ids(messages, tools, add_generation_prompt)
        if any(self.control.written_in(text) for message in messages for text in message_texts(message)):
            return False
        if tools and any(map(self.control.written_in, texts_in(tools))):
            return False
        return np.array_equal(ids[self._template_only[ids]], expected)

    def _guarded(
        self, conversations: list[list[Message]], plain: list[str], add_generation_prompt: bool, tools: Tools
    ) -> list[Encoded]:
        """Render and encode conversations whose contents or tools contain strings of control tokens.

        Args:
            plain: the conversations rendered without guards.
        """
        lead, guard = unused_characters(plain, 2)
        texts, spans = [], []
        for messages, expected, own_tools in zip(conversations, plain, tools, strict=True):
            # Templates look up keys of tools, which guards at the ends would change.
            own_tools = with_texts(own_tools, partial(self.control.guard_text, guard=guard, ends=False))
            for ends in (True, False):
                guarded = self.control.guard(messages, guard, ends)
                (text,), (own,) = self.render([guarded], add_generation_prompt, [own_tools])
                if text.replace(guard, "") == expected:
                    break
            else:
                raise Refused(
                    "control_text",
                    "the chat template changes text that looks like a control token, so it can't be distinguished "
                    f"from one, in {expected[:200]!r}; drop such rows from the corpus or use another template",
                )
            texts.append(text)
            spans.append(own)
        return [
            Encoded(done.ids, token_spans(done.encoding, done.spans, self._is_control[done.ids]))
            for done in self.control.encode(texts, spans, lead, guard)
        ]

    def _special_id(self, key: str) -> int:
        token = self._variables.get(key)
        id = self._tokenizer.token_to_id(token) if token is not None else None
        if id is None:
            raise SnaketuneError(
                f"tokenizer_config.json: {key} is {token!r}, which is no token of the tokenizer; set it to one of its tokens"
            )
        return id


def _token_string(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token
