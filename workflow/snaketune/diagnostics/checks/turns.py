"""Checks of the turns in training rows: what precedes an answer, what is supervised of it, and how the model ends it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from snaketune.diagnostics.checks import sequences
from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.engine.packing.rows import PackedRows
from snaketune.tokenization.chat import ChatTokenizer

PROMPTS, SUPERVISED, END_OF_TURN = "trained prompt = generate's", "supervised = answer", "end of turn learned"
OF_PROMPTS = "share of answers whose prompt, by the saved template, isn't what precedes them in the rows"
OF_SUPERVISED = "share of supervised spans that don't decode to an assistant's turn"
OF_ENDS = "median probability of the end of turn after held-out answers"
# A model that has learned to end its turns gives most answers' ends more than half.
LEAST_PROBABILITY = 0.1


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation of the corpus, and its sequences in the training's rows; of a pair, with the chosen completion."""

    id: str
    messages: list[dict[str, Any]]
    tools: str | None
    variables: str | None
    sequences: Sequence[sequences.Sequence]

    @cached_property
    def answers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [answer for sequence in self.sequences for answer in sequence.answers()]

    def prompts(self, chat: ChatTokenizer) -> Iterator[np.ndarray]:
        """Yield what the model is given before each of the assistant's turns."""
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant":
                yield chat.encode_prompt(self.messages[:number], self.tools, self.variables)


def conversations_in(
    rows: PackedRows, numbers: list[int], documents: list[dict[str, Any]], corpus: list[dict[str, Any]]
) -> list[Conversation]:
    """The conversations, or pairs, of some rows. Without those that were truncated or split: their ids occur twice, or they
    fill a row.

    Args:
        documents: of all rows, in their order.
        corpus: rows of the corpus, at least those of the conversations.
    """
    by_id = {row["id"]: row for row in corpus}
    times: dict[str, int] = {}
    for document in documents:
        times[document["id"]] = times.get(document["id"], 0) + 1
    found = []
    for number in numbers:
        of_row = [document for document in documents if document["row"] == number]
        row = rows[number]
        is_pairs = "completions" in row
        parts = [[chosen] for chosen in sequences.completions_of(row)[::2]] if is_pairs else sequences.documents_of(row)
        for document, own in zip(of_row, parts, strict=True):
            length = max(len(sequence.ids) for sequence in own)
            source = by_id.get(document["id"])
            if source is None or times[document["id"]] > 1 or length >= rows.row_length:
                continue
            messages = source["messages"] if "messages" in source else source["prompt"] + _completion(source)
            conversation = Conversation(
                id=document["id"],
                messages=[{key: turn[key] for key in ("role", "content")} for turn in messages],
                tools=source.get("tools"),
                variables=source.get("template_variables"),
                sequences=own,
            )
            found.append(conversation)
    return found


def _completion(source: dict[str, Any]) -> list[dict[str, Any]]:
    return source["chosen"] if "chosen" in source else source["completion"]


def prompts_are_those_of_generate(chat: ChatTokenizer, conversations: list[Conversation]) -> Check:
    """Compare the tokens before each supervised answer with the prompt that the saved tokenizer and template write there."""
    wrong, checked = [], 0
    for conversation in conversations:
        prompts = [tuple(prompt.tolist()) for prompt in conversation.prompts(chat)]
        for before, _ in conversation.answers:
            checked += 1
            if not any(_follows(chat, before, prompt) for prompt in prompts):
                wrong.append((conversation.id, chat.text(before[-16:])))
    if not checked:
        return not_checked(PROMPTS, OF_PROMPTS, "there is no answer in the rows, or each is cut off")
    reason = f"first in {wrong[0][0]}, where … {wrong[0][1]!r} precedes it" if wrong else ""
    return judged(PROMPTS, f"{OF_PROMPTS}, of {checked}", len(wrong) / checked, 0.0, reason=reason)


def _follows(chat: ChatTokenizer, before: np.ndarray, prompt: tuple[int, ...]) -> bool:
    """Whether the tokens are a prompt, and nothing else but the empty reasoning that the template writes."""
    rest = before[len(prompt) :]
    if tuple(before[: len(prompt)].tolist()) != prompt:
        return False
    return not len(rest) or chat.text(rest) == chat.template.empty_block


def supervised_is_the_answer(chat: ChatTokenizer, conversations: list[Conversation]) -> Check:
    """Compare what each supervised span decodes to with the assistant's turns; of reasoning and calls, the content in it."""
    wrong, checked = [], 0
    for conversation in conversations:
        messages = chat.template.prepared(conversation.messages, conversation.tools)
        turns = [turn for turn in messages if turn["role"] == "assistant"]
        for _, answer in conversation.answers:
            checked += 1
            if not any(_says(chat, answer, turn) for turn in turns):
                wrong.append((conversation.id, chat.decode(answer)))
    if not checked:
        return not_checked(SUPERVISED, OF_SUPERVISED, "there is no answer in the rows, or each is cut off")
    reason = f"first in {wrong[0][0]}: {wrong[0][1][:80]!r}" if wrong else ""
    return judged(SUPERVISED, f"{OF_SUPERVISED}, of {checked}", len(wrong) / checked, 0.0, reason=reason)


def _says(chat: ChatTokenizer, answer: np.ndarray, turn: dict[str, Any]) -> bool:
    text, content = chat.decode(answer).strip(), (turn.get("content") or "").strip()
    # As the tokenizer's normalization leaves it.
    normalized = chat.decode(chat.encode_text(content).ids).strip()
    if turn.keys() - {"role", "content"}:
        # Reasoning and calls, which templates write in their own form.
        return content in text or normalized in text
    return text in (content, normalized)


@torch.no_grad()
def end_of_turn_is_learned(
    model: torch.nn.Module, stop_ids: Sequence[int], documents: list[sequences.Sequence]
) -> Check:
    """The probability of the token that ends each supervised answer. Args: documents: held-out sequences."""
    model.eval()
    probabilities: list[float] = []
    for document in documents:
        stops = np.isin(document.ids[document.targets], stop_ids)
        if stops.any():
            losses_N = sequences.token_losses(model, document)
            probabilities += torch.exp(-losses_N)[torch.from_numpy(stops).to(losses_N.device)].tolist()
    if not documents:
        return not_checked(END_OF_TURN, OF_ENDS, "no row is held out")
    if not probabilities:
        reason = "no supervised answer ends with a token that ends generation"
        return judged(END_OF_TURN, OF_ENDS, 0.0, LEAST_PROBABILITY, at_least=True, reason=reason)
    figure = float(np.median(probabilities))
    compares = f"{OF_ENDS}, of {len(probabilities)}"
    return judged(END_OF_TURN, compares, figure, LEAST_PROBABILITY, at_least=True)
