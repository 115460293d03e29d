"""Inputs that are easily read wrongly: each is read right, or refused; what a message says to paste gives the right rows."""

import io
import json
import re
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from snaketune.errors import SnaketuneError
from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, compact, sharegpt, turns

QUESTIONS, ANSWERS = ("Name a tree", "Which river?", "Say two words"), ("Larch.", "Po", "Yes, no!")
PLAIN = [f"U {question}|A {answer}" for question, answer in zip(QUESTIONS, ANSWERS)]
TWO_EXCHANGES = [row + (f"|{PLAIN[number - 1]}" if number else "") for number, row in enumerate(PLAIN)]
# By the system text.
TWICE = {(): TWO_EXCHANGES, ("Be brief.",): [f"S Be brief.|{row}" for row in TWO_EXCHANGES]}
SOUND = {"messages": turns("U one", "A two")}
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
METALS = ["wool", "zinc", "clay", "felt"]
LISTED = "U Metal?\n\nA. wool\nB. zinc\nC. clay\nD. felt|A B"
CALL = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call>'
REPAIR, ENTRY = re.compile(r"`corpora\.<name>\.repair: \[(.*?)\]`"), re.compile(r"^- .*(?:\n  .*)*", re.MULTILINE)


class Case(NamedTuple):
    """Rows or the bytes of a file, and the rows that are read, or what the message of the refusal says."""

    content: Any
    expected: list[str] | str
    kind: str = CONVERSATIONS
    suffix: str = ".jsonl"


def framed(prompt: str, answer: str = "{}") -> list[dict[str, str]]:
    return [
        {"prompt": prompt.replace("{}", question), "response": answer.replace("{}", text)}
        for question, text in zip(QUESTIONS, ANSWERS)
    ]


def whole(user: str, assistant: str, start: str, system: str = "") -> list[dict[str, str]]:
    """Conversations of one and two exchanges, each in one text."""
    exchanges = [user.replace("{}", q) + assistant.replace("{}", a) for q, a in zip(QUESTIONS, ANSWERS)]
    texts = [text + (exchanges[number - 1] if number else "") for number, text in enumerate(exchanges)]
    return [{"id": f"r{number}", "text": start + text} for number, text in enumerate(texts)]


def under(system: str) -> list[str]:
    return [f"S {system}|{row}" for row in PLAIN]


def called(**keys: Any) -> dict[str, Any]:
    call = {"function": {"name": "tide"} | keys}
    asked = [
        *turns("U Tide?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *turns("T 4", "A It is 4."),
    ]
    return {"messages": asked}


def parquet(**columns: pa.Array) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


WHOLE = {
    "chatml": ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n", ""),
    "llama 2": ("<s>[INST] {} [/INST]", " {} </s>", ""),
    "llama 3": (
        f"{HEADER.format('user')}{{}}<|eot_id|>",
        f"{HEADER.format('assistant')}{{}}<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "headings": ("### Human: {}", "### Assistant: {}", ""),
    "headings and lines": ("### Human: {}\n", "### Assistant: {}\n\n", ""),
    "words": ("USER: {} ", "ASSISTANT: {}</s>", "Be brief. ", "Be brief."),
    "gemma": ("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n", "<bos>"),
    "phi": ("<|user|>\n{}<|end|>\n", "<|assistant|>\n{}<|end|>\n", ""),
    "zephyr": ("<|user|>\n{}</s>\n", "<|assistant|>\n{}</s>\n", "<|system|>\nBe brief.</s>\n", "Be brief."),
}
MINE = {"role": "assistant", "reasoning_content": "Mine."}
MAP = pa.list_(pa.map_(pa.string(), pa.string()))
CASES: dict[str, Case] = {
    # Marks of chat templates in the texts.
    "extra_id": Case(
        framed("<extra_id_0>System\nBe brief.\n<extra_id_1>User\n{}\n<extra_id_1>Assistant\n", "{}\n<extra_id_1>"),
        under("Be brief."),
    ),
    "headings": Case(framed("### User:\n{}\n\n### Assistant:\n"), PLAIN),
    "headings with a system text": Case(
        framed("### System:\nBe brief.\n\n### User:\n{}\n\n### Assistant:\n"), under("Be brief.")
    ),
    "rounds": Case(framed("[Round 1]\n\n问：{}\n\n答："), PLAIN),
    "bars on one side": Case(framed("<|turn>user\n{}<turn|>\n<|turn>model\n", "{}<turn|>"), PLAIN),
    "opened reasoning": Case(
        framed("<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜><think>\n", "so\n</think>\n\n{}"),
        [row.replace("|A ", "|A <think>\nso\n</think>\n\n") for row in PLAIN],
    ),
    "a system text before words": Case(framed("Be brief.\n\nUSER: {} ASSISTANT:", " {}"), under("Be brief.")),
    "earlier answers that end with a mark": Case(
        [
            {"prompt": f"USER: {q} ASSISTANT: {a}</s>USER: {a}? ASSISTANT:", "response": f" {q}"}
            for q, a in zip(QUESTIONS, ANSWERS)
        ],
        [f"U {q}|A {a}|U {a}?|A {q}" for q, a in zip(QUESTIONS, ANSWERS)],
    ),
    "three words": Case(framed("SYSTEM: Be brief.\nUSER: {}\nASSISTANT:", " {}"), under("Be brief.")),
    "dates of the template": Case(
        framed(
            f"<|begin_of_text|>{HEADER.format('system')}Cutting Knowledge Date: June 2024\nToday Date: 1 May 2026\n\n<|eot_id|>"
            f"{HEADER.format('user')}{{}}<|eot_id|>{HEADER.format('assistant')}"
        ),
        PLAIN,
    ),
    "ends of turns": Case(
        [{"messages": turns(f"U {q}", "A So.</s>", f"U {q} 2", f"A {a}</s>")} for q, a in zip(QUESTIONS, ANSWERS)],
        [f"U {q}|A So.|U {q} 2|A {a}" for q, a in zip(QUESTIONS, ANSWERS)],
    ),
    "an end of turn beside an instruction": Case(
        [{"instruction": q, "input": "", "output": f"{a}<|im_end|>"} for q, a in zip(QUESTIONS, ANSWERS)], PLAIN
    ),
    "begin and end": Case(framed("<s>{}</s>", "{}</s>"), PLAIN),
    "a dialogue with calls": Case(
        [
            {"system": "SYSTEM: Be brief.", "chat": f"USER: {q}\n\n\nASSISTANT: f() <|endoftext|>\n\n\n"
             f"FUNCTION RESPONSE: 5\n\n\nASSISTANT: {a} <|endoftext|>\n\n\n"}
            for q, a in zip(QUESTIONS, ANSWERS)
        ],
        [f"S Be brief.|U {q}|A f()|T 5|A {a}" for q, a in zip(QUESTIONS, ANSWERS)],
    ),
    **{
        f"whole conversations, {name}": Case(whole(*marks), TWICE[marks[3:]]) for name, marks in WHOLE.items()
    },
    # Objects around rows.
    "a context around": Case(
        json.dumps({"title": "Pier", "context": "It is long.", "qa": [{"question": "Long?", "answer": "Yes."}]}).encode(),
        ["U Long?\n\nIt is long.|A Yes."],
        suffix=".json",
    ),
    "a system text around": Case(
        json.dumps({"system": "Be brief.", "data": [{"prompt": "Hue?", "response": "Red"}]}).encode(),
        ["S Be brief.|U Hue?|A Red"],
        suffix=".json",
    ),
    "splits": Case(
        json.dumps({"train": [{"prompt": "q", "response": "r"}], "test": [{"prompt": "s", "response": "t"}]}).encode(),
        ["U q|A r"],
        suffix=".json",
    ),
    "objects one after the other": Case(
        b'{"prompt": "q",\n "response": "r"}\n{"prompt": "s",\n "response": "t"}', ["U q|A r", "U s|A t"], suffix=".json"
    ),
    "a key twice": Case(b'{"prompt": "q", "response": "r", "response": "s"}\n', "duplicate_key"),
    # The index of a choice.
    "choices as JSON": Case([{"question": "Metal?", "choices": json.dumps(METALS), "answer": 1}], [LISTED]),
    "choices with labels": Case(
        [{"question": "Metal?", "choices": {"text": METALS, "label": [*"ABCD"]}, "answer": 1.0}], [LISTED]
    ),
    "choices as columns": Case([{"question": "Metal?", **dict(zip("ABCD", METALS)), "answer": 1}], [LISTED]),
    "an index as text": Case([{"question": "Metal?", "choices": METALS, "answer": "1"}], [LISTED]),
    "an index in CSV": Case(b"question,A,B,C,D,answer\nMetal?,wool,zinc,clay,felt,1\n", [LISTED], suffix=".csv"),
    "choices as objects": Case(
        [{"question": "Metal?", "options": [{"label": a, "text": b} for a, b in zip("ABCD", METALS)], "answer": 1}], [LISTED]
    ),
    "choices as an object": Case([{"question": "Metal?", "options": dict(zip("ABCD", METALS)), "answer": 1}], [LISTED]),
    "an index as label": Case(
        [{"question": "Metal?", "choices": METALS, "answer": 1, "solution": "Zinc: B"}],
        [LISTED.replace("|A B", "|A Zinc: B = B")],
    ),
    "an index as label of an instruction": Case(
        [{"instruction": "Metal?", "options": METALS, "answer": 1, "output": "Zinc: B"}],
        [LISTED.replace("|A B", "|A Zinc: B = B")],
    ),
    # Calls and reasoning.
    "arguments encoded twice": Case(
        [called(arguments=json.dumps(json.dumps({"port": "Brest"})))], [f"U Tide?|A {CALL}|T 4|A It is 4."]
    ),
    "arguments in a list": Case([SOUND, called(arguments="[1]")], "bad_tool_call"),
    "arguments that are null": Case([SOUND, called(arguments="null")], "bad_tool_call"),
    "a text beside a function's response": Case(
        [{"contents": [
            {"role": "user", "parts": [{"text": "Tide?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "tide", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "tide", "response": {"m": 4}}}, {"text": "In feet!"}]},
            {"role": "model", "parts": [{"text": "13."}]},
        ]}],
        "turn_out_of_order",
    ),
    "reasoning beside a call": Case(
        [{"messages": [
            *turns("U Tide?"),
            {"role": "tool_call", "content": '{"name": "tide", "arguments": {"port": "Brest"}}', "reasoning_content": "Ask."},
            *turns("T 4", "A 4."),
        ]}],
        [f"U Tide?|A <think>\nAsk.\n</think>\n\n{CALL}|T 4|A 4."],
    ),
    "empty reasoning in the text": Case(
        [{"messages": [*turns("U q"), MINE | {"content": "<think>\n\n</think>\n\nyes"}]}],
        ["U q|A <think>\nMine.\n</think>\n\nyes"],
    ),
    "other reasoning in the text": Case(
        [{"messages": [*turns("U q"), MINE | {"content": "<think>So.</think>yes"}]}],
        "reasoning_differs",
    ),
    "reasoning that is only closed": Case(
        [{"messages": turns("U 1 + 1?", "A One more.\n</think>\n\n2")}],
        ["U 1 + 1?|A <think>\nOne more.\n</think>\n\n2"],
    ),
    "reasoning that is only opened": Case([{"messages": turns("U 1 + 1?", "A <think>\nLet me")}], "reasoning_not_closed"),
    # CSV.
    "a wrong quote": Case(
        b'prompt,response\nq,r\n"He wrote "no" there\nand on","s"\n', "the record is taken to end on line 4", suffix=".csv"
    ),
    "a damaged record among others": Case(
        b"prompt,response\n" + b"q,r\n" * 200 + b'"He wrote "no" there\nand on","s"\nt,u\n',
        ["U q|A r", "U t|A u"],
        suffix=".csv",
    ),
    "another encoding": Case(
        "prompt,response\nWie heißt er?,Müller\n".encode("cp1252"), "not_utf8.*encoding: cp1252", suffix=".csv"
    ),
    "a repeated header": Case(
        b"prompt,response\nq,r\nprompt,response\ns,t\n", ["U q|A r", "U s|A t"], suffix=".csv"
    ),
    "rows without text": Case(b"prompt,response\nq,r\n,\n,\n", ["U q|A r"], suffix=".csv"),
    "a line that names the delimiter": Case(b"sep=;\nprompt;response\nq;r\ns;t\n", ["U q|A r", "U s|A t"], suffix=".csv"),
    # Values of other columns.
    "indexes as completions": Case(
        [{"prompt": "q", "responses": ["x", "y", "z"], "chosen": 0, "rejected": 2}], "verdicts_as_completions", PREFERENCES
    ),
    "numbers of completions": Case(
        [{"prompt": "q", "response_1": "x", "response_2": "y", "chosen": 2, "rejected": 1}],
        "the columns don't decide the layout|verdicts_as_completions",
        PREFERENCES,
    ),
    "earlier utterances as context": Case(
        [{"context": ["Hi", "Hello!"], "prompt": "q", "response": "r"}],
        "unread_context.* passages or earlier turns"
    ),
    "several answers": Case([{"question": "q", "answer": ["one", "1"]}], "choose one, or write a row for each"),
    "several rejected": Case(
        [{"prompt": "q", "chosen": "x", "rejected": ["y", "z"]}], "choose one, or write a row for each", PREFERENCES
    ),
    "columns of lists": Case(
        json.dumps({"prompt": ["q", "s"], "response": ["r", "t"]}).encode(), "wrong_type", suffix=".json"
    ),
    "prompt and answer": Case([{"prompt": "q", "answer": "r", "system": "Be brief."}], ["S Be brief.|U q|A r"]),
    "a conversation in a template": Case(
        [{"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"}],
        "no layout .* reads these columns: text"
    ),
    # Turns that a repair makes valid, or that say nothing.
    "two turns of the user": Case([SOUND, {"messages": turns("U a", "U b", "A c")}], ["U one|A two", "U a\n\nb|A c"]),
    "an empty answer": Case(
        [{"conversations": sharegpt("U a", "A ", "U b", "A c")}], ["U a\n\nb|A c"]
    ),
    "an empty system turn": Case([{"conversations": sharegpt("S ", "U a", "A b")}], ["U a|A b"]),
    "a system turn that is null": Case(
        [{"messages": [{"role": "system", "content": None}, *turns("U a", "A b")]}], ["U a|A b"]
    ),
    # Tables.
    "messages as maps": Case(
        parquet(messages=pa.array([[[("role", "user"), ("content", "q")], [("role", "assistant"), ("content", "r")]]], MAP)),
        ["U q|A r"],
        suffix=".parquet",
    ),
    "bytes": Case(parquet(prompt=pa.array([b"q"]), response=pa.array([b"r"])), ["U q|A r"], suffix=".parquet"),
}  # fmt: skip


def spelled(row: dict[str, Any]) -> str:
    columns = [column for column in ("messages", "prompt", "chosen", "rejected") if column in row]
    answer = f" = {row['answer']}" if row["answer"] else ""
    return " / ".join(compact(row[column]) for column in columns) + answer


@pytest.mark.parametrize("name", CASES)
def test_an_input_is_read_right_or_refused_with_what_to_paste(make, name):
    case = CASES[name]
    keys = {"kind": case.kind, "suffix": case.suffix}
    try:
        built = make(case.content, **keys)
    except SnaketuneError as error:
        message = str(error)
        repair, entry = REPAIR.search(message), ENTRY.search(message)
        if not repair and (not entry or "COLUMN" in entry[0]):
            assert isinstance(case.expected, str) and re.search(case.expected, message), message
            return
        if repair:
            keys["repair"] = repair[1].split(", ")
        else:
            (keys["source"],) = yaml.safe_load(entry[0])
            del keys["source"]["files"]
        if isinstance(case.expected, str):
            with pytest.raises(SnaketuneError, match=case.expected):
                make(case.content, **keys)
            return
        built = make(case.content, **keys)
    assert [spelled(row) for row in built.train] == case.expected
