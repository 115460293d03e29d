"""Marks of an unknown chat template that nearly all rows share stop the run, with the entry that removes them."""

import re
from importlib.metadata import files

import pytest
import yaml
from transformers.utils.chat_template_utils import render_jinja_template

from snaketune.config.corpus_sources import Source
from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.frames import COMPARED, SharedFrame
from snaketune.errors import SnaketuneError
from tests.corpus import row_spelling
from tests.corpus.row_spelling import PREFERENCES, compact, turns

TRL = {path.name: path.read_text() for path in files("trl") if path.parent.name == "chat_templates"}
CONTROL = re.compile(r"<[|｜]|[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<bos>|<eos>")
# These take contents as lists of typed parts.
TYPED = ("idefics3.jinja", "llava_next.jinja", "smolvlm.jinja")
COLOURS = ("Teal", "Amber", "Rose", "Plum", "Ochre")


def rows(prompt="{}", answer="{}", count=20):
    """Rows whose prompts and answers are framed by patterns."""
    questions = [f"{['Name', 'Say', 'Which is'][i % 3]} colour {i}{'.?'[i % 2]}" for i in range(count)]
    answers = [f"{COLOURS[i % 5]} {i}." for i in range(count)]
    return [
        {"prompt": prompt.replace("{}", question), "response": answer.replace("{}", text)}
        for question, text in zip(questions, answers)
    ]


def pasted(make, raws, **options):
    """The corpus that the entry of the message gives."""
    with pytest.raises(SnaketuneError, match="nearly all rows share texts") as error:
        make(raws, **options)
    text = str(error.value)
    (entry,) = yaml.safe_load(text[text.index("\n- ") : text.index("\nIf they belong")])
    assert entry.pop("files") == ["data/0.jsonl"]
    return make(raws, source=entry, **options), entry["frame"]


PLAIN = rows()
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
DATED = f"<|begin_of_text|>{HEADER.format('system')}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n"
ALPACA = row_spelling.ALPACA


@pytest.mark.parametrize(
    ("prompt", "answer", "frame"),
    [
        (
            "<extra_id_0>System\nBe brief.\n<extra_id_1>User\n{}\n<extra_id_1>Assistant\n", "{}",
            ("<extra_id_0>System\nBe brief.\n<extra_id_1>User\n", "\n<extra_id_1>Assistant\n", "", "Be brief."),
        ),
        (
            "<extra_id_0>System\n\n<extra_id_1>User\n{}\n<extra_id_1>Assistant\n", "{}\n<extra_id_1>",
            ("<extra_id_0>System\n\n<extra_id_1>User\n", "\n<extra_id_1>Assistant\n", "\n<extra_id_1>", ""),
        ),
        ("### User:\n{}\n\n### Assistant:\n", "{}", ("### User:\n", "\n\n### Assistant:\n", "", "")),
        ("[Round 1]\n\n问：{}\n\n答：", "{}", ("[Round 1]\n\n问：", "\n\n答：", "", "")),
        ("<|turn>user\n{}<turn|>\n<|turn>model\n", "{}<turn|>", ("<|turn>user\n", "<turn|>\n<|turn>model\n", "<turn|>", "")),
        ("You are terse.\n\nUSER: {} ASSISTANT:", " {}", ("You are terse.\n\nUSER: ", " ASSISTANT:", "", "You are terse.")),
        ("<s>{}</s>", "{}</s>", ("<s>", "</s>", "</s>", "")),
        ("{}", "{}<|im_end|>", ("", "", "<|im_end|>", "")),
        ("Q: {}\nA:", " {}", ("Q: ", "\nA:", "", "")),
        (ALPACA, "{}", (ALPACA.split("{}")[0], "\n\n### Response:\n", "", ALPACA.split("\n")[0])),
        ("### Instruction:\n{}\n\n### Response:", "{}", ("### Instruction:\n", "\n\n### Response:", "", "")),
        (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
            "{}<|im_end|>\n",
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
                "<|im_end|>\n", "Be brief.",
            ),
        ),
        ("<|im_start|>user\n{}<|im_end|>\n", "{}", ("<|im_start|>user\n", "<|im_end|>\n", "", "")),
        (
            HEADER.format("user") + "{}<|eot_id|>" + HEADER.format("assistant"), "{}<|eot_id|>",
            (HEADER.format("user"), "<|eot_id|>" + HEADER.format("assistant"), "<|eot_id|>", ""),
        ),
        (
            f"{DATED}\n<|eot_id|>{HEADER.format('user')}{{}}<|eot_id|>{HEADER.format('assistant')}", "{}",
            (f"{DATED}\n<|eot_id|>{HEADER.format('user')}", "<|eot_id|>" + HEADER.format("assistant"), "", ""),
        ),
        (
            f"{DATED}\nBe brief: a word.<|eot_id|>{HEADER.format('user')}{{}}<|eot_id|>{HEADER.format('assistant')}", "{}",
            (
                f"{DATED}\nBe brief: a word.<|eot_id|>{HEADER.format('user')}", "<|eot_id|>" + HEADER.format("assistant"), "",
                "Be brief: a word.",
            ),
        ),
        ("[INST] {} [/INST]", " {} </s>", ("[INST] ", " [/INST]", " </s>", "")),
        (
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST]", " {}",
            ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n", " [/INST]", "", "Be brief."),
        ),
        ("### Human: {}\n### Assistant:", " {}", ("### Human: ", "\n### Assistant:", "", "")),
        ("### Human: {}### Assistant:", " {}", ("### Human: ", "### Assistant:", "", "")),
        ("\n\nHuman: {}\n\nAssistant:", " {}", ("\n\nHuman: ", "\n\nAssistant:", "", "")),
        (
            "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n", "{}<end_of_turn>",
            ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>", ""),
        ),
        (
            "<|system|>\nBe brief.</s>\n<|user|>\n{}</s>\n<|assistant|>\n", "{}</s>",
            ("<|system|>\nBe brief.</s>\n<|user|>\n", "</s>\n<|assistant|>\n", "</s>", "Be brief."),
        ),
    ],
)  # fmt: skip
def test_frames_are_found_and_removed(make, prompt, answer, frame):
    built, found = pasted(make, rows(prompt, answer))
    assert tuple(found.get(key, "") for key in ("before", "after", "answer_end", "system")) == frame
    texts = [[turn["content"] for turn in row["messages"]] for row in built.train]
    assert texts == [[*filter(None, frame[3:]), row["prompt"], row["response"]] for row in PLAIN]
    kept = make(rows(prompt, answer), source={"frame": "keep"})
    assert kept.train[0]["messages"][0]["content"] == prompt.replace("{}", PLAIN[0]["prompt"])


def test_reasoning_that_the_frame_opens_belongs_to_the_answer(make):
    raws = rows("<｜User｜>{}<｜Assistant｜><think>\n", "easy\n</think>\n\n{}")
    built, _ = pasted(make, raws)
    answer = built.train[0]["messages"][1]["content"]
    assert answer == f"<think>\neasy\n</think>\n\n{PLAIN[0]['response']}"


def test_rows_without_the_frame_stay_and_those_with_a_part_of_it_are_quarantined(make):
    raws = rows("### User:\n{}\n\n### Assistant:\n")
    raws += [{"prompt": "Without it", "response": "r"}, {"prompt": "### User:\nopen", "response": "r"}]
    built, _ = pasted(make, raws, max_quarantined_fraction=0.1)
    assert built.prompts()[-1] == "Without it"
    assert [record["reason"] for record in built.quarantine] == ["baked_in_template"]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        (
            "<|im_start|>user\na{}<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc{}<|im_end|>\n"
            "<|im_start|>assistant\n",
            "U a{}|A b|U c{}",
        ),
        ("\n\nHuman: a{}\n\nAssistant: b\nb\n\nHuman: c{}\n\nAssistant:", "U a{}|A b\nb|U c{}"),
        ("User: a{}\nBot: b\nUser: c{}\nBot:", "U a{}|A b|U c{}"),
        ("### Instruction:\nq{}\n\n### Input:\ni{}\n\n### Response:\n", "U q{}\n\ni{}"),
        ("### Instruction:\nq{}\n\n### Input:\n\n\n### Response:\n", "U q{}"),
        (
            "Below is a task{}.\n\n### Instruction:\nq{}\n\n### Input:\ni{}\n\n### Response:\n",
            "S Below is a task{}.|U q{}\n\ni{}",
        ),
    ],
)
def test_turns_and_parts_of_a_prompt_within_the_frame(make, prompt, inside):
    raws = [{"prompt": prompt.replace("{}", str(i)), "response": f" r{i}"} for i in range(20)]
    raws.append({"prompt": "plain", "response": "x"})
    built, _ = pasted(make, raws)
    texts = [compact(row["messages"]).replace("|A  r", "|A r") for row in built.train]
    assert texts == [f"{inside.replace('{}', str(i))}|A r{i}" for i in range(20)] + ["U plain|A x"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("USER: a{} ASSISTANT: b</s>USER: c{} ASSISTANT:", "state it as the frame's `answer_end`"),
        ("User: a{}\nBot: b\nBot: c\nUser: d{}\nBot:", "don't alternate"),
        ("### Instruction:\nq{}\n\n### Input:\ni\n\n### Input:\nj{}\n\n### Response:\n", "### Input:"),
    ],
)
def test_prompts_with_more_than_a_frame_are_quarantined(make, prompt, says):
    raws = [{"prompt": prompt.replace("{}", str(i)), "response": f"r{i}"} for i in range(20)]
    with pytest.raises(SnaketuneError, match=f"20 × baked_in_template.*{re.escape(says)}"):
        pasted(make, raws)


def test_a_frame_with_a_system_text_in_rows_that_have_another(make):
    raws = [row | {"system": "Be kind."} for row in rows("You are terse.\n\nUSER: {} ASSISTANT:")]
    with pytest.raises(SnaketuneError, match="turns 1 and 2 are both system"):
        pasted(make, raws)
    merged, _ = pasted(make, raws, repair=["merge-same-role"])
    assert merged.train[0]["messages"][0]["content"].split("\n\n") == ["Be kind.", "You are terse."]


def test_pairs_and_conversations(make):
    pairs = [
        {"prompt": f"<|q|>{i} and one?<|a|>", "chosen": f"yes, {i}<|end|>", "rejected": f"no {i}!<|end|>"}
        for i in range(9)
    ]
    built, frame = pasted(make, pairs, kind=PREFERENCES)
    assert frame == {"before": "<|q|>", "after": "<|a|>", "answer_end": "<|end|>"}
    assert [row["chosen"][0]["content"] for row in built.train] == [f"yes, {i}" for i in range(9)]
    assert [row["rejected"][0]["content"] for row in built.train] == [f"no {i}!" for i in range(9)]
    chats = [{"messages": turns(f"U q{i}", f"A a{i}</s>", f"U r{i}", f"A b{i}</s>")} for i in range(9)]
    built, frame = pasted(make, chats)
    assert frame == {"answer_end": "</s>"}
    assert [turn["content"] for turn in built.train[1]["messages"]] == ["q1", "a1", "r1", "b1"]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("{}", "{}"),
        ("Question: {}", "Answer: {}"),  # no closing, and no ending
        ("Please, {} Thank you!", "{} You're welcome."),  # no marks
        ("In this text: {} (Options: yes, no)", "{}"),  # doesn't end with a mark
        ("{}\n\nAnswer:", "{}"),  # no opening
    ],
)
def test_other_shared_texts_stop_nothing(make, prompt, answer):
    assert len(make(rows(prompt, answer)).train) == 20


def test_one_row_or_one_prompt_tells_nothing(make):
    framed = rows("### User:\n{}\n\n### Assistant:\n", count=1)
    assert make(framed).train
    assert len(make([framed[0] | {"response": f"r{i}"} for i in range(5)]).train) == 5


def test_so_many_rows_are_compared_and_no_more():
    shared = SharedFrame(Source(files=["x"]))
    for i in range(COMPARED + 5):
        shared.add(Conversation(messages=turns(f"U question {i}", "A yes")))
    assert (len(shared.prompts), len(shared.answers)) == (COMPARED, 1)


def test_the_run_stops_soon(make, monkeypatch):
    from snaketune.corpus import first_pass

    monkeypatch.setattr(first_pass, "ROWS_BEFORE_STOP", 10)
    raws = [*rows("### User:\n{}\n\n### Assistant:\n"), {"prompt": 3}]
    with pytest.raises(SnaketuneError, match="nearly all rows"):
        make(raws)


@pytest.mark.parametrize("name", sorted(name for name in TRL if name.endswith(".jinja") and "training" not in name))
def test_no_template_of_trl_is_written_twice(make, name):
    """Prompts rendered by each template stop the run, and what the entry gives has no control marks."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    raws = []
    for row in PLAIN:
        typed = [{"type": "text", "text": row["prompt"]}] if name in TYPED else row["prompt"]
        options = {"chat_template": TRL[name], "add_generation_prompt": True, "date_string": "1 Jan 2026"} | names
        rendered, _ = render_jinja_template([[{"role": "user", "content": typed}]], **options)
        assert row["prompt"].rstrip(".") in rendered[0]
        raws.append({"prompt": rendered[0], "response": row["response"]})
    try:
        built = make(raws, max_quarantined_fraction=1.0)
    except SnaketuneError as error:
        if "nearly all rows share" not in str(error):
            return
        built, _ = pasted(make, raws, max_quarantined_fraction=1.0)
    for row in built.train:
        assert not any(CONTROL.search(turn["content"]) for turn in row["messages"]), row["messages"]
