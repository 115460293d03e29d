"""Ids and masks: equal to transformers' on ordinary rows; on any row, only the template writes control tokens."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs_by_rows import encode_pairs
from small_tokenizers import CHATML, PHI3, conversations, messages, save_tokenizer, special
from tokenizers import Tokenizer

from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.template import render

KINDS = ("trained-bpe", "trained-unigram", "byte-level", "metaspace", "legacy", "unigram")
# Kinds that decode every text to itself; unigram without byte fallback doesn't.
LOSSLESS = ("trained-bpe", "trained-unigram", "byte-level", "metaspace", "legacy")
ORDINARY = [
    messages("hello the cat", "it sat"),
    messages("a mat?", "yes,\n\nthe mat 😀", "and then", "def x(y): return y\n", system="said the system"),
    messages("", "x"),
    *conversations()[:20],
]
STRINGS = [
    *("<|im_start|>", "<|im_end|>", "<|pad|>", "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "<|user|>"),
    *("<|end|>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<think>"),
    *("<", "|", "<|", "|>", "<|im_", "end|>", "/s>", "s>", "[", "/INST]", "</", "<0x0A>", "\x00", "▁", "\n", " ", "  "),
    *("the cat", "assistant\n", "😀", "é", "12", "\U0010fffd", "\U0010fffc", "\U000f0000"),
]
CONTENT = st.lists(st.one_of(st.sampled_from(STRINGS), st.text(max_size=5)), max_size=8).map("".join)
CONVERSATIONS = st.lists(CONTENT, min_size=2, max_size=4).map(lambda some: messages(*some))
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_mask_equal_apply_chat_template(chats, kind):
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    theirs = TokenizersBackend.from_pretrained(chats["folders"][kind])
    for conversation, ours in zip(ORDINARY, chats[kind].encode(ORDINARY), strict=True):
        expected = theirs.apply_chat_template(
            conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ours.ids.tolist() == expected["input_ids"]
        assert ours.supervised.astype(int).tolist() == expected["assistant_masks"]
        assert ours.ids.dtype == np.int32 and ours.supervised.dtype == bool


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_start_with_whitespace_are_supervised(chats, kind):
    chat = chats[kind]
    encoded = chat.encode([messages("the cat", "  sat 😀")])[0]
    supervised = encoded.ids[encoded.supervised]
    assert chat.decode(supervised).strip().startswith("sat")
    assert chat.is_control(supervised).nonzero()[0].tolist()[-1] == len(supervised) - 1
    assert not chat.is_control(supervised[:1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_guarded_encoding_equals_plain_encoding_on_ordinary_rows(chats, kind, monkeypatch):
    chat = chats[kind]
    plain = chat.encode(ORDINARY)
    monkeypatch.setattr(chat.control, "written_in", lambda text: True)
    for guarded, ordinary in zip(chat.encode(ORDINARY), plain, strict=True):
        assert guarded.ids.tolist() == ordinary.ids.tolist()
        assert guarded.spans == ordinary.spans


def control_ids(chat: ChatTokenizer, ids: np.ndarray) -> list[int]:
    """Return the control tokens in `ids` that only a template can write, so not unk."""
    return ids[chat.template_only[ids]].tolist()


@pytest.mark.parametrize("kind", KINDS)
@SETTINGS
@given(conversation=CONVERSATIONS)
def test_only_the_template_writes_control_tokens(chats, kind, conversation):
    chat = chats[kind]
    plain = [{**message, "content": "x"} for message in conversation]
    found, expected = (chat.encode([some])[0] for some in (conversation, plain))
    assert control_ids(chat, found.ids) == control_ids(chat, expected.ids)
    if kind in LOSSLESS:
        unk = chat.template.variables.get("unk_token")
        assert unk is None or chat.control.ids[unk] not in found.ids
    # Each turn has the same end.
    assert len(found.spans) == sum(message["role"] == "assistant" for message in conversation)
    for (_, end), (_, expected_end) in zip(found.spans, expected.spans, strict=True):
        assert found.ids[end - 1] == expected.ids[expected_end - 1]


@pytest.mark.parametrize("kind", LOSSLESS)
@SETTINGS
@given(conversation=CONVERSATIONS)
def test_contents_are_decoded_to_themselves(chats, kind, conversation):
    chat = chats[kind]
    encoded = chat.encode([conversation])[0]
    contents = [message["content"] for message in conversation if message["role"] == "assistant"]
    for (start, end), content in zip(encoded.spans, contents, strict=True):
        supervised = chat.decode(encoded.ids[start:end])
        if kind in ("metaspace", "legacy"):
            # These encode `▁` as a space, and their decoder strips the first space.
            assert supervised.replace("▁", " ").strip(" ") == content.replace("▁", " ").strip(" ")
        else:
            # One token may contain the newline before the answer and a newline that the answer starts with.
            assert supervised in (content, "\n" + content)


@pytest.mark.parametrize("kind", ("trained-bpe", "trained-unigram"))
@SETTINGS
@given(content=CONTENT)
def test_trained_tokenizers_decode_every_text_to_itself(chats, kind, content):
    chat = chats[kind]
    ids = chat.encode([messages("x", content)])[0].ids
    start = len(chat.encode_prompt(messages("x")))
    if not content.startswith("\n"):
        assert chat.decode(ids[start:]) == content + "\n"


def test_control_strings_that_form_across_the_boundary_of_a_content(tmp_path, chats):
    """The template writes `</`, the user `s>`; or the user all but the last character."""
    folder = chats["folders"]["metaspace"]
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '</' + m.content + '/INST]' -}}{%- else -%}"
        "{%- generation -%}{{- m.content + eos_token -}}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    )
    chat = ChatTokenizer.load(
        save_tokenizer(
            tmp_path / "seam",
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            template,
            eos_token="</s>",
            unk_token="<unk>",
            pad_token="<unk>",
        )
    )
    for content in ("s>", "s>[", "x[", "s", "<s>[", "["):
        ids = chat.encode([messages(content, "ok")])[0].ids
        assert control_ids(chat, ids) == [chat.eos_id], content
        assert chat.text(ids) == f"</{content}/INST]ok</s>"


def test_control_tokens_of_one_character(tmp_path):
    tokenizer = Tokenizer.from_str(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [],'
        ' "unk_token": "a"}}'
    )
    tokenizer.add_special_tokens(special("@", "#", "@@"))
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '@' + m.content + '#' -}}{%- else -%}"
        "{%- generation -%}{{- m.content + '#' -}}{%- endgeneration -%}{%- endif -%}{%- endfor -%}"
    )
    chat = ChatTokenizer.load(save_tokenizer(tmp_path / "one", tokenizer, template, eos_token="#", pad_token="@"))
    for content in ("a@b", "#", "@", "@@b", "#@", "b#"):
        encoded = chat.encode([messages(content, content)])[0]
        ids = encoded.ids
        assert ids[chat.is_control(ids)].tolist() == [chat.control.ids["@"], chat.eos_id, chat.eos_id], content
        assert encoded.supervised.sum() == len(content) + 1


def test_added_tokens_that_are_words_stay_tokens(chats):
    chat = chats["byte-level"]
    think = chat._tokenizer.token_to_id("<think>")
    plain, guarded = (chat.encode([messages(question, "<think>the cat")])[0].ids for question in ("x", "x<|end|>"))
    assert think in plain and think in guarded


def test_a_template_that_trims_still_trims_guarded_contents(chats, tmp_path):
    folder = chats["folders"]["byte-level"]
    template = PHI3.read_text().replace("message['content']", "(message['content'] | trim)")
    chat = ChatTokenizer.load(
        save_tokenizer(
            tmp_path / "trim",
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            template,
            eos_token="<|endoftext|>",
            pad_token="<|endoftext|>",
        )
    )
    ids = chat.encode([messages("  <|end|> the ", " cat<|end|>\n ")])[0].ids
    assert chat.text(ids) == "<|user|>\n<|end|> the<|end|>\n<|assistant|>\ncat<|end|><|end|>\n".replace(
        "<|user|>\n", "<|user|>"
    ).replace("the<|end|>\n", "the<|end|>").removesuffix("\n")


def test_pairs_share_their_prompt_up_to_the_first_supervised_token(chats):
    chat = chats["trained-bpe"]
    prompt = messages("the cat", "sat", "on a mat?", system="hello")
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("the cat said hello", "the cat, 12"))
    pair = encode_pairs(chat, [(prompt, chosen, rejected)])[0]
    assert pair.prompt_ids.tolist() == chat.encode_prompt(prompt).tolist()
    for ids, mask, completion in (
        (pair.chosen_ids, pair.chosen_supervised, chosen),
        (pair.rejected_ids, pair.rejected_supervised, rejected),
    ):
        whole = chat.encode([prompt + completion])[0]
        assert np.concatenate([pair.prompt_ids, ids]).tolist() == whole.ids.tolist()
        assert chat.text(ids[mask]) == completion[0]["content"] + "<|im_end|>"
        assert len(ids) == len(mask)
    # The first token of both answers is equal, but it is supervised, so it isn't part of the prompt.
    assert pair.chosen_ids[0] == pair.rejected_ids[0] and pair.chosen_supervised[0] and pair.rejected_supervised[0]


@pytest.mark.parametrize("kind", KINDS)
@settings(SETTINGS, max_examples=30)
@given(question=CONTENT, chosen=CONTENT, rejected=CONTENT)
def test_pairs_equal_their_two_conversations(chats, kind, question, chosen, rejected):
    chat = chats[kind]
    prompt = messages("x", "y", question)
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    pair = encode_pairs(chat, [(prompt, chosen, rejected)])[0]
    for ids, mask, completion in (
        (pair.chosen_ids, pair.chosen_supervised, chosen),
        (pair.rejected_ids, pair.rejected_supervised, rejected),
    ):
        whole = chat.encode([prompt + completion])[0]
        assert np.concatenate([pair.prompt_ids, ids]).tolist() == whole.ids.tolist()
        assert mask.tolist() == whole.mask(whole.spans[1:])[len(pair.prompt_ids) :].tolist()
        assert mask.any()


def test_stop_ids_contain_eos_and_the_end_of_turn(chats):
    assert chats["trained-bpe"].stop_ids == (chats["trained-bpe"].eos_id,)
    byte_level = chats["byte-level"]
    assert set(byte_level.stop_ids) == {byte_level.control.ids["<|endoftext|>"], byte_level.control.ids["<|end|>"]}


def test_nothing_to_encode(chats):
    assert chats["trained-bpe"].encode([]) == []
    assert encode_pairs(chats["trained-bpe"], []) == []


def test_a_refused_conversation_is_named(chats):
    with pytest.raises(SnaketuneError, match=r"knows the roles.*not tool.*\[user, tool\]"):
        chats["metaspace"].encode(
            [messages("x", "y"), [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]]
        )


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(SnaketuneError, match="has no usable tokenizer"):
        ChatTokenizer.load(tmp_path)


def test_encoding_imports_no_torch(chats):
    folder = chats["folders"]["trained-bpe"]
    script = f"""
import sys
from pathlib import Path
from snaketune.tokenization.chat import ChatTokenizer
chat = ChatTokenizer.load(Path({str(folder)!r}))
chat.encode([[{{"role": "user", "content": "a <|im_end|>"}}, {{"role": "assistant", "content": "b"}}]])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_shipped_templates_write_contents_unchanged_and_prompts_are_prefixes():
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    conversation = messages("\n q1 \n", "  a1\n", " q2", "\ta2 ", system=" s \n")
    for path in (CHATML, PHI3, PHI3.with_name("mistral.jinja")):
        template = path.read_text()
        (whole,), (spans,) = render(template, [conversation], variables)
        for message in conversation:
            assert message["content"] in whole, path
        assert [whole[start:end].count(turn) for (start, end), turn in zip(spans, ("  a1\n", "\ta2 "))] == [1, 1]
        for turns in (2, 4):
            (prompt,), _ = render(template, [conversation[:turns]], variables, add_generation_prompt=True)
            assert whole.startswith(prompt) and len(prompt) in [start for start, _ in spans], path
