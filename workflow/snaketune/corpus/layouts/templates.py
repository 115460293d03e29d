r"""Chat templates that prompts may contain, and the patterns of their tags.

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

Any other text that begins with tags like `<|…|>` and ends in one that opens the assistant's turn is refused.
"""

import re
from typing import NamedTuple

from snaketune.corpus.layouts.roles import ASSISTANTS_IN_MARKS
from snaketune.corpus.layouts.transcripts import TRANSCRIPT


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
    Template(
        "transcript",
        re.compile(r"\s*(?=Human:)"),
        TRANSCRIPT,
        ("\n\nAssistant:",),
        (),
        "",
    ),
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
CLOSE_LENGTH = 200
SYSTEM_PART = re.compile(r"<<SYS>>\n?(.*?)<</SYS>>\s*", re.DOTALL)
ENDS_OF_TURN = ("</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<eos>")


def may_be_templated(prompt: str) -> bool:
    """Return True if `prompt` may be in a template, by its first characters; False for nearly all prompts."""
    return prompt[:1] in "\t\n\r BA#<[UHuh" and MAY_OPEN.match(prompt) is not None


def is_unknown_template(prompt: str) -> bool:
    """Return True if `prompt` looks like it is in a template that isn't among these."""
    return (
        UNKNOWN_OPENS.match(prompt) is not None and UNKNOWN_CLOSES.search(prompt.rstrip()[-CLOSE_LENGTH:]) is not None
    )


def strip_end_of_turn(completion: str) -> str:
    """Remove the end-of-turn strings of a template from a completion.

    >>> strip_end_of_turn("Hello.<|im_end|>\\n")
    'Hello.'
    """
    text = completion
    while (stripped := text.rstrip()).endswith(ENDS_OF_TURN):
        text = stripped[: -len(next(end for end in ENDS_OF_TURN if stripped.endswith(end)))]
    return completion if text == completion else text.rstrip()
