r"""Prompts that come with a chat template baked in, and the turns inside them.

A model's own template goes around every prompt later, so one that is there already has to come off. It counts only if
it frames the whole prompt, from its first mark to the open turn at the end: a text that mentions `[INST]` stays as it
is. A framed prompt that can't be taken apart cleanly is refused, never templated twice.

    alpaca       ### Instruction:\n…\n\n### Input:\n…\n\n### Response:\n     with or without "Below is an instruction …"
    chatml       <|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n
    llama3       <|start_header_id|>user<|end_header_id|>\n\n…<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
    llama2       [INST] <<SYS>>\n…\n<</SYS>>\n\n… [/INST] … </s><s>[INST] … [/INST]
    vicuna       A chat between … USER: … ASSISTANT: …</s>USER: … ASSISTANT:
    human        ### Human: … ### Assistant:
    transcript   \n\nHuman: …\n\nAssistant:
    gemma        <start_of_turn>user\n…<end_of_turn>\n<start_of_turn>model\n
    tags         <|user|>\n…<|end|>\n<|assistant|>\n                            also with </s> or <|endoftext|>

Any other text that begins with marks like `<|…|>` and ends in one that opens the assistant's turn is refused.
"""

import re
from typing import NamedTuple

from snaketune.corpus.rows import Malformed, Message


class Template(NamedTuple):
    """One template.

    Attributes:
        opens: what stands before the first mark.
        marks: what stands before each turn; the speaker is its one group.
        closes: what a prompt ends on, but for space.
        turn_ends: what may stand after a turn.
        strips: the characters around a turn that belong to the template.
        special: whether the marks are no words, so that nobody writes them by chance.
    """

    name: str
    opens: re.Pattern[str]
    marks: re.Pattern[str]
    closes: tuple[str, ...]
    turn_ends: tuple[str, ...]
    strips: str | None = None
    special: bool = False


SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "instruction": "user",
    "input": "input",
    "assistant": "assistant",
    "model": "assistant",
    "response": "assistant",
    "inst": "user",
    "/inst": "assistant",
}
CHAT_BETWEEN = r"\s*(?P<system>A chat between .*?(?=\bUSER:|### ?Human:))?"
TEMPLATES = (
    Template(
        "alpaca",
        re.compile(r"\s*(?:Below is an instruction that describes a task[^\n]*\n\s*)?(?=### Instruction:\s)"),
        re.compile(r"^### (Instruction|Input|Response): ?", re.MULTILINE),
        ("\n### Response:",),
        ("</s>",),
        "\n",
    ),
    Template(
        "chatml",
        re.compile(r"\s*(?:<s>)?(?=<\|im_start\|>)"),
        re.compile(r"<\|im_start\|>(\w+)\n?"),
        ("<|im_start|>assistant", "<|im_end|>"),
        ("<|im_end|>",),
        "",
        special=True,
    ),
    Template(
        "llama3",
        re.compile(r"\s*(?:<\|begin_of_text\|>)?\s*(?=<\|start_header_id\|>)"),
        re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n{0,2}"),
        ("<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        "",
        special=True,
    ),
    Template(
        "llama2",
        re.compile(r"\s*(?:<s>)?\s*(?=\[INST\])"),
        re.compile(r"\[(INST|/INST)\]"),
        ("[/INST]",),
        ("<s>", "</s>"),
        special=True,
    ),
    Template(
        "vicuna",
        re.compile(CHAT_BETWEEN + "(?=USER:)", re.DOTALL),
        re.compile(r"(?:\A|(?<=\s)|(?<=</s>))(USER|ASSISTANT):"),
        (" ASSISTANT:", "\nASSISTANT:", "</s>ASSISTANT:"),
        ("</s>",),
    ),
    Template(
        "human",
        re.compile(CHAT_BETWEEN + "(?=### ?Human:)", re.DOTALL),
        re.compile(r"### ?(Human|Assistant):"),
        ("### Assistant:", "###Assistant:"),
        ("</s>",),
    ),
    Template(
        "transcript",
        re.compile(r"\s*(?=Human:)"),
        re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?"),
        ("\n\nAssistant:",),
        (),
        "",
    ),
    Template(
        "gemma",
        re.compile(r"\s*(?:<bos>)?\s*(?=<start_of_turn>\w)"),
        re.compile(r"<start_of_turn>(\w+)\n?"),
        ("<start_of_turn>model", "<end_of_turn>"),
        ("<end_of_turn>",),
        "",
        special=True,
    ),
    Template(
        "tags",
        re.compile(r"\s*(?:<s>|<bos>)?\s*(?=<\|(?:system|user|assistant)\|>)"),
        re.compile(r"<\|(system|user|assistant)\|>\n?"),
        ("<|assistant|>", "<|end|>", "</s>", "<|endoftext|>"),
        ("<|end|>", "</s>", "<|endoftext|>"),
        "\n",
        special=True,
    ),
)
MAY_OPEN = re.compile(
    r"\s*(?:Below is an instr|### |A chat between |USER:|Human:|<s>|<bos>|<BOS_TOKEN>|<start_of_turn>|<[|｜]"
    r"|\[INST\]|\[gMASK\])"
)
SPECIAL_MARKS = re.compile(
    r"<\|im_(?:start|end)\|>|<\|(?:start_header|end_header|eot)_id\|>|\[/?INST\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>|<\|(?:system|user|assistant|end)\|>"
)
# Marks of templates that aren't known here, and how they open the assistant's turn: by a mark that names it, or by its
# name after a mark. Some models write the bars of theirs as full-width ones.
UNKNOWN_OPENS = re.compile(r"\s*(?:<\w+>|\[gMASK\])*<[|｜][^|｜<>\s]{1,40}[|｜]>")
ASSISTANT = r"(?:assistant|chatbot|model|gpt|bot)"
UNKNOWN_CLOSES = re.compile(
    rf"(?:<[|｜][^|｜<>\s]{{0,30}}{ASSISTANT}[^|｜<>\s]{{0,30}}[|｜]>|[|｜]>{ASSISTANT})"
    r"(?:<[|｜]\w{1,40}[|｜]>\w*)*\s*\Z",
    re.IGNORECASE,
)
LONGEST_CLOSE = 200
SYSTEM_PART = re.compile(r"<<SYS>>\n?(.*?)<</SYS>>\s*", re.DOTALL)
ENDS_OF_TURN = ("</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<eos>")


def may_be_framed(prompt: str) -> bool:
    """Whether a template may be around `prompt`, told by its first characters: of nearly all prompts, that none is."""
    return prompt[:1] in "\t\n\r BA#<[UH" and MAY_OPEN.match(prompt) is not None


def unwrapped(prompt: str) -> tuple[list[Message], str] | None:
    r"""The turns inside a prompt with a template around it, and a note that names the template; None without one.

    >>> unwrapped("USER: Hi ASSISTANT:")
    ([{'role': 'user', 'content': 'Hi'}], 'unwrapped_vicuna_template')
    >>> unwrapped("USER: is what my log says. Why?")

    Raises:
        Malformed: a template frames the prompt, and it can't be taken off cleanly.
    """
    if not may_be_framed(prompt):
        return None
    for template in TEMPLATES:
        opening = template.opens.match(prompt)
        if not opening:
            continue
        if not prompt.rstrip().endswith(template.closes):
            if template.special and any(
                SPEAKERS.get(mark[1].lower()) == "assistant" for mark in template.marks.finditer(prompt)
            ):
                raise Malformed(
                    "baked_in_template", f"the prompt begins with a {template.name} template and goes on after it"
                )
            continue
        turns = _turns(template, prompt, opening)
        if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
            turns.pop()
        if not turns or turns[-1]["role"] != "user" or not _is_clean(template, turns):
            raise Malformed("baked_in_template", f"a {template.name} template frames the prompt and can't be taken off")
        return turns, f"unwrapped_{template.name}_template"
    if UNKNOWN_OPENS.match(prompt) and UNKNOWN_CLOSES.search(prompt.rstrip()[-LONGEST_CLOSE:]):
        raise Malformed("baked_in_template", "a template that isn't known here frames the prompt")
    return None


def conversation_in(text: str) -> list[Message] | None:
    """The turns of a text that is a whole conversation in one of the templates, or None."""
    if not may_be_framed(text):
        return None
    for template in TEMPLATES:
        opening = template.opens.match(text)
        turns = _turns(template, text, opening) if opening else None
        if turns and turns[-1]["role"] == "assistant" and _is_clean(template, turns):
            return turns
    return None


def without_end(completion: str) -> str:
    """A completion without the end-of-turn strings of a template.

    >>> without_end("Hello.<|im_end|>\\n")
    'Hello.'
    """
    bare = completion
    while (stripped := bare.rstrip()).endswith(ENDS_OF_TURN):
        bare = stripped[: -len(next(end for end in ENDS_OF_TURN if stripped.endswith(end)))]
    return completion if bare == completion else bare.rstrip()


def _turns(template: Template, text: str, opening: re.Match[str]) -> list[Message] | None:
    """What stands between the marks; None where a speaker is unknown or an input doesn't follow an instruction."""
    turns: list[Message] = []
    if said := opening.groupdict().get("system"):
        turns.append({"role": "system", "content": said.strip()})
    _, *parts = template.marks.split(text)
    before = ""
    for speaker, content in zip(parts[::2], parts[1::2]):
        role = SPEAKERS.get(speaker.lower())
        content = _bare(template, content)
        if role is None or (role == "input" and before != "Instruction"):
            return None
        before = speaker
        if role == "input":
            turns[-1]["content"] += f"\n\n{content}" if content.strip() else ""
            continue
        if template.name == "llama2" and role == "user" and (system := SYSTEM_PART.match(content)):
            turns.append({"role": "system", "content": system[1].strip()})
            content = content[system.end() :]
        turns.append({"role": role, "content": content})
    return turns


def _bare(template: Template, content: str) -> str:
    content = content.strip(template.strips)
    for end in template.turn_ends:
        if content.rstrip().endswith(end):
            content = content.rstrip().removesuffix(end).strip(template.strips)
    return content


def _is_clean(template: Template, turns: list[Message]) -> bool:
    """Whether the turns alternate, each says something, and no mark is left in any."""
    spoken = turns[1:] if turns[0]["role"] == "system" else turns
    return (
        all(turn["role"] == ("user", "assistant")[number % 2] for number, turn in enumerate(spoken))
        and all(turn["content"].strip() for turn in turns)
        and not any(template.special and SPECIAL_MARKS.search(turn["content"]) for turn in turns)
    )
