"""Conversations in the shapes of public data sets: read with their roles and order.

The shapes are those that the data sets' cards and the documentation of other trainers show; the texts are our own.
"""

import json

import pytest

from tests.corpus.row_spelling import (
    compact,
    read,
    sharegpt,
    turns,
    typed,
)

CHATS = {
    "open-orca": ({"system_prompt": "s", "question": "q", "response": "r", "id": "1"}, "S s|U q|A r"),
    "dolly-15k": (
        {"instruction": "q", "context": "c", "response": "r", "category": "qa"},
        "U q\n\nc|A r",
    ),
    "dolly-15k without context": ({"instruction": "q", "context": "", "response": "r", "category": "qa"}, "U q|A r"),
    "llamafactory alpaca": (
        {"instruction": "q", "input": "i", "output": "r", "system": "s", "history": [["a", "b"], ["c", "d"]]},
        "S s|U a|A b|U c|A d|U q\n\ni|A r",
    ),
    "swift query": ({"system": "s", "query": "q", "response": "r", "history": [["a", "b"]]}, "S s|U a|A b|U q|A r"),
    "history as messages": ({"prompt": "q", "response": "r", "history": turns("U a", "A b")}, "U a|A b|U q|A r"),
    "metamathqa": ({"query": "q", "response": "r", "type": "t", "original_question": "o"}, "U q|A r"),
    "magicoder": ({"lang": "python", "problem": "q", "solution": "r", "seed": "z"}, "U q|A r"),
    "aya": ({"inputs": "q", "targets": "r", "language": "sw"}, "U q|A r"),
    "capybara": (
        {"source": "z", "conversation": [{"input": "a", "output": "b"}, {"input": "q", "output": "r"}]},
        "U a|A b|U q|A r",
    ),
    "swift conversation": (
        {"system": "s", "conversation": [{"human": "a", "assistant": "b"}, {"human": "q", "assistant": "r"}]},
        "S s|U a|A b|U q|A r",
    ),
    "xtuner": (
        {"conversation": [{"system": "s", "input": "a", "output": "b"}, {"system": "", "input": "q", "output": "r"}]},
        "S s|U a|A b|U q|A r",
    ),
    "xtuner, system in each item": (
        {"conversation": [{"system": "s", "input": "a", "output": "b"}, {"system": "s", "input": "q", "output": "r"}]},
        "S s|U a|A b|U q|A r",
    ),
    "xtuner, an answer without loss": (
        {"conversation": [{"input": "a", "output": "b", "output_with_loss": False}, {"input": "q", "output": "r"}]},
        "U a|A b|U q|A r",
    ),
    "s1k": (
        {"question": "q", "solution": "r", "cot": None, "thinking_trajectories": ["t u"], "answer": "7"},
        "U q|A <think>\nt u\n</think>\n\nr",
    ),
    "nemotron post-training": (
        {"input": turns("U q"), "output": "r", "system_prompt": "detailed thinking off", "category": "chat"},
        "S detailed thinking off|U q|A r",
    ),
    "orca-agentinstruct": ({"messages": json.dumps(turns("S s", "U q", "A r"))}, "S s|U q|A r"),
    "conversations as json in a csv": ({"conversations": json.dumps(sharegpt("U q", "A r")), "id": "1"}, "U q|A r"),
    "bedrock": (
        {
            "system": [{"text": "s"}],
            "messages": [{"role": "user", "content": [{"text": "q"}]}, {"role": "assistant", "content": "r"}],
        },
        "S s|U q|A r",
    ),
    "llamafactory v1": ({"messages": typed("S s", "U q", "A r")}, "S s|U q|A r"),
    "parts with content": ({"messages": typed("U q", "A r", key="content")}, "U q|A r"),
    "openassistant-guanaco": ({"text": "### Human: a### Assistant: b### Human: q### Assistant: r"}, "U a|A b|U q|A r"),
    "chatml text": (
        {
            "text": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
        },
        "S s|U q|A r",
    ),
    "guanaco-llama2": ({"text": "<s>[INST] q [/INST] r </s>"}, "U q|A r"),
    "llama2 with system": ({"text": "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nq [/INST] r </s>"}, "S s|U q|A r"),
    "red-team-attempts": ({"transcript": "\n\nHuman: q\n\nAssistant: r", "rating": 1.0}, "U q|A r"),
    "conversation as a text": ({"conversation": "Human: q\n\nAssistant: r"}, "U q|A r"),
    "glaive-function-calling": (
        {
            "system": "s",
            "chat": "USER: q\n\n\nASSISTANT: f() <|endoftext|>\n\n\nFUNCTION RESPONSE: 5\n\n\nASSISTANT: r <|endoftext|>\n\n\n",
        },
        "S s|U q|A f()|T 5|A r",
    ),
    "glaive without functions": ({"chat": "USER: q\n\n\nASSISTANT: r <|endoftext|>\n\n\n"}, "U q|A r"),
    "openthoughts": ({"system": "s", "conversations": sharegpt("U q", "A r")}, "S s|U q|A r"),
    "prompt-response with a number of turns": ({"prompt": "q", "response": "r", "turns": 1}, "U q|A r"),
}


@pytest.mark.parametrize("raw, expected", CHATS.values(), ids=CHATS)
def test_conversations(raw, expected):
    assert compact(read(raw)[1].messages) == expected
