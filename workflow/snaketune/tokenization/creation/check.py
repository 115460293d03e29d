"""Checks of what a chat template supervises, before anything is trained.

The most common mistake of chat templates is an unsupervised end of turn, after which the model never stops generating; the
second is a marker around too much text. Both are errors here.

For chat templates of well-known models, TRL ships training templates: the same text, with {% generation %} markers. They are
files of the package `trl`, found without importing it (and torch with it). Some write more than the original (the reasoning of
earlier turns); whether one is used for a conversation is decided by comparing the two texts (`chat_template`).
"""

from importlib.metadata import PackageNotFoundError, files
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer, Encoded
from snaketune.tokenization.template import SHIPPED, Message, Refused, writes_date

# Of NAME_training.jinja, beside NAME.jinja.
SUFFIX = "_training.jinja"

QUESTIONS, ANSWERS = ("Quartz jumbles vex?", "Why nymph dwarf?"), ("Zebra flock.", "Boxing kumquat.")
CONVERSATION: list[Message] = [
    {"role": role, "content": content}
    for turns in zip(QUESTIONS, ANSWERS)
    for role, content in zip(("user", "assistant"), turns)
]
PROBES = (CONVERSATION[:2], CONVERSATION)
SHOWN_CHARACTERS = 160


def check(chat: ChatTokenizer, samples: list[list[Message]]) -> list[dict[str, Any]]:
    """Check the template on probes and samples; print and return what is supervised of the samples, shortened.

    Raises:
        SnaketuneError: an assistant turn isn't supervised, or not to its end; text of another role is supervised; the template
            writes the date.
    """
    if writes_date(chat.template.text):
        raise SnaketuneError(
            "the chat template writes today's date (strftime_now), so the same corpus would give other tokens "
            "tomorrow; set tokenizers.NAME.template_date to a fixed one, such as 2026-01-31"
        )
    for messages, encoded in zip(PROBES, chat.encode(PROBES), strict=True):
        texts = _supervised_texts(chat, messages, encoded)
        joined, turns = "".join(texts), len(messages) // 2
        answers = [words for words, span in zip(ANSWERS[:turns], encoded.spans) if span]
        if missing := [words for words in answers if words not in joined]:
            raise SnaketuneError(
                f"the chat template doesn't mark all that assistants say: of {missing[0]!r} only {texts} is supervised; put "
                "{% generation %} around the assistant's content and its end of turn"
                if chat.template.marked
                else f"the chat template changes what assistants say: only {texts} of {missing[0]!r} is supervised; use another"
            )
        if leaked := [words for words in QUESTIONS[:turns] if words in joined]:
            raise SnaketuneError(
                f"the chat template marks the user's words {leaked[0]!r} as generated; put {{% generation %}} around what "
                "the assistant says and nothing else"
            )
    shown = []
    for messages in samples:
        try:
            (encoded,) = chat.encode([messages])
        except Refused:
            # The `tokenize` stage decides whether such rows are an error.
            continue
        texts = [_shortened(text) for text in _supervised_texts(chat, messages, encoded)]
        supervised = int(encoded.mask([span for span in encoded.spans if span]).sum())
        shown.append({"tokens": len(encoded.ids), "supervised": supervised, "supervised_text": texts})
    return shown


def check_mistral_frame(chat: ChatTokenizer) -> None:
    """Check that a template of Mistral's fits the vocabulary, of which there are two kinds.

    sentencepiece   [INST] ▁Quartz ▁jum bles ▁vex ? [/INST]     the template's space is part of the first piece
    tekken          [INST] Quartz Ġjum bles Ġvex ? [/INST]      Mistral's models were trained without a space here

    Raises:
        SnaketuneError: the template writes a space too many or too few after [INST].
    """
    start, end = (chat.control.ids.get(name) for name in ("[INST]", "[/INST]"))
    ids = chat.encode(PROBES[:1])[0].ids.tolist()
    if start not in ids or end not in ids:
        return
    question = "".join(chat.id_to_token(id) or "" for id in ids[ids.index(start) + 1 : ids.index(end)])
    pre_tokenizer = chat.description["pre_tokenizer"] or {"pretokenizers": []}
    if any(step["type"] == "ByteLevel" for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])):
        kind, template, space, expected = "tekken", "mistral-tekken.jinja", "Ġ", 0
    else:
        kind, template, space, expected = "sentencepiece", "mistral.jinja", "▁", 1
    if (spaces := len(question) - len(question.lstrip(space))) != expected:
        raise SnaketuneError(
            "tokenizers.chat_template: the template is for another vocabulary of Mistral's: it puts "
            f"{spaces} spaces after [INST] ({question!r}), but models with the {kind} vocabulary were trained with {expected}; "
            f"name {SHIPPED}/{template}, or leave chat_template out to use the model's own"
        )


def _supervised_texts(chat: ChatTokenizer, messages: list[Message], encoded: Encoded) -> list[str]:
    """The text of each span; SnaketuneError if they aren't one per assistant turn, up to its end. The last turn has one;
    one before it that the template rewrites is the `tokenize` stage's matter."""
    turns = sum(message["role"] == "assistant" for message in messages)
    spans = [span for span in encoded.spans if span]
    if len(encoded.spans) != turns or not encoded.spans[-1] or any(start == end for start, end in spans):
        raise SnaketuneError(
            f"the chat template marks {len(encoded.spans)} generated blocks in a conversation with {turns} assistant "
            "turns; put one {% generation %} block in each, around its content and its end of turn"
        )
    for start, end in spans:
        if not chat.is_control(encoded.ids[end - 1]):
            ended = chat.text(encoded.ids[start:end])[-40:]
            raise SnaketuneError(
                "the end of turn isn't supervised, so the model would never stop: what the template marks ends with "
                f"{ended!r}, and its last token is no special token; end the {{% generation %}} block after the "
                "end-of-turn token, and use one that this tokenizer has as a special token"
                if chat.template.marked
                else "the end of turn isn't supervised, so the model would never stop: in the chat template no special token "
                f"of this tokenizer follows what an assistant says, {ended!r}; use a template that ends turns with one"
            )
    return [chat.text(encoded.ids[start:end]) for start, end in spans]


def _shortened(text: str) -> str:
    """The start and the end of a text, where mistakes of templates show."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def training_template(template: str) -> tuple[str, str] | None:
    """The name and the text of TRL's training template for a chat template; None if TRL has none for it.

    Two templates are the same up to spaces at their ends, which editors change.
    """
    try:
        shipped = {path.name: path for path in files("trl") or () if path.parent.name == "chat_templates"}
    except PackageNotFoundError:
        return None
    for name in sorted(shipped):
        original = name.replace(SUFFIX, ".jinja")
        if not name.endswith(SUFFIX) or original not in shipped:
            continue
        if shipped[original].read_text(encoding="utf-8").strip() == template.strip():
            return original.removesuffix(".jinja"), shipped[name].read_text(encoding="utf-8")
    return None
