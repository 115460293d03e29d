"""Mistral's two kinds of vocabularies, each with its template: with a space after [INST], or without (tekken)."""

import pytest
from small_tokenizers import FRAMES, MISTRAL, TEMPLATES, byte_level_with, messages, metaspace, save_tokenizer
from test_tokenizer_stage import adopt
from tokenizers import Tokenizer

from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched import batched_encoder
from snaketune.tokenization.batched.separable import PATTERNS
from snaketune.tokenization.chat import ChatTokenizer

TEKKEN = TEMPLATES / "mistral-tekken.jinja"


def tekken(folder):
    """Save a tokenizer of the tekken kind: bytes, and no space before a text."""
    tokenizer = Tokenizer.from_str(byte_level_with(sorted(PATTERNS)[3], ignore_merges=True).to_str())
    tokenizer.add_special_tokens(FRAMES)
    return save_tokenizer(folder, tokenizer, None, bos_token="<s>", eos_token="</s>")


def test_each_vocabulary_refuses_the_template_of_the_other(tmp_path):
    with pytest.raises(
        SnaketuneError,
        match=r"chat_template.*1 spaces after \[INST\] \('ĠQuartz.*the tekken vocabulary.*mistral-tekken\.jinja",
    ):
        adopt(tmp_path / "1", tekken(tmp_path / "tekken"), MISTRAL)
    with pytest.raises(
        SnaketuneError,
        match=r"chat_template.*0 spaces after \[INST\] \('.*the sentencepiece vocabulary.*mistral\.jinja",
    ):
        adopt(tmp_path / "2", metaspace(tmp_path / "sentencepiece"), TEKKEN)


def test_each_vocabulary_accepts_its_own_template_and_templates_without_inst(tmp_path):
    for kind, own in ((tekken, TEKKEN), (metaspace, MISTRAL)):
        folder = kind(tmp_path / kind.__name__)
        for template in (own, TEMPLATES / "chatml.jinja"):
            # ChatML's end of turn isn't a token of these vocabularies.
            text = template.read_text().replace("<|im_end|>", "</s>")
            given = tmp_path / template.name
            given.write_text(text)
            adopt(tmp_path / f"{kind.__name__}-{template.stem}", folder, given)


def test_a_models_own_template_is_unchanged(tmp_path):
    folder = tekken(tmp_path / "tekken")
    (folder / "chat_template.jinja").write_text(MISTRAL.read_text())
    assert adopt(tmp_path / "1", folder)[1].about["adopted"]["chat_template"] == "the model's own"


def test_questions_and_answers_are_encoded_separately_and_the_system_turn_opens_the_last_question(tmp_path):
    folder = tekken(tmp_path / "tekken")
    chat = ChatTokenizer.load(adopt(tmp_path / "1", folder, TEKKEN)[0].payload)
    part = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    named = {name: [chat.control.ids[name]] for name in ("<s>", "</s>", "[INST]", "[/INST]")}

    def turns(*pairs: tuple[str, str]) -> tuple[list[int], list[list[int]]]:
        ids, answers = list(named["<s>"]), []
        for question, answer in pairs:
            answers.append(part(answer, add_special_tokens=False).ids + named["</s>"])
            ids += named["[INST]"] + part(question, add_special_tokens=False).ids + named["[/INST]"] + answers[-1]
        return ids, answers

    rows = {
        "plain": (messages("the cat", "sat 12 "), turns(("the cat", "sat 12 "))),
        "spaces": (messages("  a\n", "\n b"), turns(("  a\n", "\n b"))),
        "system": (messages("q", "a", system="be kind"), turns(("be kind\n\nq", "a"))),
        "two": (messages("q", "a", "r", "b", system="be kind"), turns(("q", "a"), ("be kind\n\nr", "b"))),
    }
    for name, (row, (expected, answers)) in rows.items():
        (done,) = chat.encode([row])
        assert done.ids.tolist() == expected, name
        assert [done.ids[start:end].tolist() for start, end in done.spans] == answers, name
        prompt = chat.encode_prompt(row[:-1]).tolist()
        assert prompt == expected[: len(prompt)] and len(prompt) == done.spans[-1][0]
    assert batched_encoder(chat)[1] == ""
    for wrong in (
        messages("a", "b") + messages("c", system="late"),
        [{"role": "tool", "content": "x"}, *messages("a", "b")],
    ):
        with pytest.raises(SnaketuneError, match="the mistral-tekken template"):
            chat.encode([wrong])
