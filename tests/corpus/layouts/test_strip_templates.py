"""Chat templates in prompts: removed if they enclose the whole prompt, refused if that isn't possible cleanly."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.templates import TEMPLATES, strip_template, templated_conversation
from tests.corpus.row_spelling import ALPACA, PREFERENCES, compact, read, turns

SYSTEM = "A chat between a guest and a clerk. The clerk is polite."
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
FRAMED = [
    ("alpaca", ALPACA.format("Add 1 and 2."), "U Add 1 and 2."),
    ("alpaca", "### Instruction:\nAdd\n\n### Response:", "U Add"),
    ("alpaca", "### Instruction:\nAdd\n\n### Input:\n1, 2\n\n### Response:\n", "U Add\n\n1, 2"),
    ("alpaca", "### Instruction:\nAdd\n\n### Input:\n\n\n### Response:\n", "U Add"),
    ("alpaca", ALPACA.format("a\n\n### Response:\nb</s>\n\n### Instruction:\nc"), "U a|A b|U c"),
    ("alpaca", ALPACA.format("What is ### in Markdown?"), "U What is ### in Markdown?"),
    ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "U hi"),
    ("chatml", "<|im_start|>user\nhi<|im_end|>\n", "U hi"),
    (
        "chatml",
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n a\n <|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant",
        "S be brief|U  a\n |A b|U c",
    ),
    ("llama3", f"<|begin_of_text|>{HEAD.format('user')}hi<|eot_id|>{HEAD.format('assistant')}", "U hi"),
    ("llama3", f"{HEAD.format('system')}s<|eot_id|>{HEAD.format('user')}hi<|eot_id|>", "S s|U hi"),
    ("llama2", "[INST] hi [/INST]", "U hi"),
    ("llama2", "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhi [/INST]", "S be brief|U hi"),
    ("llama2", "<s>[INST] a [/INST] b </s><s>[INST] c [/INST]", "U a|A b|U c"),
    ("vicuna", "USER: hi ASSISTANT:", "U hi"),
    ("vicuna", f"{SYSTEM} USER: a ASSISTANT: b</s>USER: c ASSISTANT:", f"S {SYSTEM}|U a|A b|U c"),
    ("vicuna", "USER: hi\nthere\nASSISTANT: ", "U hi\nthere"),
    ("human", "### Human: hi\n### Assistant:", "U hi"),
    ("human", "### Human: a### Assistant: b### Human: c### Assistant:", "U a|A b|U c"),
    ("human", f"{SYSTEM}\n### Human: hi\n### Assistant:", f"S {SYSTEM}|U hi"),
    ("transcript", "\n\nHuman: hi\n\nAssistant:", "U hi"),
    ("gemma", "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", "U hi"),
    (
        "gemma",
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model",
        "U a|A b|U c",
    ),
    ("tags", "<|user|>\nhi<|end|>\n<|assistant|>\n", "U hi"),
    ("tags", "<|system|>\nbe brief</s>\n<|user|>\nhi</s>\n<|assistant|>\n", "S be brief|U hi"),
    ("tags", "<|user|>\na\n<|assistant|>\nb<|endoftext|>\n<|user|>\nc\n<|assistant|>", "U a|A b|U c"),
    ("transcript", "Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ", "U a|A b|U c"),
]


@pytest.mark.parametrize("name, prompt, inside", FRAMED)
def test_removed(name, prompt, inside):
    assert {name for name, _, _ in FRAMED} == {template.name for template in TEMPLATES if not template.plain}
    row = read({"prompt": prompt, "response": "x"})[1]
    assert (compact(row.messages), row.notes) == (f"{inside}|A x", (f"unwrapped_{name}_template",))
    row = read({"prompt": prompt, "chosen": "x", "rejected": "y"}, PREFERENCES)[1]
    assert (compact(row.prompt), row.notes) == (inside, (f"unwrapped_{name}_template",))
    assert compact(read({"p": prompt, "r": "x"}, prompt="p", response="r")[1].messages) == f"{inside}|A x"


@pytest.mark.parametrize("name, prompt, inside", FRAMED)
def test_a_text_about_a_template_is_not_changed(name, prompt, inside):
    for around in ("What does this mean? {}", "{} Explain the above.", "```\n{}\n```"):
        text = around.format(prompt)
        try:
            assert strip_template(text) is None
        except Malformed as error:
            # Special tags at the very beginning: refused rather than templated twice.
            assert text.startswith(prompt) and error.reason == "baked_in_template"
            assert name in ("chatml", "llama3", "llama2", "gemma", "tags")


@pytest.mark.parametrize(
    "prompt, inside",
    [
        ("User: a\nBot: b\nUser: c\nd\nBot:", "U a|A b|U c\nd"),
        ("<user>: a\n<bot>: b\n\n<user>: c", "U a|A b|U c"),
        ("user: a\nassistant: b\nuser: c\nassistant:", "U a|A b|U c"),
        ("User: a\nAI: ", "U a"),
    ],
)
def test_a_prompt_that_is_a_whole_dialogue_is_its_turns(prompt, inside):
    for raw in ({"prompt": prompt, "response": "x"}, {"instruction": prompt, "output": "x"}):
        row = read(raw)[1]
        assert (compact(row.messages), row.notes) == (f"{inside}|A x", ("unwrapped_dialogue_template",))
    assert compact(read({"prompt": prompt, "chosen": "x", "rejected": "y"}, PREFERENCES)[1].prompt) == inside


@pytest.mark.parametrize(
    "prompt",
    [
        "User: is what my log says. Why?",
        "User: a\nBot: b",
        "User: a\nBot: b\nUser: c\n\nWas the bot polite in this dialogue?",
        "User: a\nUser: b\nBot:",
        "User: a\nBot: b\n\nGo on with this dialogue.",
        "Human: a\nAI: b\nHuman: c\nRate the AI from 1 to 5.",
        "Bot: a\nUser: b\nBot:",
        "user: root\nai: b\nc",
        "user: alice\nbot: true\nuser: bob",
    ],
)
def test_a_text_with_speakers_that_is_no_whole_dialogue_is_not_changed(prompt):
    assert compact(read({"prompt": prompt, "response": "x"})[1].messages) == f"U {prompt}|A x"


def test_a_dialogue_quoted_in_a_user_turn_is_not_changed():
    dialogue = "User: a\nBot: b\nUser: c\nBot:"
    assert compact(read({"messages": turns(f"U {dialogue}", "A x")})[1].messages) == f"U {dialogue}|A x"


@pytest.mark.parametrize(
    "text",
    [
        "USER: is what my log says. Why?",
        "USER: hello ASSISTANT: hi. Go on with this dialogue as you like.",
        "### Human: is a heading in my file",
        "Human: errare humanum est",
        "Below is an instruction that describes a task. What is wrong with it?",
        "### Instruction:\nis what the manual says",
        "<|im_start|> is a token of ChatML.",
        "[INST] is what it begins with",
        "<s> is strike-through in HTML",
        "A chat between friends. Who is the USER: me or you?",
        "ASSISTANT:",
        "<|user|> is a token of Zephyr, and <start_of_turn> one of Gemma.",
        "<start_of_turn> is a token of Gemma. What is <start_of_turn>model for?",
        "<|fim_prefix|>def f():<|fim_suffix|><|fim_middle|>",
        "<|endoftext|> is a token. Is <|assistant|> one too?",
        "<b>bold</b> is what the assistant",
        "",
        " ",
    ],
)
def test_ordinary_prompts_are_not_changed(text):
    assert strip_template(text) is None


@pytest.mark.parametrize(
    "prompt",
    [
        "USER: ASSISTANT:",
        "USER: a USER: b ASSISTANT:",
        "USER: a ASSISTANT: b ASSISTANT:",
        "<|im_start|>user\na<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>narrator\na<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>assistant\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nSure, ",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
        "<|im_start|>user\nWhat is [/INST] or <|im_end|> for?<|im_end|>\n<|im_start|>assistant\n",
        "[INST] a [INST] b [/INST]",
        "[INST] a [/INST] b",
        "[INST] <<SYS>> a [/INST]",
        f"{HEAD.format('user')}{HEAD.format('assistant')}",
        ALPACA.format(""),
        ALPACA.format("a\n\n### Input:\nb\n\n### Input:\nc"),
        ALPACA.format("a\n\n### Response:\n"),
        "\n\nHuman: a\n\nHuman: b\n\nAssistant:",
        "### Human: a### Human: b### Assistant:",
        "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nSure, ",
        "<start_of_turn>critic\na<end_of_turn>\n<start_of_turn>model\n",
        "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n",
        "<|user|>\na<|end|>\n<|user|>\nb<|end|>\n<|assistant|>\n",
        "<|prompter|>a<|endoftext|><|assistant|>",
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\na<|eot|><|header_start|>assistant<|header_end|>\n\n",
        "<|start_of_role|>user<|end_of_role|>a<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>",
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>a<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>",
        "[gMASK]<sop><|user|>\na<|assistant|>",
    ],
)
def test_refused_rather_than_templated_twice(prompt):
    with pytest.raises(Malformed, match=r"baked_in_template: .*template"):
        strip_template(prompt)


@pytest.mark.parametrize(
    "completion, bare",
    [
        ("x</s>", "x"),
        ("x<|im_end|>\n", "x"),
        ("x <|im_end|>\n<|endoftext|>", "x"),
        ("x<|eot_id|>", "x"),
        ("x \n", "x \n"),
        ("</s> ends a turn", "</s> ends a turn"),
    ],
)
def test_end_of_turn_strings_are_removed_with_the_template(completion, bare):
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    row = read({"prompt": prompt, "response": completion})[1]
    assert row.messages == turns("U hi", f"A {bare}")
    assert row.notes[1:] == (("removed_end_of_turn",) if completion != bare else ())
    assert read({"prompt": "hi", "response": completion})[1].messages == turns("U hi", f"A {completion}")


def test_the_space_after_a_colon_belongs_to_the_template():
    assert read({"prompt": "USER: hi ASSISTANT:", "response": " x "})[1].messages == turns("U hi", "A x ")
    assert read({"prompt": ALPACA.format("hi"), "response": " x "})[1].messages == turns("U hi", "A  x ")


def test_an_end_of_turn_alone_is_an_empty_turn():
    with pytest.raises(Malformed, match="empty_turn"):
        read({"prompt": "USER: hi ASSISTANT:", "response": "</s>"})


@pytest.mark.parametrize("name, prompt, inside", FRAMED)
def test_an_instruction_in_a_template(name, prompt, inside):
    layout, row = read({"instruction": prompt, "input": "", "output": "x</s>"})
    assert (layout, compact(row.messages)) == ("prompt-response", f"{inside}|A x")
    assert row.notes == (f"unwrapped_{name}_template", "removed_end_of_turn")
    row = read({"instruction": prompt, "input": None, "chosen": "x", "rejected": "y"}, PREFERENCES)[1]
    assert (compact(row.prompt), row.notes) == (inside, (f"unwrapped_{name}_template",))
    with pytest.raises(Malformed, match="baked_in_template"):
        read({"instruction": prompt, "input": "1, 2", "output": "x"})


@pytest.mark.parametrize("name, prompt, inside", FRAMED)
def test_a_users_turn_in_a_template(name, prompt, inside):
    notes = (f"unwrapped_{name}_template",)
    messages = [{"from": "human", "value": prompt}, {"from": "gpt", "value": "x</s>"}]
    for raw in (
        {"messages": turns(f"U {prompt}", "A x</s>")},
        {"conversations": messages},
        {"turns": [{"speaker": "USER", "utterance": prompt}, {"speaker": "SYSTEM", "utterance": "x</s>"}]},
    ):
        row = read(raw)[1]
        assert (compact(row.messages), row.notes) == (f"{inside}|A x", (*notes, "removed_end_of_turn"))
    assert compact(read({"prompt": messages[:1], "response": "x"})[1].messages) == f"{inside}|A x"
    whole = {"chosen": turns(f"U {prompt}", "A x"), "rejected": turns(f"U {prompt}", "A y</s>")}
    row = read(whole, PREFERENCES)[1]
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == (inside, "A x", "A y")
    later = {"messages": turns("U first", "A second", f"U {prompt}", "A x")}
    if "|" in inside:
        with pytest.raises(Malformed, match=r"baked_in_template: .*later turn of the user"):
            read(later)
    else:
        assert compact(read(later)[1].messages) == f"U first|A second|{inside}|A x"


def test_the_system_text_inside_a_template_may_also_be_a_column():
    framed = "[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhi [/INST]"
    row = read({"messages": turns(f"U {framed}", "A x"), "system": "be brief"})[1]
    assert row.messages == turns("S be brief", "U hi", "A x")
    with pytest.raises(Malformed, match="two_turns_in_a_row"):
        read({"messages": turns("S be brief", f"U {framed}", "A x")})


def test_turns_that_mention_templates_are_not_changed():
    messages = turns("U What is [INST] x [/INST]?", "A <|user|>\nA mark.</s>", "U USER: is in my log", "A x<|end|>")
    row = read({"messages": messages})[1]
    assert (row.messages, row.notes) == (messages, ())


def test_a_template_inside_a_template_is_not_changed():
    row = read({"prompt": "USER: [INST] hi [/INST] ASSISTANT:", "response": "x"})[1]
    assert row.messages == turns("U [INST] hi [/INST]", "A x")


@pytest.mark.parametrize("name, prompt, inside", FRAMED)
def test_a_whole_conversation_in_a_template(name, prompt, inside):
    ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "transcript": ""}
    if prompt.rstrip().endswith(("<|im_end|>", "<|eot_id|>")):
        assert templated_conversation(prompt) is None
        return
    gap = "\n" if prompt.endswith(("assistant", "model", "<|assistant|>")) else " " * (prompt[-1] not in " \n")
    text = f"{prompt}{gap}x{ends.get(name, '</s>')}"
    assert compact(templated_conversation(text)) == f"{inside}|A x"
    assert read({"text": text}) == ("dialogue", read({"messages": templated_conversation(text)})[1])


@given(
    st.lists(
        st.sampled_from(
            [
                "USER:",
                "ASSISTANT:",
                "[INST]",
                "[/INST]",
                "### Human:",
                "### Response:",
                "</s>",
                "<s><|im_start|>user\n",
                "<|im_start|>assistant\n",
                "<|im_end|>",
                "Human:",
                "\n\nAssistant:",
                "### Instruction:\n",
                "<<SYS>>",
                "a",
                " ",
                "\n\n",
            ]
        ),
        max_size=9,
    ).map("".join)
)
@settings(deadline=None, max_examples=500)
def test_any_text_is_split_unchanged_or_refused(text):
    try:
        found = strip_template(text)
    except Malformed as error:
        assert error.reason == "baked_in_template"
        return
    if found:
        roles = [turn["role"] for turn in found[0] if turn["role"] != "system"]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)] and roles[-1] == "user"
        assert all(turn["content"].strip() and turn["content"] in text for turn in found[0] if "Input" not in text)


@pytest.mark.parametrize(
    "text",
    [" " * 10**6, "\n" * 10**6, "USER: " * 10**5, "[INST]" * 10**5, "x" + " " * 10**6 + "y", "A chat between " * 10**5],
)
def test_long_texts_take_no_time(text):
    for prompt in (text, "USER: hi ASSISTANT:", f"[INST] {text}x [/INST]"):
        with suppress(Malformed):
            read({"prompt": prompt, "response": f"a{text}b</s>"})
