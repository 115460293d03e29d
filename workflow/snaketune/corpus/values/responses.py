"""The response to a prompt: a text or turns, the letter of a choice, or only tool calls; with the reasoning before it."""

from typing import TYPE_CHECKING

from snaketune.corpus.rows import Message
from snaketune.corpus.values import prompts
from snaketune.corpus.values.cells import plain_text
from snaketune.corpus.values.choices import letter_of
from snaketune.corpus.values.content import are_calls, column_of_calls
from snaketune.corpus.values.prompts import exchange, with_reasoning
from snaketune.corpus.values.schema import Column, Values

if TYPE_CHECKING:
    from snaketune.corpus.values.row_file import RowFile

CALLS = "answers ground_truth"
# The columns of a prompt and its response; `answer` after `solution`, whose checkable part it is.
EXCHANGE = (
    prompts.PROMPT,
    Column("response", "response completion output target targets solution answer answerKey"),
    Column("response", CALLS, holds=are_calls),
    *prompts.PARTS,
    *prompts.REASONING,
)


def response_of(values: Values, file: "RowFile") -> tuple[list[Message], list[Message], tuple[str, ...]]:
    """The turns of a prompt, those of its response, and notes."""
    response, name = values["response"], file.names["response"]
    if name in CALLS.split() and "response" not in file.stated:
        response = column_of_calls(response, name)
    elif "choices" in values:
        response = letter_of(values["choices"], response, (file.names["choices"], name), file.clues)
    if isinstance(response, bool) and (name == "answer" or "response" in file.stated):
        # The answer to a yes-or-no question.
        response = plain_text(response)
    prompt, (turns,), notes = exchange(values, {name: response}, file)
    return prompt, with_reasoning(turns, values["reasoning"]) if "reasoning" in values else turns, notes
