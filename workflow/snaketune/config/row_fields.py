"""The `fields` of a source: which columns of its rows are what."""

from typing import Self

from pydantic import model_validator

from snaketune.config.base import Model

# The columns that make a row, by the layout whose rows they are.
MAPPINGS = {
    "prompt-response": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
    "rated": ("prompt", "answers", "ratings"),
    "votes": ("prompt", "answers", "verdict"),
    "unpaired": ("prompt", "response", "label"),
    "message-rows": ("conversation", "role", "content"),
}
# Keys that may name several columns.
LISTS = ("answers", "ratings", "choices")
# Keys that belong to a prompt, and those that belong to a response.
OF_PROMPT, OF_RESPONSE = ("history", "context", "context_before", "choices"), ("reasoning",)


class Fields(Model):
    """Column mapping for files in no known layout.

    A value is a column name, a path such as `metadata.tools` (also into JSON that a text holds), or a template over columns
    such as `"{Body} {Question}"`. A column that holds a list of texts is joined by line breaks.
    """

    messages: str | None = None
    """A whole conversation: a list of turns, numbered turns, or a list of texts that alternate between user and assistant."""
    history: str | None = None
    """Turns before the prompt: a list of turns, or of pairs of texts."""
    system: str | None = None
    """System turn."""
    prompt: str | None = None
    """User turn."""
    context: str | None = None
    """Context of the prompt, such as a document; it follows the prompt as a paragraph."""
    context_before: str | None = None
    """The same, before the prompt."""
    choices: tuple[str, ...] = ()
    """Choices of a question, listed after it with letters: a column with all of them, or a column for each. An answer or a
    response that is the index of one, from 0, becomes its letter."""
    reasoning: str | None = None
    """Reasoning before the response; it is written as `<think>…</think>`."""
    response: str | None = None
    """Assistant turn."""
    chosen: str | None = None
    """The better completion of a pair."""
    rejected: str | None = None
    """The worse completion of a pair."""
    answers: tuple[str, ...] = ()
    """Several answers to the prompt: their columns, or one column with a list of them."""
    ratings: tuple[str, ...] = ()
    """Ratings of the answers, in the same order, the higher the better: their columns, or one column with a list."""
    verdict: str | None = None
    """Which of two `answers` is better: 1 or 2, A or B, A>B; 0 or tie for neither."""
    label: str | None = None
    """Whether the response is good: true or false, 1 or 0, yes or no, good or bad."""
    conversation: str | None = None
    """For files with one message per row: the id of its conversation. Needs `role` and `content`."""
    order: str | None = None
    """Number or time by which the messages of a conversation are sorted. Default: their order in the file."""
    role: str | None = None
    """Speaker of the message, as in `speakers`."""
    content: str | None = None
    """Text of the message."""
    tools: str | None = None
    """Tools that the prompt offers, as JSON or as a list of functions; the chat template renders them."""
    template_variables: str | None = None
    """Variables of the chat template for the row, an object, also as JSON; they replace those of the source."""
    weight: str | None = None
    """Number from 0 to 100 that multiplies the loss of the row's turns."""
    answer: str | None = None
    """Checkable answer of the last assistant turn, for exact match."""
    task: str | None = None
    """Label by which exact match is grouped."""
    text: str | None = None
    """Document, for corpora of kind `text`. Default: the column `text`."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        named = {key for keys in MAPPINGS.values() for key in keys if getattr(self, key)}
        if named and named not in map(set, MAPPINGS.values()):
            mappings = "; ".join(map(", ".join, MAPPINGS.values()))
            raise ValueError(f"map one of: {mappings}; found {', '.join(sorted(named))}")
        if self.order and not self.conversation:
            raise ValueError("order sorts the messages of a conversation; map conversation, too, or remove order")
        if self.messages and named:
            raise ValueError(f"messages is a whole conversation; remove {min(named)}")
        for key in (*OF_PROMPT, *OF_RESPONSE):
            if getattr(self, key) and (self.messages or self.conversation):
                raise ValueError(f"{key} belongs to a prompt or its response; remove {key}, or map these")
            if getattr(self, key) and key in OF_RESPONSE and named and not self.response:
                raise ValueError(f"{key} belongs to a response, and these rows have none; remove {key}")
        return self
