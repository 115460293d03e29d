"""Prompts that the chat template refuses are skipped and reported."""

from snaketune.evaluation.exact_match import Prompt
from snaketune.evaluation.model_scores import _encode_prompts
from tests.tokenization.small_tokenizers import LLAMA3, chat_of, families, messages

REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + LLAMA3


def prompt(id: str, turns: list[dict[str, str]]) -> Prompt:
    return Prompt(id=id, corpus="chat", task=None, messages=turns, tools=None, answer=None)


def test_a_refused_prompt_is_skipped_and_reported(tmp_path, capsys):
    chat = chat_of(tmp_path / "tokenizer", families()["gpt2"], REFUSES)
    prompts = [prompt("a", messages("x")), prompt("b", messages("x", system="s")), prompt("c", messages("y"))]
    accepted, tokens = _encode_prompts(chat, prompts)
    assert [one.id for one in accepted] == ["a", "c"]
    assert [ids.tolist() for ids in tokens] == [chat.encode_prompt(messages(text)).tolist() for text in ("x", "y")]
    assert (
        "skipped: prompt b of chat: the chat template refuses a conversation: no system turns"
        in capsys.readouterr().out
    )
