r"""Chat templates baked into texts: recognised, and removed, so that none is applied twice.

    alpaca       ### Instruction:\n…\n\n### Input:\n…\n\n### Response:\n     with or without "Below is an instruction …"
    chatml       <|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n
    llama3       <|start_header_id|>user<|end_header_id|>\n\n…<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
    llama2       [INST] <<SYS>>\n…\n<</SYS>>\n\n… [/INST] … </s><s>[INST] … [/INST]
    vicuna       A chat between … USER: … ASSISTANT: …</s>USER: … ASSISTANT:
    human        ### Human: … ### Assistant:
    transcript   \n\nHuman: …\n\nAssistant:
    gemma        <start_of_turn>user\n…<end_of_turn>\n<start_of_turn>model\n
    tags         <|user|>\n…<|end|>\n<|assistant|>\n                            also with </s> or <|endoftext|>
    dialogue     User: …\nBot: …\nUser: …\nBot:                               also <user>: …, and without the open turn

A template counts only if it encloses the whole prompt, from its first tag to the open turn at the end: a text that mentions
`[INST]` isn't changed. A templated prompt that can't be split cleanly is refused, and so is any other text that begins with
tags like `<|…|>` and ends in one that opens the assistant's turn.
"""

import re
from typing import Any, NamedTuple

from snaketune.corpus.rows import Malformed, Message, Row
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.roles import ASSISTANTS_IN_MARKS, ROLES, TEMPLATE_ROLES


class Template(NamedTuple):
    """One template.

    Attributes:
        opens: the text before the first tag.
        marks: the tag before each turn; its group is the `speaker`.
        closes: the ends of a templated prompt, except for whitespace.
        turn_ends: strings that may follow a turn.
        strips: the characters around a turn that belong to the template.
        special: whether the tags aren't words, so that they don't occur by chance.
        plain: whether the tags are words of any dialogue: a prompt that isn't entirely one isn't changed.
    """

    name: str
    opens: re.Pattern[str]
    marks: re.Pattern[str]
    closes: tuple[str, ...]
    turn_ends: tuple[str, ...]
    strips: str | None = None
    special: bool = False
    plain: bool = False


CHAT_BETWEEN = r"\s*(?P<system>A chat between .*?(?=\bUSER:|### ?Human:))?"
# The space after a speaker's name belongs to the tag.
TRANSCRIPT = re.compile(r"(?:\A\s*|\n\n)(?P<speaker>Human|Assistant): ?")
TEMPLATES = (
    Template(
        "alpaca",
        re.compile(r"\s*(?:Below is an instruction that describes a task[^\n]*\n\s*)?(?=### Instruction:\s)"),
        re.compile(r"^### (?P<speaker>Instruction|Input|Response): ?", re.MULTILINE),
        ("\n### Response:",),
        ("</s>",),
        "\n",
    ),
    Template(
        "chatml",
        re.compile(r"\s*(?:<s>)?(?=<\|im_start\|>)"),
        re.compile(r"<\|im_start\|>(?P<speaker>\w+)\n?"),
        ("<|im_start|>assistant", "<|im_end|>"),
        ("<|im_end|>",),
        "",
        special=True,
    ),
    Template(
        "llama3",
        re.compile(r"\s*(?:<\|begin_of_text\|>)?\s*(?=<\|start_header_id\|>)"),
        re.compile(r"<\|start_header_id\|>(?P<speaker>\w+)<\|end_header_id\|>\n{0,2}"),
        ("<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        "",
        special=True,
    ),
    Template(
        "llama2",
        re.compile(r"\s*(?:<s>)?\s*(?=\[INST\])"),
        re.compile(r"\[(?P<speaker>INST|/INST)\]"),
        ("[/INST]",),
        ("<s>", "</s>"),
        special=True,
    ),
    Template(
        "vicuna",
        re.compile(CHAT_BETWEEN + "(?=USER:)", re.DOTALL),
        re.compile(r"(?:\A|(?<=\s)|(?<=</s>))(?P<speaker>USER|ASSISTANT):"),
        (" ASSISTANT:", "\nASSISTANT:", "</s>ASSISTANT:"),
        ("</s>",),
    ),
    Template(
        "human",
        re.compile(CHAT_BETWEEN + "(?=### ?Human:)", re.DOTALL),
        re.compile(r"### ?(?P<speaker>Human|Assistant):"),
        ("### Assistant:", "###Assistant:"),
        ("</s>",),
    ),
    Template("transcript", re.compile(r"\s*(?=Human:)"), TRANSCRIPT, ("\n\nAssistant:",), (), ""),
    Template(
        "gemma",
        re.compile(r"\s*(?:<bos>)?\s*(?=<start_of_turn>\w)"),
        re.compile(r"<start_of_turn>(?P<speaker>\w+)\n?"),
        ("<start_of_turn>model", "<end_of_turn>"),
        ("<end_of_turn>",),
        "",
        special=True,
    ),
    Template(
        "tags",
        re.compile(r"\s*(?:<s>|<bos>)?\s*(?=<\|(?:system|user|assistant)\|>)"),
        re.compile(r"<\|(?P<speaker>system|user|assistant)\|>\n?"),
        ("<|assistant|>", "<|end|>", "</s>", "<|endoftext|>"),
        ("<|end|>", "</s>", "<|endoftext|>"),
        "\n",
        special=True,
    ),
    Template(
        "dialogue",
        re.compile(r"\s*(?=(<)?(?:user|human)(?(1)>):)", re.IGNORECASE),
        re.compile(
            r"^(?P<angle><)?(?P<speaker>user|human|assistant|chatbot|bot|ai)(?(angle)>): ?",
            re.IGNORECASE | re.MULTILINE,
        ),
        ("",),
        ("</s>",),
        plain=True,
    ),
)
# Those of prompts that may be in a template.
FIRST_CHARACTERS = frozenset("\t\n\r BA#<[UHuh")
MAY_OPEN = re.compile(
    r"\s*(?:Below is an instr|### |A chat between |<?(?:[Uu]ser|USER|[Hh]uman|HUMAN)>?:|<s>|<bos>|<BOS_TOKEN>"
    r"|<start_of_turn>|<[|｜]|\[INST\]|\[gMASK\])"
)
SPECIAL_MARKS = re.compile(
    r"<\|im_(?:start|end)\|>|<\|(?:start_header|end_header|eot)_id\|>|\[/?INST\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>|<\|(?:system|user|assistant|end)\|>"
)
# Tags of unknown templates, and how they open the assistant's turn: by a tag that names it, or by its name after a tag.
# Some models write the bars as full-width ones.
UNKNOWN_OPENS = re.compile(r"\s*(?:<\w+>|\[gMASK\])*<[|｜][^|｜<>\s]{1,40}[|｜]>")
UNKNOWN_CLOSES = re.compile(
    rf"(?:<[|｜][^|｜<>\s]{{0,30}}(?:{ASSISTANTS_IN_MARKS})[^|｜<>\s]{{0,30}}[|｜]>|[|｜]>(?:{ASSISTANTS_IN_MARKS}))"
    r"(?:<[|｜]\w{1,40}[|｜]>\w*)*\s*\Z",
    re.IGNORECASE,
)
DATES = re.compile(r"\ACutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n+")
CLOSE_LENGTH = 200
SYSTEM_PART = re.compile(r"<<SYS>>\n?(.*?)<</SYS>>\s*", re.DOTALL)
ENDS_OF_TURN = ("</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<eos>")


def may_be_templated(prompt: str) -> bool:
    """Return True if `prompt` may be in a template, by its first characters; False for nearly all prompts."""
    return prompt[:1] in FIRST_CHARACTERS and MAY_OPEN.match(prompt) is not None


def strip_template(prompt: str, *, whole_prompt: bool = False) -> tuple[list[Message], str] | None:
    r"""Return the turns inside a templated prompt, and a note that names the template; None if it isn't templated.

    >>> strip_template("USER: Hi ASSISTANT:")
    ([{'role': 'user', 'content': 'Hi'}], 'unwrapped_vicuna_template')
    >>> strip_template("USER: is what my log says. Why?")

    Args:
        whole_prompt: whether there are no turns before the response but this prompt; then a dialogue in it is the
            conversation, else it is a text that the user quotes.
    """
    if not may_be_templated(prompt):
        return None
    for template in TEMPLATES:
        start = template.opens.match(prompt)
        if not start or (template.plain and not whole_prompt):
            continue
        if not prompt.rstrip().endswith(template.closes):
            speakers = (mark["speaker"].lower() for mark in template.marks.finditer(prompt))
            if template.special and any(TEMPLATE_ROLES.get(speaker) == "assistant" for speaker in speakers):
                what = f"the prompt begins with a {template.name} template and has text after it"
                raise Malformed("baked_in_template", what)
            continue
        turns = _turns(template, prompt, start)
        is_open = bool(turns) and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip()
        if is_open:
            turns.pop()
        clean = turns and turns[-1]["role"] == "user" and _is_clean(template, turns)
        if template.plain and not (clean and (is_open or _is_closed_dialogue(turns, prompt))):
            continue
        if not clean:
            what = f"the prompt is in a {template.name} template that can't be removed cleanly"
            raise Malformed("baked_in_template", what)
        return turns, f"unwrapped_{template.name}_template"
    if UNKNOWN_OPENS.match(prompt) and UNKNOWN_CLOSES.search(prompt.rstrip()[-CLOSE_LENGTH:]):
        raise Malformed("baked_in_template", "the prompt is in an unknown chat template")
    return None


def strip_templates(row: Row) -> None:
    """Remove templates from the user turns of a row, in place, and then end-of-turn strings from the answers.

    A template around the first turn may contain further turns. One around a later turn that does would repeat the
    conversation, and is refused.
    """
    for turn in row.opening:
        if turn["role"] == "user" and turn["content"][:1] in FIRST_CHARACTERS and may_be_templated(turn["content"]):
            break
    else:
        return
    if any(note.startswith("unwrapped_") for note in row.notes):
        return
    turns: list[Message] = []
    notes: list[str] = []
    for turn in row.opening:
        stripped = strip_template(turn["content"]) if turn["role"] == "user" else None
        if stripped is None:
            turns.append(turn)
            continue
        inner_turns, note = stripped
        if len(inner_turns) > 1 and any(earlier["role"] == "user" for earlier in turns):
            raise Malformed("baked_in_template", "a later turn of the user is in a chat template with several turns")
        turns += inner_turns
        notes.append(note)
    if notes:
        row.opening[:] = turns
        for column in row.columns:
            notes += strip_end_of_turns(getattr(row, column))
        row.notes += tuple(dict.fromkeys(notes))


def templated_conversation(text: str) -> list[Message] | None:
    """Return the turns of a text that is a whole conversation in a known template, or None."""
    for template in TEMPLATES if may_be_templated(text) else ():
        start = None if template.plain else template.opens.match(text)
        turns = _turns(template, text, start) if start else None
        if turns and turns[-1]["role"] == "assistant" and _is_clean(template, turns):
            return turns
    return None


def strip_end_of_turn(completion: str) -> str:
    """Remove the end-of-turn strings of a template from a completion.

    >>> strip_end_of_turn("Hello.<|im_end|>\\n")
    'Hello.'
    """
    text = completion
    while (stripped := text.rstrip()).endswith(ENDS_OF_TURN):
        text = stripped[: -len(next(end for end in ENDS_OF_TURN if stripped.endswith(end)))]
    return completion if text == completion else text.rstrip()


def strip_end_of_turns(turns: list[Message]) -> tuple[str, ...]:
    """Remove end-of-turn strings from the answers, in place; return a note if there were any."""
    notes: tuple[str, ...] = ()
    for i, turn in enumerate(turns):
        text = strip_end_of_turn(turn["content"]) if turn["role"] == "assistant" else turn["content"]
        if text != turn["content"]:
            turns[i], notes = {**turn, "content": text}, ("removed_end_of_turn",)
    return notes


def _turns(template: Template, text: str, start: re.Match[str]) -> list[Message] | None:
    """Return the turns between the tags; None if a speaker is unknown or an input doesn't follow an instruction."""
    turns: list[Message] = []
    if system_text := start.groupdict().get("system"):
        turns.append({"role": "system", "content": system_text.strip()})
    before = ""
    for speaker, content in split_at_marks(text, template.marks.finditer(text))[1]:
        role, is_input = TEMPLATE_ROLES.get(speaker.lower()), speaker.lower() == "input" and before == "Instruction"
        before = speaker
        content = content.strip(template.strips)
        for end in template.turn_ends:
            if content.rstrip().endswith(end):
                content = content.rstrip().removesuffix(end).strip(template.strips)
        if is_input:
            turns[-1]["content"] += f"\n\n{content}" if content.strip() else ""
            continue
        if role is None:
            return None
        if template.name == "llama2" and role == "user" and (system := SYSTEM_PART.match(content)):
            turns.append({"role": "system", "content": system[1].strip()})
            content = content[system.end() :]
        if template.name == "llama3" and role == "system":
            # Llama 3.1's template writes these lines by itself.
            content = DATES.sub("", content)
            if not content.strip():
                continue
        turns.append({"role": role, "content": content})
    return turns


def _is_closed_dialogue(turns: list[Message], prompt: str) -> bool:
    """Return True if the user's last turn is in one line; several lines may be about a dialogue."""
    # `user: alice`, in lower case, is often a line of YAML.
    return len(turns) > 2 and "\n" not in turns[-1]["content"].strip() and not prompt.lstrip()[:1].islower()


def _is_clean(template: Template, turns: list[Message]) -> bool:
    """Return True if the turns alternate, all have text, and no tag of a template is left in any."""
    after_system = turns[1:] if turns[0]["role"] == "system" else turns
    return (
        all(turn["role"] == ("user", "assistant")[number % 2] for number, turn in enumerate(after_system))
        and all(turn["content"].strip() for turn in turns)
        and not any(template.special and SPECIAL_MARKS.search(turn["content"]) for turn in turns)
    )


def split_at_marks(text: str, marks: Any) -> tuple[str, list[tuple[str, str]]]:
    r"""Return the text before the first tag, and then each speaker with their text, unchanged.

    >>> split_at_marks("\n\nHuman: Hi\n\nAssistant:  Hello", TRANSCRIPT.finditer("\n\nHuman: Hi\n\nAssistant:  Hello"))
    ('', [('Human', 'Hi'), ('Assistant', ' Hello')])
    """
    marks = list(marks)
    ends = [mark.start() for mark in marks] + [len(text)]
    return text[: ends[0]], [(mark["speaker"], text[mark.end() : end]) for mark, end in zip(marks, ends[1:])]


def is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def transcript_turns(text: Any, where: str) -> list[Message]:
    r"""Return the turns of a conversation between Human and Assistant.

    >>> transcript_turns("\n\nHuman: Hi\n\nAssistant: Hello", "chosen")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str):
        raise wrong_type(where, text)
    before, tagged_texts = split_at_marks(text, TRANSCRIPT.finditer(text))
    if before.strip() or not tagged_texts:
        raise Malformed("not_a_transcript", f"{where} doesn't begin with Human: or Assistant:")
    return [{"role": ROLES[speaker.lower()], "content": content} for speaker, content in tagged_texts]
