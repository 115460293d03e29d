"""Prompts that the chat template refuses are skipped and reported; prompts have their rows' template variables."""

import pyarrow as pa
import pytest

from snaketune.corpus.rows import SCHEMAS, VARIABLES
from snaketune.errors import SnaketuneError
from snaketune.evaluation.exact_match import Prompt, choose_prompts
from snaketune.evaluation.held_out_prompts import _encode_prompts
from tests.tokenization.small_tokenizers import LLAMA3, chat_of, families, messages

REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + LLAMA3


def prompt(id: str, turns: list[dict[str, str]]) -> Prompt:
    return Prompt(id=id, corpus="chat", task=None, messages=turns, tools=None, answer=None)


def test_a_refused_prompt_is_skipped_and_reported(tmp_path, capsys):
    chat = chat_of(tmp_path / "tokenizer", families()["gpt2"], REFUSES)
    prompts = [prompt("a", messages("x")), prompt("b", messages("x", system="s")), prompt("c", messages("y"))]
    accepted, tokens = _encode_prompts(chat, prompts, {})
    assert [one.id for one in accepted] == ["a", "c"]
    assert [ids.tolist() for ids in tokens] == [chat.encode_prompt(messages(text)).tolist() for text in ("x", "y")]
    assert (
        "skipped: prompt b of chat: the chat template refuses a conversation: no system turns"
        in capsys.readouterr().out
    )


def test_prompts_have_the_variables_of_their_rows_unless_the_evaluation_sets_them(tmp_path):
    chat = chat_of(tmp_path / "tokenizer", families()["gpt2"], "{{ mood }}{{ place }}" + LLAMA3)
    rows = [
        {"id": name, "messages": messages("x", "y"), "template_variables": variables}
        for name, variables in (("a", '{"mood": "glad", "place": "here"}'), ("b", None))
    ]
    schema = SCHEMAS["conversations"].append(VARIABLES)
    table = pa.table({field.name: [row.get(field.name) for row in rows] for field in schema}, schema=schema)
    prompts = choose_prompts("chat", table, None, 2)
    assert [one.template_variables for one in prompts] == [rows[0]["template_variables"], None]

    def beginnings(variables: dict) -> list[str]:
        return [chat.text(ids).split("<s>", 1)[0] for ids in _encode_prompts(chat, prompts, variables)[1]]

    assert beginnings({}) == ["gladhere", ""]
    assert beginnings({"mood": "sad"}) == ["sadhere", "sad"]
    with pytest.raises(SnaketuneError, match=r"'tone'.* it uses mood, place"):
        beginnings({"tone": "x"})
    # Corpora without variables have no such column.
    assert choose_prompts("chat", table.drop_columns(["template_variables"]), None, 2)[0].template_variables is None
