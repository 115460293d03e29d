"""What is learned, looked at before anybody trains on it.

The commonest mistake of a chat template is that the end of turn isn't among what is learned; the model then never stops.
The next is a marker around too much. Both stop the build here.
"""

from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer, Rendered
from snaketune.tokenization.template import Message

QUESTIONS, ANSWERS = ("Quartz jumbles vex?", "Why nymph dwarf?"), ("Zebra flock.", "Boxing kumquat.")
PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": ANSWERS[0]}],
    [
        {"role": role, "content": content}
        for question, answer in zip(QUESTIONS, ANSWERS)
        for role, content in (("user", question), ("assistant", answer))
    ],
)
SHOWN_CHARACTERS = 160


def check(chat: ChatTokenizer, samples: list[list[Message]]) -> list[dict[str, Any]]:
    """Check the template on probes and samples, and print what is learned of the samples.

    Returns:
        Of each sample the supervised texts, shortened.
    Raises:
        SnaketuneError: an assistant turn that isn't learned, or not to its end; something learned that others said; a
            template that writes the date.
    """
    if "strftime_now" in chat.template:
        raise SnaketuneError(
            "the chat template writes today's date (strftime_now), so that the same corpus would give other tokens "
            "tomorrow; put a fixed date there, in a copy that `chat_template` names"
        )
    for messages, rendered in zip(PROBES, chat.render(PROBES), strict=True):
        _check_spans(chat, messages, rendered)
        learned = _learned(chat, rendered)
        together = "".join(learned)
        said = {who: [turn["content"] for turn in messages if turn["role"] == who] for who in ("user", "assistant")}
        if missing := [words for words in said["assistant"] if words not in together]:
            raise SnaketuneError(
                f"the chat template doesn't mark all that assistants say: of {missing[0]!r} only {learned} is learned; put "
                "{% generation %} around the assistant's content and its end of turn"
                if chat.marked
                else f"the chat template changes what assistants say: of {missing[0]!r}, {learned} is learned; use another"
            )
        if leaked := [words for words in said["user"] if words in together]:
            raise SnaketuneError(
                f"the chat template marks the user's words {leaked[0]!r} as generated; put {{% generation %}} around what "
                "the assistant says and nothing else"
            )
    shown = []
    for messages, rendered in zip(samples, chat.render(samples), strict=True):
        _check_spans(chat, messages, rendered)
        learned = [_shortened(text) for text in _learned(chat, rendered)]
        shown.append(
            {
                "tokens": len(rendered.ids),
                "supervised": int(rendered.supervised(rendered.spans).sum()),
                "learned": learned,
            }
        )
        print(f"what is learned of a conversation of {len(rendered.ids)} tokens: {learned}", flush=True)
    return shown


def _check_spans(chat: ChatTokenizer, messages: list[Message], rendered: Rendered) -> None:
    turns = sum(message["role"] == "assistant" for message in messages)
    if len(rendered.spans) != turns or any(start == end for start, end in rendered.spans):
        raise SnaketuneError(
            f"the chat template marks {len(rendered.spans)} generated blocks in a conversation with {turns} assistant "
            "turns; put one {% generation %} block in each, around its content and its end of turn"
        )
    for start, end in rendered.spans:
        if not chat.is_control(rendered.ids[end - 1]):
            ended = chat.text(rendered.ids[start:end])[-40:]
            raise SnaketuneError(
                f"the end of turn isn't learned, so the model would never stop: what the template marks ends with {ended!r}, "
                "and its last token is no special token; end the {% generation %} block behind the end-of-turn token, and "
                "use one that this tokenizer has as a special token"
                if chat.marked
                else "the end of turn isn't learned, so the model would never stop: in the chat template no special token "
                f"of this tokenizer follows what an assistant says, {ended!r}; use a template that ends turns with one"
            )


def _learned(chat: ChatTokenizer, rendered: Rendered) -> list[str]:
    return [chat.text(rendered.ids[start:end]) for start, end in rendered.spans]


def _shortened(text: str) -> str:
    """The start and the end, which is where templates go wrong."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
