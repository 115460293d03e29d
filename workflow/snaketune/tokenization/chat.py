"""Conversations encoded to token ids, with the tokens that are supervised.

    <|im_start|> user \\n  Hi  <|im_end|> \\n <|im_start|> assistant \\n  Hello !  <|im_end|> \\n
         3        90   5   71       2     5       3          91     5    72   9       2      5     ids
         0         0   0    0       0     0       0           0     0     1   1       1      0     supervised

A whole batch is rendered and goes through `tokenizers` in one call, together 3 MB/s on one core. The supervised tokens follow
from the characters that the template marks as generated or, if it marks nothing, from the roles (see `assistant_spans`). If a
message contains the string of a control token, the row is encoded so that it stays text (see `control`). This is the reference
path; corpora are encoded batch by batch (see `batched`) where that is proved to give the same result.
"""

import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from snaketune.errors import SnaketuneError
from snaketune.tokenization import tool_calls
from snaketune.tokenization.assistant_spans import token_spans
from snaketune.tokenization.chat_template import ANSWER, QUESTION, ChatTemplate
from snaketune.tokenization.control import ControlTokens, unused_characters
from snaketune.tokenization.control_frames import ControlFrame, OmittedTurn, TemplateControl
from snaketune.tokenization.prompt_boundaries import PromptBoundaries
from snaketune.tokenization.template import SPECIAL_TOKENS, Message, Refused, Span, Tools

# Tokenizers with the template variables of rows, of which most corpora have a few.
CACHED_VARIABLES = 256
# The date that a template writes as today's, a key of `tokenizer_config.json`; and the file of the training template.
DATE_KEY = "chat_template_date"
TRAINING_TEMPLATE = "training_template.jinja"
# The template of documents, which replaces the chat template: the tokenizer's opening of a text, the text, and eos.
DOCUMENT = "{{ opening }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"


@dataclass(frozen=True)
class Encoded:
    """An encoded conversation of n tokens.

    Attributes:
        ids: int32[n].
        spans: for each assistant turn, its tokens [start, end), including the end of turn; None if the template rewrites the
            turn in this conversation, so that the model never generates it in this form.
        apart: the numbers of the spans that are encoded apart from their prompts (see `prompt_boundaries`).
        ends: for each turn, the number of tokens up to and including its end, the first control token after its content; None
            if it has no end of its own (Mistral's system prompt).

                <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n      5 and 11
    """

    ids: np.ndarray
    spans: list[Span | None]
    apart: list[int]
    ends: list[int | None]

    @property
    def supervised(self) -> np.ndarray:
        return self.mask(self.spans)

    @property
    def turn_ends(self) -> np.ndarray:
        """int64[m], the ends of the turns that have one."""
        return np.array([end for end in self.ends if end is not None], np.int64)

    def mask(self, spans: list[Span | None]) -> np.ndarray:
        """bool[n], the tokens of the given spans; refuse the row if one is None."""
        if None in spans:
            raise Refused(
                "rewritten_turn",
                "the chat template writes an assistant turn otherwise where others follow, so it is never generated in this "
                "form; in conversations corpora.NAME.reasoning: exact trains it as it is generated; drop such rows from other "
                "corpora",
            )
        mask = np.zeros(len(self.ids), bool)
        for start, end in spans:
            mask[start:end] = True
        return mask


class ChatTokenizer:
    """A tokenizer with its chat template.

    Attributes:
        pad_id, eos_id: ids of the padding and of the end-of-sequence token.
        vocab_size: the smallest number of embeddings with a row for every id, added tokens included.
        template: the chat template.
        description: `tokenizer.json`, parsed, without post-processor, truncation and padding.
        added: the string of each added token, by id.
        control: the tokens that only the template may write: those marked special, and those that the tokenizer's
            config lists as `chat_control_tokens`. Other added tokens (Qwen's `<think>`) are ordinary words.
        template_only: bool[vocab_size], the ids of the control tokens except unk, which unknown characters become too.
    """

    def __init__(
        self,
        description: dict[str, Any],
        config: dict[str, Any],
        template: str,
        training_template: str = "",
        empty_reasoning: str = "mask",
    ):
        """Build from `tokenizer.json` and `tokenizer_config.json`, parsed."""
        self._original = description, config
        # Without the post-processor, which would only trim whitespace from the offsets: the template writes every special
        # token itself.
        self.description = {**description, "post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(self.description))
        self._boundaries = PromptBoundaries(self._tokenizer, self.description)
        tokens = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
        variables = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
        added, named = description["added_tokens"], config.get("chat_control_tokens") or ()
        self.added = {token["id"]: token["content"] for token in added}
        control = [token["content"] for token in added if token["special"] or token["content"] in named]
        self.control = ControlTokens(self._tokenizer, self.description, control)
        today = date.fromisoformat(config[DATE_KEY]) if config.get(DATE_KEY) else None
        self.template = ChatTemplate(
            template, training_template, variables, list(self.control.ids), today, empty_reasoning
        )
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.pad_id, self.eos_id = self._special_id("pad_token"), self._special_id("eos_token")
        self._is_control = np.zeros(self.vocab_size, bool)
        self._is_control[list(self.control.ids.values())] = True
        self.template_only = self._is_control.copy()
        if unk := variables.get("unk_token"):
            self.template_only[vocab[unk]] = False
        self._template_control = TemplateControl(self.template, self.encode_text, self.template_only)
        self._with_variables = lru_cache(CACHED_VARIABLES)(self._build_with_variables)

    @classmethod
    def load(cls, folder: Path, empty_reasoning: str = "mask") -> "ChatTokenizer":
        """Load the folder of a tokenizer artifact; SnaketuneError if a file is missing or unusable."""
        try:
            description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            template, training_template = (
                path.read_text(encoding="utf-8") if path.exists() else ""
                for path in (folder / "chat_template.jinja", folder / TRAINING_TEMPLATE)
            )
        except (OSError, ValueError) as error:
            raise SnaketuneError(
                f"{folder} has no usable tokenizer: {error}; it needs tokenizer.json and tokenizer_config.json"
            ) from None
        return cls(description, config, template, training_template, empty_reasoning)

    def for_documents(self) -> "ChatTokenizer":
        """This tokenizer for documents: what it puts before a text itself (bos or nothing), the text, eos."""
        description, config = self._original
        bos = self.template.variables.get("bos_token")
        first = Tokenizer.from_str(json.dumps(description)).encode("").ids[:1]
        opened = bos is not None and first == [self._tokenizer.token_to_id(bos)]
        documents = ChatTokenizer(description, config, DOCUMENT)
        documents.template.variables["opening"] = bos if opened else ""
        return documents

    def with_variables(self, variables: str | None) -> "ChatTokenizer":
        """This tokenizer with the template variables of a row, an object as JSON.

        Raises:
            Refused: the template doesn't use one of them, or one holds the string of a control token.
        """
        return self if variables is None else self._with_variables(variables)

    def _build_with_variables(self, variables: str) -> "ChatTokenizer":
        values = json.loads(variables)
        if any(map(self.control.written_in, tool_calls.texts_in(variables))):
            raise Refused(
                "control_text",
                f"a template variable holds the string of a control token, in {variables[:200]}; remove it from the variable",
            )
        chat = copy(self)
        chat.template = self.template.with_variables(values)
        chat._template_control = TemplateControl(chat.template, self.encode_text, self.template_only)
        return chat

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a turn: eos, and the control token with which the template ends assistant turns."""
        if not self.template.text:
            return (self.eos_id,)
        (encoded,) = self.encode([[QUESTION, ANSWER]])
        ends = {int(encoded.ids[span[1] - 1]) for span in encoded.spans if span and span[1] > span[0]}
        ends |= {self.control.ids[token] for token in self.template.closings.values() if token}
        return tuple(sorted({self.eos_id} | {id for id in ends if self._is_control[id]}))

    def is_control(self, ids: np.ndarray) -> np.ndarray:
        return self._is_control[ids]

    def omitted_turns(self, messages: list[Message], tools: str | None) -> list[int]:
        """The numbers of the turns that the template doesn't write."""
        return self._template_control.frame(self.template.prepared(messages, tools), tools, False).omitted

    def encode_text(self, text: str) -> Encoding:
        """Encode rendered text; every string of a control token becomes one."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_prompt(
        self, messages: list[Message], tools: str | None = None, variables: str | None = None
    ) -> np.ndarray:
        """int32[n], the ids of the conversation so far, with its tools, template variables and the generation prompt."""
        return self.with_variables(variables).encode([messages], add_generation_prompt=True, tools=[tools])[0].ids

    def mismatched_tokens(self, vocabulary: dict[str, int]) -> list[str]:
        """The tokens of `vocabulary` that have another id, or none, in this tokenizer."""
        return [token for token, id in vocabulary.items() if self._tokenizer.id_to_token(id) != token]

    def has_token(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None

    def id_to_token(self, id: int) -> str | None:
        """The string of a token in the vocabulary; None if no token has this id."""
        return self._tokenizer.id_to_token(id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` without special tokens."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` with special tokens, for display."""
        return self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)

    def encode(
        self,
        conversations: Sequence[list[Message]],
        add_generation_prompt: bool = False,
        tools: Tools = (),
        trained: Sequence[np.ndarray] = (),
    ) -> list[Encoded]:
        """Render and encode conversations.

        Args:
            trained: for each conversation bool, which of its assistant turns are trained, so that their prompts have the tokens
                that the model gets; default all.
        Raises:
            OmittedTurn: the template omits turns.
            SnaketuneError: the template refuses a conversation, or omits its tools.
        """
        if not conversations:
            return []
        tools = list(tools) or [None] * len(conversations)
        conversations = [self.template.prepared(*row) for row in zip(conversations, tools, strict=True)]
        trained = list(trained) or [None] * len(conversations)
        texts, spans = self.template.render(conversations, add_generation_prompt, tools, trained)
        if not add_generation_prompt:
            for row in zip(conversations, texts, tools):
                self.template.check_prompt(*row)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        frames = [self._template_control.frame(*row, add_generation_prompt) for row in zip(conversations, tools)]
        for messages, own_tools, frame in zip(conversations, tools, frames):
            if not frame.writes_tools:
                raise tool_calls.tools_omitted([message["role"] for message in messages], own_tools)
        to_guard = []
        for number, (encoding, frame) in enumerate(zip(encodings, frames)):
            texts_of_row = chain(
                *map(tool_calls.message_texts, conversations[number]), tool_calls.texts_in(tools[number])
            )
            ids = np.array(encoding.ids, np.int32)
            if any(map(self.control.written_in, texts_of_row)) or not np.array_equal(
                ids[self.template_only[ids]], frame.ids
            ):
                to_guard.append(number)
        columns = ([column[number] for number in to_guard] for column in (conversations, texts, tools, trained))
        guarded = dict(zip(to_guard, self._guarded(*columns, add_generation_prompt), strict=True))
        for messages, frame in zip(conversations, frames):
            if frame.omitted:
                raise OmittedTurn(messages[frame.omitted[0]])
        encoded = []
        for number, (text, encoding, row_spans, frame) in enumerate(zip(texts, encodings, spans, frames, strict=True)):
            if number in guarded:
                ids, encoding, row_spans, apart = guarded[number]
            else:
                ends = self.template.prompt_ends(conversations[number], text, row_spans, trained[number])
                encoding, apart = self._boundaries.apart(text, encoding, ends)
                ids = np.array(encoding.ids, np.int32)
            row_spans = token_spans(encoding, row_spans, self._is_control[ids])
            encoded.append(Encoded(ids, row_spans, apart, self._ends(ids, frame)))
        return encoded

    def _ends(self, ids: np.ndarray, frame: ControlFrame) -> list[int | None]:
        control = np.flatnonzero(self.template_only[ids])
        # The counts differ only if the template writes other control tokens around other contents.
        if len(control) != len(frame.ids):
            return [None] * len(frame.ends)
        return [None if end is None else int(control[end]) + 1 for end in frame.ends]

    def _guarded(
        self,
        conversations: list[list[Message]],
        plain: list[str],
        tools: Tools,
        trained: Sequence[np.ndarray | None],
        add_generation_prompt: bool,
    ) -> Iterable[tuple[np.ndarray, Encoding, list[Span | None], list[int]]]:
        """Render and encode conversations (`plain`: rendered without guards) that contain strings of control tokens.

        Returns:
            For each, its ids, their encoding, the spans in its text, and the numbers of those that are encoded apart.
        """
        if not conversations:
            return ()
        lead, guard = unused_characters(plain, 2)
        texts, spans, prompt_ends = [], [], []
        for messages, expected, own_tools, own_trained in zip(conversations, plain, tools, trained, strict=True):
            if own_tools:
                # Templates look up keys of tools, which guards at the ends would change.
                inside = partial(self.control.guard_text, guard=guard, ends=False)
                own_tools = json.dumps(tool_calls.with_strings(json.loads(own_tools), inside), ensure_ascii=False)
            for ends in (True, False):
                guarded = self.control.guard(messages, guard, ends)
                (text,), (row_spans,) = self.template.render(
                    [guarded], add_generation_prompt, [own_tools], [own_trained]
                )
                if text.replace(guard, "") == expected:
                    break
            else:
                raise Refused(
                    "control_text",
                    "the chat template changes text that looks like a control token, so it can't be distinguished "
                    f"from one, in {expected[:200]!r}; drop such rows from the corpus or use another template",
                )
            texts.append(text)
            spans.append(row_spans)
            prompt_ends.append(self.template.prompt_ends(messages, text, row_spans, own_trained))
        return self.control.encode(texts, spans, prompt_ends, lead, guard)

    def _special_id(self, key: str) -> int:
        token = self.template.variables.get(key)
        id = self._tokenizer.token_to_id(token) if token is not None else None
        if id is None:
            raise SnaketuneError(
                f"tokenizer_config.json: {key} is {token!r}, which is no token of the tokenizer; set it to one of its tokens"
            )
        return id
