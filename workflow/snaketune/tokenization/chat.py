"""Conversations to token ids, and which of them are supervised.

    <|im_start|> user \\n  Hi  <|im_end|> \\n <|im_start|> assistant \\n  Hello !  <|im_end|> \\n
         3        90   5   71       2     5       3          91     5    72   9       2      5     ids
         0         0   0    0       0     0       0           0     0     1   1       1      0     supervised

A whole batch is rendered (about 50 microseconds per conversation) and goes through `tokenizers` in one call (about 4 MB/s
per core, on all cores unless TOKENIZERS_PARALLELISM=false); together 3 MB/s on one core. What is supervised follows from
the characters that the template marks as generated or, where it marks nothing, from whose turn it is (see `unmarked`). Rows in
which somebody wrote a control token are encoded so that it stays text, see `control`. No torch is imported.

This is the ordinary path. Whole corpora go a faster one (see `batched`) where that is proved to give the same.
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
from snaketune.tokenization.template_control import LeftOut, TemplateControl
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.token_spans import token_spans
from snaketune.tokenization.tool_calls import HARMLESS, check_marked_calls, reads_calls, said_in, with_calls
from snaketune.tokenization.tools_argument import Tools, texts_in, with_texts

# What templates can name, as transformers passes it to them.
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# How a document is written, whatever the chat template: as the tokenizer opens a text, and ended by eos.
DOCUMENT = "{{ opening }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"


class ChatTokenizer:
    """A tokenizer with its chat template.

    Attributes:
        pad_id: id of the padding token.
        eos_id: id of the end-of-sequence token.
        vocab_size: smallest number of embeddings that has a row for every id, added tokens included.
        template: the chat template.
        marked: whether the template marks what is generated; else it is known by roles.
        description: `tokenizer.json`, parsed, without post-processor, truncation and padding.
        added: the string of each added token, by id.
        control: the tokens that only the template may write: those marked special, and those that the tokenizer's
            config lists as `chat_control_tokens`. Other added tokens (Qwen's `<think>`) are words like any other.
    """

    def __init__(self, description: dict[str, Any], config: dict[str, Any], template: str):
        """
        Args:
            description: `tokenizer.json`, parsed.
            config: `tokenizer_config.json`, parsed.
        """
        # No post-processor: it would only trim the whitespace off the offsets, since the template writes every special
        # token itself.
        given = description
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
        # What the tokenizer doesn't know becomes unk without anybody's doing.
        self._telling = self._is_control.copy()
        if unk := self._variables.get("unk_token"):
            self._telling[vocab[unk]] = False
        self._template_control = TemplateControl(
            template, self._variables, self.render, self.encode_text, self._telling
        )
        self._given = given, config

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Load from the folder of a tokenizer artifact; SnaketuneError if a file is missing or unusable."""
        try:
            description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            path = folder / "chat_template.jinja"
            template = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as error:
            raise SnaketuneError(f"{folder} holds no tokenizer: {error}") from None
        return cls(description, config, template)

    def for_documents(self) -> "ChatTokenizer":
        """This tokenizer for documents, each a conversation of one turn: its text alone, from what the tokenizer itself
        puts before a text (bos, or nothing) to eos."""
        description, config = self._given
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
        """What ends a turn: eos, and the control token with which the template lets assistants end theirs."""
        if not self.template:
            return (self.eos_id,)
        probe = [{"role": "user", "content": HARMLESS}, {"role": "assistant", "content": HARMLESS}]
        encoded = self.encode([probe])[0]
        ends = {int(encoded.ids[end - 1]) for start, end in encoded.spans if end > start}
        return tuple(sorted({self.eos_id} | {id for id in ends if self._is_control[id]}))

    def is_control(self, ids: np.ndarray) -> np.ndarray:
        """bool, shaped like `ids`: which of them are control tokens."""
        return self._is_control[ids]

    def tells(self, ids: np.ndarray) -> np.ndarray:
        """bool, shaped like `ids`: which of them only a template writes: control tokens without unk."""
        return self._telling[ids]

    def turn_ends(self, messages: list[Message], ids: np.ndarray, tools: str | None = None) -> np.ndarray:
        """int64[m]: after how many of the tokens a turn is over.

        A turn is over with the first control token after its content; one without (Mistral's system prompt) has no end
        of its own.

            <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n      5 and 11

        Args:
            ids: int32[n], of these messages.
            tools: that they offer.
        """
        turns = self._template_control.turns(self._with_calls(messages, tools), tools)
        control = np.flatnonzero(self._telling[ids])
        # It is otherwise only where a template writes other control tokens around other words.
        return control[turns.ends] + 1 if len(control) == turns.count else np.zeros(0, np.int64)

    def encode_text(self, text: str) -> Encoding:
        """The encoding of rendered text; whatever looks like a control token is one."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def render(
        self, conversations: Sequence[list[Message]], add_generation_prompt: bool = False, tools: Tools = ()
    ) -> tuple[list[str], list[list[Span]]]:
        """Per conversation its text, and in characters of it, what assistants say."""
        if not self.template:
            raise SnaketuneError(
                "the tokenizer has no chat template, so it doesn't say how a conversation is written; name one under "
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
        """int32[n]: the conversation so far, with the tools that it offers, and the frame that the assistant answers in."""
        return self.encode([messages], add_generation_prompt=True, tools=[tools])[0].ids

    def strangers(self, vocabulary: dict[str, int]) -> list[str]:
        """The tokens of a vocabulary that have another id here, or none."""
        return [token for token, id in vocabulary.items() if self._tokenizer.id_to_token(id) != token]

    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token of this spelling."""
        return self._tokenizer.token_to_id(token) is not None

    def text_of(self, id: int) -> str | None:
        """A token as the vocabulary spells it; None where it has none of that id."""
        return self._tokenizer.id_to_token(id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, without special tokens."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` with their special tokens, to look at."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)

    def encode(
        self, conversations: Sequence[list[Message]], add_generation_prompt: bool = False, tools: Tools = ()
    ) -> list[Encoded]:
        """Render and encode conversations.

        Args:
            tools: that each of them offers, as JSON; nothing where none does.
        Raises:
            LeftOut: the template leaves turns out.
            SnaketuneError: the template refuses a conversation, or leaves its tools out.
        """
        if not conversations:
            return []
        tools = tools if any(tools) else ()
        conversations = [
            self._with_calls(messages, offered)
            for messages, offered in zip(conversations, tools or [None] * len(conversations), strict=True)
        ]
        texts, spans = self.render(conversations, add_generation_prompt, tools)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        encoded: list[Encoded | None] = []
        for messages, offered, encoding, own in zip(
            conversations, tools or [None] * len(texts), encodings, spans, strict=True
        ):
            ids = np.array(encoding.ids, np.int32)
            ordinary = self._is_ordinary(messages, offered, ids, add_generation_prompt)
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
        for messages, offered in zip(conversations, tools or [None] * len(texts)):
            if numbers := self.left_out(messages, offered, add_generation_prompt):
                raise LeftOut(messages[numbers[0]])
        return encoded

    def left_out(self, messages: list[Message], tools: str | None, add_generation_prompt: bool = False) -> list[int]:
        """The numbers of the turns that the template doesn't write."""
        return self._template_control.turns(self._with_calls(messages, tools), tools, add_generation_prompt).left_out

    def _with_calls(self, messages: list[Message], tools: str | None) -> list[Message]:
        """The messages, with calls apart from texts if the template reads them so."""
        return with_calls(messages, tools) if self.reads_calls else messages

    def _is_ordinary(
        self, messages: list[Message], tools: str | None, ids: np.ndarray, add_generation_prompt: bool
    ) -> bool:
        """Whether the control tokens among `ids` are those that the template writes around any such messages."""
        expected = self._template_control.ids(messages, tools, add_generation_prompt)
        if any(self.control.written_in(text) for message in messages for text in said_in(message)):
            return False
        if tools and any(map(self.control.written_in, texts_in(tools))):
            return False
        return np.array_equal(ids[self._telling[ids]], expected)

    def _guarded(
        self, conversations: list[list[Message]], plain: list[str], add_generation_prompt: bool, tools: Tools
    ) -> list[Encoded]:
        """Render and encode conversations whose contents, or tools, look like control tokens.

        Args:
            plain: the conversations rendered without guards.
        """
        lead, guard = unused_characters(plain, 2)
        texts, spans = [], []
        for messages, expected, offered in zip(conversations, plain, tools, strict=True):
            # A template asks tools for their keys, which a guard at the ends would hide from it.
            offered = with_texts(offered, partial(self.control.guarded, guard=guard, ends=False))
            for ends in (True, False):
                guarded = self.control.guard(messages, guard, ends)
                (text,), (own,) = self.render([guarded], add_generation_prompt, [offered])
                if text.replace(guard, "") == expected:
                    break
            else:
                raise Refused(
                    "control_text",
                    "the chat template treats text that looks like a control token in its own way, so that it can't be "
                    f"kept apart from one, in {expected[:200]!r}; drop such rows from the corpus or use another template",
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
            raise SnaketuneError(f"tokenizer_config.json names no {key} that the tokenizer has: found {token!r}")
        return id


def _token_string(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token
