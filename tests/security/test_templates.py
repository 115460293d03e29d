"""Templates that come with models, and texts that look like templates: no code, no files, no end without an end."""

import time

import pytest

from snaketune.config.task_files import task_files
from snaketune.corpus.selecting.evaluation_ngrams import texts_of_file
from snaketune.errors import SnaketuneError
from snaketune.report.html import environment
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization import template
from snaketune.tokenization.template import render
from snaketune.tokenization.vocabulary import build

TURNS = [
    {"role": "user", "content": "{{ 7 * 7 }}{% raise %}{{ ''.__class__ }}"},
    {"role": "assistant", "content": "yes"},
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__base__ }}",
    "{{ '{0.__class__.__base__}'.format(messages) }}",
    "{% set f = '%s'.__mod__.__self__ %}{{ f.__class__ }}",
    "{% include '/etc/hostname' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/hostname' %}",
    "{{ messages.append(messages) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_gets_no_further_than_the_conversation(text, mark, tmp_path):
    try:
        (said,), _ = render(text.replace("MARK", str(mark.path)), [TURNS], {})
    except SnaketuneError as error:
        assert "the chat template refuses a conversation" in str(error)
    else:
        # A missing field is empty.
        assert "class" not in said and "function" not in said
    assert TURNS[0]["role"] == "user" and len(TURNS) == 2


def test_what_people_say_is_no_template():
    (said,), _ = render("{% for m in messages %}{{ m.content }}{% endfor %}", [TURNS], {})
    assert said.startswith("{{ 7 * 7 }}{% raise %}{{ ''.__class__ }}")
    shown = environment().from_string("{{ said }}").render(said=TURNS[0]["content"] + "<script>")
    assert shown == "{{ 7 * 7 }}{% raise %}{{ &#39;&#39;.__class__ }}&lt;script&gt;"


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for a in range(99999) %}{{ m() if a < 0 }}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endmacro %}{{ m() }}",
        "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endgeneration %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(text, monkeypatch, tmp_path):
    monkeypatch.setattr(template, "SECONDS", 0.3)
    began = time.process_time()
    with pytest.raises(SnaketuneError, match=r"the chat template takes more than 0 s .* may never end"):
        render(text, [TURNS] * 50, {})
    assert time.process_time() - began < 5
    # And what comes after it has its own time.
    assert render("x", [TURNS], {})[0] == ["x"]


@pytest.mark.parametrize("text", ["{{ range(10 ** 9) | list }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_lists_and_calls_without_end_are_refused(text):
    with pytest.raises(SnaketuneError, match="the chat template refuses a conversation"):
        render(text, [TURNS], {})


def test_the_stage_names_the_template_in_errors(tmp_path, mark):
    (tmp_path / "own.jinja").write_text(ESCAPES[2].replace("MARK", str(mark.path)))
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=1.0, split_digits=True)
    with pytest.raises(SnaketuneError, match=r"tokenizers\.chat_template: .*own\.jinja: the chat template refuses"):
        build(spec, WorkFolder(tmp_path), chat_template=[tmp_path / "own.jinja"], base=[], corpora=[])


def test_a_folder_of_tasks_is_read_and_not_run_to_know_what_is_in_it(tmp_path, mark):
    """Only an evaluation runs it: a task of lm-eval is a program. Planning, fingerprints and decontamination don't."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "utils.py").write_text(mark.code("def text(row): return ''"))
    (folder / "rows.jsonl").write_text('{"q": "{{ 7 * 7 }}"}\n')
    (folder / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndoc_to_text: !function utils.text\n"
        f"dataset_kwargs: {{data_files: {folder / 'rows.jsonl'}}}\n"
    )
    result = task_files(str(folder))
    assert str(folder / "utils.py") in result.inside
    assert [text.text for path in result.data for text in texts_of_file(tmp_path / path)] == ["{{ 7 * 7 }}"]
    (folder / "t.yaml").write_text(f"task: !!python/object/apply:os.system ['touch {mark.path}']")
    with pytest.raises(SnaketuneError, match="can't be read as YAML"):
        task_files(str(folder))


def test_tasks_that_run_what_a_model_writes_are_refused_unseen(tmp_path):
    """Local ones whose module says so when it is imported, and one that is shipped."""
    from lm_eval.tasks import TaskManager

    from snaketune.config.task_files import tasks_folder
    from snaketune.evaluation.task_code import refuse_code

    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nscore = 'code_eval'\n", encoding="utf-8")
    (tmp_path / "t.yaml").write_text(
        "task: t\ndataset_path: x/y\nprocess_results: !function own.score\n", encoding="utf-8"
    )
    for folder, name in ((tmp_path, "t"), (tasks_folder() / "humaneval", "humaneval_64")):
        index = TaskManager(include_path=str(folder), include_defaults=False).task_index
        with pytest.raises(SnaketuneError, match="runs code that the model writes"):
            refuse_code(index, (name,))
    assert not ran.exists()
    # Such a module does run where it is imported.
    import_module_from(tmp_path / "own.py")
    assert ran.exists()


def import_module_from(path):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("own", path)
    spec.loader.exec_module(module_from_spec(spec))
