"""Rows of each layout in the columns of public data sets, and what they are read as. The texts are our own."""

import json
from typing import Any, NamedTuple

from tests.corpus.row_spelling import CONVERSATIONS, PREFERENCES, sharegpt, turns, typed

MORE = ("U a", "A b", "U c")
CHAT = turns("U q", "A r")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TREE = {"message_id": "1", "role": "prompter", "text": "q", "replies": [
    {"message_id": "2", "role": "assistant", "text": "x", "rank": 0},
    {"message_id": "3", "role": "assistant", "text": "y", "rank": 1},
]}  # fmt: skip
PERSON = "User 1: q\nUser 2: r"
XY = "U q / A x / A y"


class Read(NamedTuple):
    """A row and what it is read as: its columns of turns; of several rows the first. `question`: columns that stop a run."""

    row: dict[str, Any]
    spelled: str
    kind: str = CONVERSATIONS
    question: tuple[str, ...] = ()


def pair(row: dict[str, Any], spelled: str = XY, question: tuple[str, ...] = ()) -> Read:
    return Read(row, spelled, PREFERENCES, question)


def labelled(row: dict[str, Any]) -> Read:
    return Read(row | {"label": True}, "U q / A r", "unpaired")


ROWS: dict[str, list[Read]] = {
    "messages": [
        Read({"messages": CHAT}, "U q|A r"),
        Read({"messages": CHAT, "id": "r-1", "source": "forum", "difficulty": 3}, "U q|A r"),
        Read({"messages": CHAT, "system": "s"}, "S s|U q|A r"),
        Read({"messages": turns("S s", "U q", "A r"), "system": "s"}, "S s|U q|A r"),
        Read({"messages": CHAT, "system": ""}, "U q|A r"),
        Read({"messages": sharegpt("S s", "U q", "A r")}, "S s|U q|A r"),
        Read({"messages": json.dumps(CHAT)}, "U q|A r"),
        Read({"messages": typed("U q", "A r")}, "U q|A r"),
        Read({"messages": turns("U q", "A f", "T 5", "T 6", "A r")}, "U q|A f|T 5|T 6|A r"),
        Read({"messages": CHAT, "draft": "an earlier answer to q"}, "U q|A r", question=("draft",)),
        Read({"conversations": sharegpt("U q", "A r"), "id": 3}, "U q|A r"),
        Read({"conversations": json.dumps(sharegpt("U q", "A r"))}, "U q|A r"),
        Read({"conversation": CHAT, "model": "m", "turn": 1}, "U q|A r"),
        Read({"conversation": [{"input": "a", "output": "b"}, {"input": "q", "output": "r"}]}, "U a|A b|U q|A r"),
        Read({"conversation": [{"system": "s", "input": "q", "output": "r"}]}, "S s|U q|A r"),
    ],
    "turns": [
        Read({"turns": [{"speaker": "USER", "utterance": "q"}, {"speaker": "SYSTEM", "utterance": "r"}]}, "U q|A r"),
        Read({"turns": [{"speaker": "human", "text": "q"}, {"role": "bot", "content": "r"}]}, "U q|A r"),
        Read({"turns": turns("S s", "U q", "A r")}, "S s|U q|A r"),
    ],
    "contents": [
        Read(
            {
                "systemInstruction": {"parts": [{"text": "s"}]},
                "contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "r"}]}],
            },
            "S s|U q|A r",
        )
    ],
    "moss": [Read({"meta_instruction": "s", "chat": {"turn_1": {"Human": "q", "MOSS": "r"}}}, "S s|U q|A r")],
    "dialogue": [
        Read({"chat": PERSON}, "U q|A r"),
        Read({"Best dialogue": PERSON, "personas": "I like\nfish."}, "U q|A r", question=("personas",)),
        Read({"conversation": "Human: q\n\nAssistant: r", "rating": 1.0}, "U q|A r"),
        Read(
            {"system": "SYSTEM: s", "chat": "USER: q\n\n\nASSISTANT: f()\n\n\nFUNCTION RESPONSE: 5\n\n\nASSISTANT: r"},
            "S s|U q|A f()|T 5|A r",
        ),
    ],
    "prompt-response": [
        *(
            Read({prompt: "q", response: "r"}, "U q|A r")
            for prompt, response in (
                ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("query", "response"),
                ("problem", "solution"), ("instruction", "output"), ("input", "output"), ("inputs", "targets"),
                ("input", "target"), ("question", "answerKey"),
            )
        ),
        Read({"messages": None, "prompt": "q", "response": "r"}, "U q|A r"),
        Read({"prompt": "q", "response": "r", "turns": 1}, "U q|A r"),
        Read({"prompt": turns("S s", "U q"), "completion": turns("A r")}, "S s|U q|A r"),
        Read({"input": turns("U q"), "output": "r", "system_prompt": "s"}, "S s|U q|A r"),
        Read({"instruction": "q", "input": "i", "output": "r"}, "U q\n\ni|A r"),
        Read({"instruction": "q", "input": "", "output": "r", "system": "s", "history": [["a", "b"]]}, "S s|U a|A b|U q|A r"),
        Read({"instruction": "q", "input": "<noinput>", "output": "r"}, "U q|A r"),
        Read({"instruction": "q", "input": "No input", "output": "r"}, "U q\n\nNo input|A r"),
        Read({"instruction": 7, "input": 0.5, "output": 3.0}, "U 7\n\n0.5|A 3"),
        Read({"prompt": "q", "response": "r", "history": turns("U a", "A b")}, "U a|A b|U q|A r"),
        Read({"instruction": "q", "context": "c", "response": "r", "category": "qa"}, "U q\n\nc|A r"),
        Read({"question": "q", "contexts": ["c", " ", "d"], "answer": "r"}, "U q\n\nc\n\nd|A r"),
        Read({"question": "q", "passage": "c d", "answer": True}, "U q\n\nc d|A true"),
        Read({"prompt": "By c alone: q", "context": "c\n", "response": "r"}, "U By c alone: q|A r"),
        Read({"system": "Use this: c d e", "question": "q", "context": "c  d e", "answer": "r"}, "S Use this: c d e|U q|A r"),
        Read({"question": "q", "context": [{"title": "t", "text": "c"}, {"text": "d"}], "answer": "r"}, "U q\n\nt\nc\n\nd|A r"),
        Read(
            {"question": "q", "context": {"title": ["t"], "sentences": [["a. ", "b."]]}, "answer": "r"}, "U q\n\nt\na. b.|A r"
        ),
        Read({"prompt": "q", "response": "r", "context": 3}, "U q|A r"),
        Read({"question": "q", "choices": ["x", "y", "z"], "answer": 2}, "U q\n\nA. x\nB. y\nC. z|A C"),
        Read({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "1"}, "U q\n\n1. x\n2. y|A 1"),
        Read({"question": "q", "options": {"A": "x", "B": 7}, "answer": "B"}, "U q\n\nA. x\nB. 7|A B"),
        Read({"question": "q", "options": "['x', 'y']", "answer": "B"}, "U q\n\nA. x\nB. y|A B"),
        Read({"question": "q", "options": ["A)x", "B)y"], "answer": "A"}, "U q\n\nA)x\nB)y|A A"),
        Read({"problem": "q", "options": "a ) x , b ) y", "solution": "r"}, "U q\n\na ) x , b ) y|A r"),
        Read({"prompt": "q\n\n(A) x (B) y", "choices": ["x", "y"], "response": "r"}, "U q\n\n(A) x (B) y|A r"),
        Read({"question": "q", "A": "x", "B": "y", "C": "z", "answer": "C"}, "U q\n\nA. x\nB. y\nC. z|A C"),
        Read({"prompt": "q", "A": "x", "response": "r"}, "U q|A r", question=("A",)),
        Read({"prompt": "q", "response": "r", "options": {"temperature": 0.8}}, "U q|A r"),
        Read({"prompt": "q", "response": "r", "reasoning_content": "t u"}, "U q|A <think>\nt u\n</think>\n\nr"),
        Read({"question": "q", "solution": "r", "thinking_trajectories": ["t u"]}, "U q|A <think>\nt u\n</think>\n\nr"),
        Read({"prompt": "q", "response": "r", "cot": "t u"}, "U q|A <think>\nt u\n</think>\n\nr"),
        Read({"prompt": "q", "response": "r", "reasoning": "on"}, "U q|A r", question=("reasoning",)),
        Read({"prompt": "q", "response": "r", "thinking": "Let's think step by step."}, "U q|A r", question=("thinking",)),
        Read({"prompt": "q", "response": "<reasoning>t u</reasoning>r", "cot": "t u"}, "U q|A <reasoning>t u</reasoning>r"),
        Read({"prompt": "q", "response": "r", "score": 3, "reasoning": "It is so."}, "U q|A r", question=("reasoning",)),
        Read({"prompt": "q", "response": "r", "completion": "another one"}, "U q|A r", question=("completion",)),
        Read({"prompt": "q", "completion": "r", "label": True}, "U q|A r", question=("label",)),
        Read({"query": "q", "answers": json.dumps([{"name": "f", "arguments": {"x": 1}}])}, f"U q|A {CALL}"),
        Read({"question": [turns("U q")], "ground_truth": [{"f": {"x": [1, 1.0], "y": [""]}}]}, f"U q|A {CALL}"),
    ],
    "instances": [
        Read({"instruction": "q", "instances": [{"input": "i", "output": "r"}, {"output": "s"}]}, "U q\n\ni|A r"),
        Read({"instruction": "q", "system": "s", "instances": [{"input": "", "output": "r"}]}, "S s|U q|A r"),
    ],
    "message-tree": [
        Read(TREE, "U q|A x"),
        Read({"message_tree_id": "1", "prompt": TREE}, "U q|A x"),
        pair(TREE),
    ],
    "pairs": [
        *(
            pair({"prompt": "q", chosen: "x", rejected: "y"})
            for chosen, rejected in (
                ("chosen", "rejected"), ("chosen_response", "rejected_response"), ("accepted", "rejected"),
                ("preferred_output", "non_preferred_output"), ("response_j", "response_k"),
            )
        ),
        *(pair({name: "q", "chosen": "x", "rejected": "y"}) for name in ("question", "instruction", "query", "input")),
        pair({"prompt": turns("U q"), "chosen": turns("A x"), "rejected": turns("A y", "U z", "A w")}, XY + "|U z|A w"),
        pair({"prompt": "q", "chosen": {"role": "assistant", "content": "x"}, "rejected": {"text": "y"}}),
        pair({"chosen": turns(*MORE, "A x"), "rejected": turns(*MORE, "A y")}, "U a|A b|U c / A x / A y"),
        pair({"chosen_messages": typed("U q", "A x"), "rejected_messages": typed("U q", "A y")}),
        pair({"prompt": "q", "prompt_id": "7", "chosen": turns("U q", "A x"), "rejected": turns("U q", "A y"),
              "score_chosen": 8, "score_rejected": 2}),
        pair({"prompt": "q", "chosen": turns("U q", "A x"), "rejected": turns("U q", "A y"), "messages": turns("U q", "A x")},
             question=("messages",)),
        pair({"messages": turns("U q", "A x"), "chosen": turns("U q", "A x"), "rejected": turns("U q", "A y")}),
        pair({"conversations": sharegpt(*MORE), "chosen": {"from": "gpt", "value": "x"}, "rejected": "y"},
             "U a|A b|U c / A x / A y"),
        pair({"messages": turns(*MORE), "chosen": turns("A x"), "rejected": turns("A y")}, "U a|A b|U c / A x / A y"),
        pair({"trajectory": sharegpt(*MORE), "chosen": "x", "rejected": "y", "id": "2"}, "U a|A b|U c / A x / A y"),
        pair({"input": {"messages": turns(*MORE), "tools": [], "parallel_tool_calls": True}, "preferred_output": turns("A x"),
              "non_preferred_output": turns("A y")}, "U a|A b|U c / A x / A y"),
        pair({"messages": turns(*MORE, "A x"), "rejected_response": "y"}, "U a|A b|U c / A x / A y"),
        pair({"messages": turns(*MORE, "A x"), "rejected_messages": turns(*MORE, "A y")}, "U a|A b|U c / A x / A y"),
        pair({"chosen": "\n\nHuman: q\n\nAssistant: x", "rejected": "\n\nHuman: q\n\nAssistant: y"}),
        pair({"prompt": "q", "chosen": json.dumps(turns("U q", "A x")), "rejected": json.dumps(turns("U q", "A y"))}),
        pair({"instruction": "q", "input": "i", "history": [["a", "b"]], "chosen": "x", "rejected": "y"},
             "U a|A b|U q\n\ni / A x / A y"),
        pair({"prompt": "q", "context": "c", "system": [{"type": "text", "text": "s"}], "chosen": "x", "rejected": "y"},
             "S s|U q\n\nc / A x / A y"),
    ],
    "votes": [
        *(
            pair({"question": "q", first: "x", second: "y", "winner": "A"})
            for first, second in (("response_A", "response_B"), ("answer_a", "answer_b"), ("output_1", "output_2"),
                                  ("responseA", "responseB"), ("assistant_a", "assistant_b"), ("completion1", "completion2"))
        ),
        *(pair({"question": "q", "response_a": "x", "response_b": "y", name: "model_a"}) for name in ("label", "choice")),
        pair({"instruction": "q", "input": "", "response1": "x", "response2": "y", "annotator1": 1, "annotator2": None}),
        pair({"prompt": "q", "response_0": "y", "response_1": "x", "better_response_id": 1, "safer_response_id": 0}),
        pair({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": -2}),
        pair({"context": turns("U q"), "response1": "x", "response2": "y", "overall_preference": -2}),
        pair({"question": {"full_text": "q"}, "answer_0": "x", "answer_1": "y", "score_0": 0.5, "score_1": -0.5}),
        pair({"history": "q", "human_ref_A": "y", "human_ref_B": "x", "score_A": 2, "score_B": 3}),
        pair({"conversation_a": turns("U q", "A y"), "conversation_b": turns("U q", "A x"), "winner": "model_b"}),
    ],
    "rated": [
        pair({"instruction": "q", "completions": [{"response": "y", "score": 1}, {"response": "x", "score": 9}]}),
        pair({"prompt": "q", "turns": 1, "answers": [{"answer": "y", "rank": 2.0}, {"answer": "x", "rank": 1.0}]}),
        pair({"prompt": "q", "generations": ["y", "x"], "ratings": [2, "4"]}),
        pair({"prompt": "q", "responses": ["y", "x"], "ranks": [2, 1]}),
    ],
    "unpaired": [
        labelled({"prompt": turns("U q"), "completion": turns("A r")}),
        labelled({"instruction": "q", "output": "r"}),
        labelled({"messages": CHAT}),
        labelled({"conversations": sharegpt("U q", "A r")}),
        Read({"instruction": "q", "input": "", "output": "r", "kto_tag": "yes"}, "U q / A r", "unpaired"),
    ],
    "text": [Read({"text": "a document", "url": "https://example.org"}, "T a document", "text")],
}  # fmt: skip
