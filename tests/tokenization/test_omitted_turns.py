"""If a chat template omits a turn, the stage fails and reports the number of rows."""

import re

import pytest
from small_tokenizers import LLAMA3, MISTRAL, chat_of, families, messages
from test_tokenize_stage import artifact, corpus_of, run

from snaketune.corpus.values.tools import tools_of
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer

# Like Mistral Nemo's: the system turn opens the last question if that is the last turn, which it never is in training.
LAST_QUESTION = """\
<s>{% set rest = messages[1:] if messages[0].role == 'system' else messages %}{% for m in rest %}
{%- if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{{- m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"""
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
)
MARKED = NO_SYSTEM.replace("<|im_end|>", "<|im_end|>{% endgeneration %}").replace(
    "{{ m.content", "{% generation %}{{ m.content"
)
ROWS = [
    messages("the cat", "sat", system="be kind"),
    messages("a", "b"),
    messages("c", "d", "e", "f", system="the cat"),
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    def of(template: str) -> ChatTokenizer:
        return chat_of(tmp_path_factory.mktemp("left-out") / "t", families()["gpt2"], template)

    return of


@pytest.mark.parametrize("template", [LAST_QUESTION, NO_SYSTEM, MARKED], ids=["last-question", "none", "marked"])
def test_the_stage_counts_rows_whose_system_turn_is_omitted(chat, template, tmp_path):
    own = chat(template)
    own.encode(ROWS[1:2])
    folder = tmp_path / "tokenizer"
    chat_of(folder, families()["gpt2"], template)
    expected = (
        rf"{re.escape(str(folder))}/chat_template.jinja omits the system turn of 20 of 40 rows.*'be kind'"
        r".*chat_template.*remove such turns"
    )
    with pytest.raises(SnaketuneError, match=expected):
        run(tmp_path / "work", corpus_of(tmp_path / "rows", {"messages": ROWS[:2] * 20}), artifact(folder))


def test_pairs_count_once(chat, tmp_path):
    folder = tmp_path / "tokenizer"
    chat_of(folder, families()["gpt2"], NO_SYSTEM)
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    columns = {"prompt": [row[:-1] for row in ROWS], "chosen": [answers[0]] * 3, "rejected": [answers[1]] * 3}
    with pytest.raises(SnaketuneError, match="omits the system turn of 2 of 3 rows"):
        run(tmp_path / "work", corpus_of(tmp_path / "rows", columns), artifact(folder), kind="preference")


def test_omitted_turns_of_other_roles_are_counted_too(chat, tmp_path):
    folder = tmp_path / "tokenizer"
    chat_of(folder, families()["gpt2"], LAST_QUESTION)
    answered = [*messages("a", "b"), {"role": "tool", "content": "result"}, {"role": "assistant", "content": "c"}]
    with pytest.raises(SnaketuneError, match="omits the tool turn of 1 of 4 rows"):
        run(tmp_path / "work", corpus_of(tmp_path / "rows", {"messages": [ROWS[1]] * 3 + [answered]}), artifact(folder))


def test_rows_whose_tools_are_omitted_too_are_counted(chat):
    own = chat(NO_SYSTEM)
    tools = tools_of([{"name": "now", "parameters": {"type": "object", "properties": {}}}])
    assert [own.omitted_turns(row, tools) for row in ROWS] == [[0], [], [0]]


def test_rows_whose_system_turn_is_written_are_not_refused(chat):
    own = chat(LAST_QUESTION)
    prompt = own.encode_prompt(ROWS[0][:-1])
    assert "be kind" in own.text(prompt)
    with pytest.raises(SnaketuneError, match="omits the system turn of a row"):
        own.encode_prompt(ROWS[2][:2] + ROWS[0][1:])
    # These templates trim it, or write it before the first question.
    for template in (LLAMA3, MISTRAL.read_text()):
        assert all("be kind" in chat(template).text(done.ids) for done in chat(template).encode(ROWS[:1]))
