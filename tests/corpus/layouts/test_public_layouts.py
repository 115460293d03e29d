"""Rows in the shapes of public data sets: read with their roles, order and preference, or refused in plain words.

The shapes are those that the data sets' cards and the documentation of other trainers show; the texts are our own.
"""

import json

import pytest

from snaketune.corpus.rows import Dropped, Malformed
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, read, read_all, reasons, spelled, turns

SHAREGPT = {"human": "U", "gpt": "A", "system": "S"}


def said(*spelled_turns):
    """The same as `turns`, in ShareGPT's names."""
    names = {short: name for name, short in SHAREGPT.items()}
    return [{"from": names[turn[0]], "value": turn[2:]} for turn in spelled_turns]


def typed(*spelled_turns, key="value"):
    """The same as `turns`, as typed parts."""
    return [turn | {"content": [{"type": "text", key: turn["content"]}]} for turn in turns(*spelled_turns)]


MORE = ("U a", "A b", "U c")
PAIRS = {
    "llamafactory dpo_en_demo": {
        "conversations": said(*MORE),
        "chosen": {"from": "gpt", "value": "x"},
        "rejected": {"from": "gpt", "value": "y"},
    },
    "light-r1 dpo": {"conversations": said(*MORE), "chosen": said("A x")[0], "rejected": said("A y")[0]},
    "conversations with texts": {"conversations": said(*MORE), "chosen": "x", "rejected": "y"},
    "conversations with lists": {"conversations": said(*MORE), "chosen": turns("A x"), "rejected": said("A y")},
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
    "ultrainteract_pair": {"trajectory": said(*MORE), "chosen": "x", "rejected": "y", "parent_id": "1", "id": "2"},
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
        "conversations": said(*MORE),
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
        "conversations": [turn | {"role": None, "content": None} for turn in said(*MORE)],
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
        "conversations": said("U c"),
        "system": "s",
        "chosen": said("A x")[0],
        "rejected": said("A y")[0],
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
    assert (spelled(row.prompt), spelled(row.chosen), spelled(row.rejected)) == ("U a|A b|U c", "A x", "A y")


@pytest.mark.parametrize("raw", ONE_QUESTION.values(), ids=ONE_QUESTION)
def test_preferences_with_a_system_text(raw):
    row = read(raw, PREFERENCES)[1]
    assert (spelled(row.prompt), spelled(row.chosen), spelled(row.rejected)) == ("S s|U c", "A x", "A y")


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
    "nemotron post-training": (
        {"input": turns("U q"), "output": "r", "system_prompt": "detailed thinking off", "category": "chat"},
        "S detailed thinking off|U q|A r",
    ),
    "orca-agentinstruct": ({"messages": json.dumps(turns("S s", "U q", "A r"))}, "S s|U q|A r"),
    "conversations as json in a csv": ({"conversations": json.dumps(said("U q", "A r")), "id": "1"}, "U q|A r"),
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
    "openthoughts": ({"system": "s", "conversations": said("U q", "A r")}, "S s|U q|A r"),
    "prompt-response with a number of turns": ({"prompt": "q", "response": "r", "turns": 1}, "U q|A r"),
}


@pytest.mark.parametrize("raw, expected", CHATS.values(), ids=CHATS)
def test_conversations(raw, expected):
    assert spelled(read(raw)[1].messages) == expected


KTO = {
    "kto-mix-14k": lambda text, good: {"prompt": turns("U q"), "completion": turns(f"A {text}"), "label": good},
    "llamafactory kto_en_demo": lambda text, good: {"messages": turns("U q", f"A {text}"), "label": good},
    "sharegpt": lambda text, good: {"conversations": said("U q", f"A {text}"), "label": good},
    "sharegpt as numbers": lambda text, good: {"conversations": said("U q", f"A {text}"), "label": int(good)},
    "messages as words": lambda text, good: {"messages": turns("U q", f"A {text}"), "label": str(good).lower()},
    "llamafactory alpaca": lambda text, good: {"instruction": "q", "input": "", "output": text, "kto_tag": good},
    "axolotl chatml.argilla": lambda text, good: {"instruction": "q", "completion": text, "label": good},
    "axolotl chatml.intel": lambda text, good: {"question": "q", "completion": text, "label": good},
    "question and answer": lambda text, good: {"question": "q", "answer": text, "label": good},
    "in typed parts": lambda text, good: {"messages": typed("U q", f"A {text}"), "label": good},
}


@pytest.mark.parametrize("spell", KTO.values(), ids=KTO)
def test_labels_of_single_completions(spell):
    raws = [spell("x", True), spell("y", False)]
    made = read_all(raws, PREFERENCES)
    assert reasons(made) == ["row", "part"]
    row = made[0].row
    assert (spelled(row.prompt), spelled(row.chosen), spelled(row.rejected)) == ("U q", "A x", "A y")
    # A bad completion is never taken for something to learn.
    assert reasons(read_all(raws, CONVERSATIONS)) == ["wrong_kind"] * 2


def test_the_last_turn_of_a_labelled_conversation_is_what_is_labelled():
    raws = [
        {"system": "s", "messages": turns("U a", "A b", "U q", "A y"), "label": 0},
        {"system": "s", "messages": turns("U a", "A b", "U q", "A x"), "label": 1},
        {"system": "s", "messages": turns("U a", "A other", "U q", "A z"), "label": 0},
        {"system": "s", "messages": turns("U a", "A b", "U q"), "label": 1},
    ]
    made = read_all(raws, PREFERENCES)
    assert reasons(made) == ["part", "row", "unpaired", "ends_on_user"]
    row = made[1].row
    assert (spelled(row.prompt), spelled(row.chosen), spelled(row.rejected)) == ("S s|U a|A b|U q", "A x", "A y")


@pytest.mark.parametrize("system", ["system", "system_prompt", "who"])
def test_completions_under_another_system_text_are_no_pair(system):
    raws = [
        {"prompt": "q", "completion": "x", "label": True, system: "be brief"},
        {"prompt": "q", "completion": "y", "label": False, system: "be long"},
        {"prompt": "q", "completion": "z", "label": False, system: "be brief"},
    ]
    made = read_all(raws, PREFERENCES, **({"system": "who"} if system == "who" else {}))
    assert reasons(made) == ["row", "unpaired", "part"]
    assert (spelled(made[0].row.prompt), spelled(made[0].row.rejected)) == ("S be brief|U q", "A z")


def test_completions_under_other_tools_are_no_pair():
    def row(text, name):
        tools = [{"name": name, "parameters": {}}]
        return {
            "prompt": "q",
            "completion": text,
            "label": text == "x",
            "tools": tools if text != "z" else str(json.dumps(tools)),
        }

    made = read_all([row("x", "f"), row("y", "g"), row("z", "f")], PREFERENCES)
    assert reasons(made) == ["row", "unpaired", "part"]
    assert made[0].row.tools == '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'


def test_weights_make_no_other_prompt():
    raws = [{"messages": turns("U q", "A b", "U c", f"A {text}"), "label": text == "x"} for text in "xy"]
    raws[1]["messages"][1] |= {"weight": 0}
    assert reasons(read_all(raws, PREFERENCES)) == ["row", "part"]


def compared(verdict, column="label", names=("response_A", "response_B")):
    return {"question": "q", names[0]: "x", names[1]: "y", column: verdict}


NAMES = [
    ("response_A", "response_B"),
    ("response_a", "response_b"),
    ("answer_a", "answer_b"),
    ("output_1", "output_2"),
    ("responseA", "responseB"),
    ("assistant_a", "assistant_b"),
    ("completion1", "completion2"),
]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    "verdict, first",
    [
        ("A>B", True),
        ("A>>B", True),
        ("B>A", False),
        ("B>>A", False),
        ("A<B", False),
        ("A<<B", False),
        (" a > b ", True),
        ("[[A]]", True),
        ("[[B]]", False),
        ("[[A>>B]]", True),
        ("[[B>A]]", False),
        ("assistant_b", False),
    ],
)
def test_verdicts(names, verdict, first):
    row = read(compared(verdict, names=names), PREFERENCES)[1]
    assert (spelled(row.chosen), spelled(row.rejected)) == (("A x", "A y") if first else ("A y", "A x"))


@pytest.mark.parametrize("verdict", ["A=B", "A==B", "[[A=B]]", "[[C]]", "tie", "both_bad", "Tie (both bad)"])
def test_verdicts_that_are_ties(verdict):
    with pytest.raises(Dropped, match="tie"):
        read(compared(verdict), PREFERENCES)


@pytest.mark.parametrize("verdict", ["A>C", "C", ">", "A>B>A", "B A", "[[A", "A>B?"])
def test_verdicts_that_are_none(verdict):
    with pytest.raises(Malformed, match="unknown_vote"):
        read(compared(verdict), PREFERENCES)


@pytest.mark.parametrize("column", ["preference_strength", "overall_preference"])
def test_strength_of_a_preference(column):
    for strength in (-3, -1, -0.5, "-2"):
        assert spelled(read(compared(strength, column), PREFERENCES)[1].chosen) == "A x"
    for strength in (3, 1, 2.0, "1"):
        assert spelled(read(compared(strength, column), PREFERENCES)[1].chosen) == "A y"
    with pytest.raises(Dropped, match="tie"):
        read(compared(0, column), PREFERENCES)
    for strength in ("much", True, float("nan")):
        with pytest.raises(Malformed, match="unknown_vote"):
            read(compared(strength, column), PREFERENCES)


def test_answers_that_are_counted_from_zero():
    names = ("response_0", "response_1")
    assert spelled(read(compared(0, names=names), PREFERENCES)[1].chosen) == "A x"
    assert spelled(read(compared(1, "better_response_id", names), PREFERENCES)[1].chosen) == "A y"
    with pytest.raises(Malformed, match="unknown_vote"):
        read(compared(2, names=names), PREFERENCES)


def test_verdicts_that_may_count_from_zero_are_refused():
    # 0 for the first and 1 for the second, or 0 for a tie and 1 for the first: nothing in the file tells.
    zero_or_one = [compared(0), compared(1), compared(0)]
    with pytest.raises(Malformed, match=r"ambiguous_votes: label .* 0 and 1.*never 2.*write A, B or tie"):
        read_all(zero_or_one, PREFERENCES)
    assert reasons(read_all([*zero_or_one, compared(2)], PREFERENCES)) == ["tie", "row", "tie", "row"]
    assert reasons(read_all([compared(0), compared("A")], PREFERENCES)) == ["tie", "row"]


REFUSED = {
    "lima": ({"conversations": ["q", "r"], "source": "z"}, CONVERSATIONS, "wrong_type", "turn 1 holds str"),
    "mt-bench questions": ({"question_id": 1, "turns": ["q", "q2"]}, CONVERSATIONS, "wrong_type", "turn 1"),
    "nectar": (
        {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": [{"answer": "x", "rank": 1.0}], "turns": 1},
        PREFERENCES,
        "unknown_layout",
        "prompt, answers, turns",
    ),
    "ultrafeedback": (
        {"instruction": "q", "completions": [{"response": "x", "overall_score": 8.0}], "models": ["m"]},
        PREFERENCES,
        "unknown_layout",
        "instruction",
    ),
    "math-shepherd": ({"prompt": "q", "completions": ["x"], "labels": [True]}, PREFERENCES, "unknown_layout", "prompt"),
    "shp": (
        {"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": 1},
        PREFERENCES,
        "unknown_layout",
        "human_ref_A",
    ),
    "gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "r"}]}]},
        CONVERSATIONS,
        "unknown_layout",
        "contents",
    ),
    "anthropic tool results": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "5"}]}, *turns("A r")]},
        CONVERSATIONS,
        "unsupported_part",
        "tool_result",
    ),
    "columns of lists": ({"conversations": {"from": ["human"], "value": ["q"]}}, CONVERSATIONS, "wrong_type", "dict"),
    "several rows as columns": ({"prompt": ["q"], "response": ["r"]}, CONVERSATIONS, "wrong_type", "turn 1 holds str"),
    "rows by id": ({"0": {"prompt": "q", "response": "r"}}, CONVERSATIONS, "unknown_layout", "0"),
    "pandas' spelling": (
        {"prompt": "q", "chosen": str(turns("U q", "A x")), "rejected": str(turns("U q", "A y"))},
        PREFERENCES,
        "turns_as_text",
        "chosen .*JSON",
    ),
    "pandas' spelling of a prompt": (
        {"prompt": str(turns("U q")), "completion": str(turns("A x"))},
        CONVERSATIONS,
        "turns_as_text",
        "completion .*JSON",
    ),
    "history as a text": (
        {"prompt": "q", "response": "r", "history": "User: a\nBot: b"},
        CONVERSATIONS,
        "wrong_type",
        "history",
    ),
    "letters of the better one": (
        {"prompt": "q", "response_a": "x", "response_b": "y", "chosen": "a", "rejected": "b"},
        PREFERENCES,
        "verdicts_as_completions",
        "chosen",
    ),
    "names of the better one": (
        {"prompt": "q", "response_1": "x", "response_2": "y", "chosen": "response_1", "rejected": "response_2"},
        PREFERENCES,
        "verdicts_as_completions",
        "chosen",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, *turns("A r")]},
        CONVERSATIONS,
        "unsupported_part",
        "image",
    ),
    "labelled conversation without an answer": (
        {"messages": turns("U q"), "label": True},
        PREFERENCES,
        "no_assistant_turn|ends_on_user",
        "",
    ),
}


@pytest.mark.parametrize("raw, kind, reason, says", REFUSED.values(), ids=REFUSED)
def test_refused(raw, kind, reason, says):
    with pytest.raises(Malformed, match=f"^({reason}).*: .*{says}"):
        read(raw, kind)
