"""Preference pairs in the shapes of public data sets: read with their roles, order and preference.

The shapes are those that the data sets' cards and the documentation of other trainers show; the texts are our own.
"""

import json

import pytest

from tests.corpus.row_spelling import (
    PREFERENCES,
    compact,
    read,
    sharegpt,
    turns,
    typed,
)

MORE = ("U a", "A b", "U c")
PAIRS = {
    "llamafactory dpo_en_demo": {
        "conversations": sharegpt(*MORE),
        "chosen": {"from": "gpt", "value": "x"},
        "rejected": {"from": "gpt", "value": "y"},
    },
    "light-r1 dpo": {"conversations": sharegpt(*MORE), "chosen": sharegpt("A x")[0], "rejected": sharegpt("A y")[0]},
    "conversations with texts": {"conversations": sharegpt(*MORE), "chosen": "x", "rejected": "y"},
    "conversations with lists": {"conversations": sharegpt(*MORE), "chosen": turns("A x"), "rejected": sharegpt("A y")},
    "axolotl chat_template.default": {
        "messages": turns(*MORE),
        "chosen": {"role": "assistant", "content": "x"},
        "rejected": {"role": "assistant", "content": "y"},
    },
    "openai cookbook": {"messages": turns(*MORE), "chosen": turns("A x"), "rejected": turns("A y")},
    "openai preference": {
        "input": {"messages": turns(*MORE), "tools": [], "parallel_tool_calls": True},
        "preferred_output": turns("A x"),
        "non_preferred_output": turns("A y"),
    },
    "llamafactory v1": {
        "chosen_messages": typed(*MORE, "A x"),
        "rejected_messages": typed(*MORE, "A y"),
    },
    "swift messages with rejected_response": {"messages": turns(*MORE, "A x"), "rejected_response": "y"},
    "swift messages with rejected_messages": {
        "messages": turns(*MORE, "A x"),
        "rejected_messages": turns(*MORE, "A y"),
    },
    "ultrainteract_pair": {"trajectory": sharegpt(*MORE), "chosen": "x", "rejected": "y", "parent_id": "1", "id": "2"},
    "ultrafeedback_binarized": {
        "prompt": "a",
        "prompt_id": "7",
        "chosen": turns(*MORE, "A x"),
        "rejected": turns(*MORE, "A y"),
        "messages": turns(*MORE, "A x"),
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
    "orpo-dpo-mix-40k": {
        "source": "s",
        "chosen": turns(*MORE, "A x"),
        "rejected": turns(*MORE, "A y"),
        "prompt": "c",
        "question": "something else",
    },
    "trl implicit prompt": {"chosen": turns(*MORE, "A x"), "rejected": turns(*MORE, "A y"), "score_chosen": 1.0},
    "trl explicit prompt": {"prompt": turns(*MORE), "chosen": turns("A x"), "rejected": turns("A y")},
    "messages of the chosen beside both": {
        "messages": turns(*MORE, "A x"),
        "chosen": turns(*MORE, "A x"),
        "rejected": turns(*MORE, "A y"),
    },
    "llamafactory alpaca with history": {
        "instruction": "c",
        "input": "",
        "history": [["a", "b"]],
        "chosen": "x",
        "rejected": "y",
    },
    "prompt with the conversation beside it": {
        "prompt": "c",
        "conversations": sharegpt(*MORE),
        "chosen": "x",
        "rejected": "y",
    },
    "hh-rlhf": {
        "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: x",
        "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: y",
    },
    "rm-static": {
        "prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        "response": " x",
        "chosen": " x",
        "rejected": " y",
    },
    "csv with turns as json": {
        "prompt": json.dumps(turns(*MORE)),
        "chosen": json.dumps(turns("A x")),
        "rejected": json.dumps(turns("A y")),
    },
    "csv with whole conversations as json": {
        "prompt": "c",
        "chosen": json.dumps(turns(*MORE, "A x")),
        "rejected": json.dumps(turns(*MORE, "A y")),
    },
    "helpsteer3": {
        "context": turns(*MORE),
        "response1": "y",
        "response2": "x",
        "overall_preference": 2,
        "individual_preference": [{"score": 2, "reasoning": "r"}],
        "domain": "general",
    },
    "chatbot_arena_conversations": {
        "question_id": "1",
        "model_a": "m",
        "model_b": "n",
        "winner": "model_b",
        "judge": "j",
        "conversation_a": turns(*MORE, "A y"),
        "conversation_b": turns(*MORE, "A x"),
        "turn": 2,
    },
    "arena with typed parts": {
        "conversation_a": typed(*MORE, "A x", key="text"),
        "conversation_b": typed(*MORE, "A y", key="text"),
        "winner": "model_a",
    },
    "parquet structs with nulls": {
        "conversations": [turn | {"role": None, "content": None} for turn in sharegpt(*MORE)],
        "chosen": {"from": "gpt", "value": "x", "content": None, "role": None},
        "rejected": {"from": "gpt", "value": "y", "content": None, "role": None},
        "messages": None,
    },
}
ONE_QUESTION = {
    "orca_dpo_pairs": {"system": "s", "question": "c", "chosen": "x", "rejected": "y"},
    "distilabel-intel-orca": {
        "system": "s",
        "input": "c",
        "chosen": "x",
        "rejected": "y",
        "generations": ["x", "y"],
        "rating": [9.0, 2.0],
    },
    "axolotl chatml.argilla": {"system": "s", "instruction": "c", "chosen_response": "x", "rejected_response": "y"},
    "axolotl chatml.ultra": {
        "system": "s",
        "prompt": "c",
        "chosen": turns("U c", "A x"),
        "rejected": turns("U c", "A y"),
    },
    "llamafactory with system": {
        "conversations": sharegpt("U c"),
        "system": "s",
        "chosen": sharegpt("A x")[0],
        "rejected": sharegpt("A y")[0],
    },
    "system as typed parts": {"system": [{"type": "text", "text": "s"}], "prompt": "c", "chosen": "x", "rejected": "y"},
    "system_prompt": {"system_prompt": "s", "prompt": "c", "chosen": "x", "rejected": "y"},
    "stack-exchange-paired": {
        "system": "s",
        "qid": 1,
        "question": "c",
        "date": "2020",
        "metadata": ["url"],
        "response_j": "x",
        "response_k": "y",
    },
    "query with response pairs": {"system": "s", "query": "c", "chosen": "x", "rejected": "y"},
    "accepted and rejected": {"system": "s", "input": "c", "accepted": "x", "rejected": "y", "ID": 1},
    "judgebench": {"system": "s", "question": "c", "response_A": "x", "response_B": "y", "label": "A>B", "source": "z"},
    "helpsteer2 preference": {
        "system": "s",
        "prompt": "c",
        "response_1": "x",
        "response_2": "y",
        "preference_strength": -2,
        "preference_statement": "t",
    },
    "pku-saferlhf": {
        "system": "s",
        "prompt": "c",
        "response_0": "x",
        "response_1": "y",
        "better_response_id": 0,
        "safer_response_id": 1,
    },
}


@pytest.mark.parametrize("raw", PAIRS.values(), ids=PAIRS)
def test_preferences_over_several_turns(raw):
    row = read(raw, PREFERENCES)[1]
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == ("U a|A b|U c", "A x", "A y")


@pytest.mark.parametrize("raw", ONE_QUESTION.values(), ids=ONE_QUESTION)
def test_preferences_with_a_system_text(raw):
    row = read(raw, PREFERENCES)[1]
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == ("S s|U c", "A x", "A y")
