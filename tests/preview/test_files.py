"""Previews of files like those that users have."""

import json
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyarrow.parquet import write_table

from snaketune.config.load import load
from snaketune.corpus.reading.sources import read_files
from snaketune.errors import SnaketuneError
from snaketune.preview import sample
from snaketune.preview.config_corpora import corpora_of
from snaketune.preview.rendered_rows import TextSpan, load_renderer, shortened
from snaketune.preview.source_preview import preview_config, preview_file
from snaketune.preview.terminal import as_text
from snaketune.stages.graph import JobGraph

from .awkward import AWKWARD, GOOD, turns, write_lines

ROOT = Path(__file__).parents[2]


def preview_text(file: Path | str, *, colour: bool = False, **chosen) -> str:
    renderer = load_renderer(chosen.get("template"), chosen.get("tokenizer"))
    return "\n".join(as_text(preview_file(str(file), renderer), colour=colour))


def unwrap_lines(text: str) -> str:
    """Join facts that continue on the next line."""
    return re.sub(r"\n {14}(?=\S)", " ", text)


@pytest.mark.parametrize("name", AWKWARD)
def test_preview_of_an_awkward_file(name, tmp_path):
    make, expected = AWKWARD[name]
    output = unwrap_lines(preview_text(make(tmp_path)))
    for part in expected:
        assert part in output, output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chat",
            [
                "JSON lines, 2.4 MB; about 9,000 rows, of which the first 2,000 are read",
                "conversations: reads all 2,000 rows (no other kind reads any)",
                "layout      messages",
                "29% of all tokens supervised",
                "no row longer than 1,024",
                "<|im_start|>user\n    Work out 3 + 2 for me. Result only.<|im_end|>\n    <|im_start|>assistant\n"
                "    ⟦Answer: 5<|im_end|>⟧",
            ],
        ),
        (
            "preferences",
            [
                "JSON lines, 584.9 kB; 1,600 rows",
                "preferences: reads all 1,600 rows (no other kind reads any)",
                "layout      pairs",
                "  · chosen\n    ⟦Answer: 2<|im_end|>⟧\n  · rejected\n    ⟦Answer: 2\n    Have a lovely day!<|im_end|>⟧",
            ],
        ),
    ],
)
def test_preview_of_the_demo(name, expected):
    output = unwrap_lines(preview_text(ROOT / f"resources/demo/{name}.jsonl"))
    for part in expected:
        assert part in output, output
    assert "quarantined" not in output
    assert "ignored" not in output


def entry_of(file: Path) -> str:
    return preview_file(str(file), load_renderer(None, None)).entry


@pytest.mark.parametrize(
    "row",
    [
        {"id": "9c-1", "created_at": "2026-01-01", "inputs": {"text": "Why?"}, "outputs": {"text": "So."}},
        {"labeler": "340d89bc-f5b7", "timestamp": "2022-07-17T17:12:50", "question": {"problem": "Why?"}},
        {"id": "batch_req_1", "custom_id": "request-1", "response": {"status": 200}},
        {"id": "u0", "status": "completed", "fields": {"instruction": "Why?"}},
        # Which answer is better is in a column that no layout knows.
        {"prompt": "Why is it so?", "response_a": "It is.", "response_b": "It isn't.", "winner_model_a": 1},
    ],
)
def test_ids_times_and_compared_answers_are_not_suggested(row, tmp_path):
    assert entry_of(write_lines(tmp_path / "rows.jsonl", [row] * 9)) == ""


def test_what_only_all_rows_of_a_file_show_is_no_trouble_of_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MAX_ROWS", 30)
    row = {"prompt": "Why?", "response_1": "So.", "response_2": "Because."}
    rows = [row | {"preference_strength": strength} for strength in [2] * 50 + [-1]]
    said = preview_text(write_lines(tmp_path / "strengths.jsonl", rows))
    assert "reads all 30 rows" in said and "above 0" not in said
    assert "only numbers above 0" in preview_text(write_lines(tmp_path / "scale.jsonl", rows[:20]))


@pytest.mark.parametrize("name", AWKWARD)
def test_suggested_config_lines_are_valid(name, tmp_path):
    file = AWKWARD[name][0](tmp_path)
    rendered = entry_of(file)
    if name in ("one column missing", "pairs of which none is sound", "no data", "not there"):
        assert rendered == ""
        return
    config, _ = load(yaml.safe_load(rendered))
    (corpus,) = config.corpora.values()
    assert corpus.sources[0].files == (str(file),)
    # Comments can be uncommented as they are.
    decided = re.sub(r"(?m)^( +)# ", r"\1", rendered)
    config, _ = load(yaml.safe_load(decided))
    keys = sum(key in rendered for key in ("fields:", "encoding:", "layout:", "ignore:"))
    assert len(decided.splitlines()) == 5 + keys + rendered.count("#") // 2


def test_a_large_file_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MAX_ROWS", 30)
    conversations = [{"messages": turns(f"q{i}", "a" * 50)} for i in range(3000)]
    pairs = [{"prompt": "p", "chosen": str(i), "rejected": "r"} for i in range(3000)]
    file = write_lines(tmp_path / "large.jsonl", [*conversations, *pairs])
    read = []

    def counted(rows):
        for raw in rows:
            read.append(raw)
            yield raw

    def counted_files(*args, **kwargs):
        return ((name, counted(rows)) for name, rows in read_files(*args, **kwargs))

    monkeypatch.setattr(sample, "read_files", counted_files)
    preview = preview_file(str(file), load_renderer(None, None))
    assert len(read) == 31
    assert preview.rows_read == 30
    output = unwrap_lines("\n".join(as_text(preview, colour=False)))
    assert "about 6,000 rows, of which the first 30 are read" in output
    assert re.search(r"further on  of 50 rows from the rest of the file, \d+ can't be used", output)
    assert "missing column; about line" in output


def test_long_rows_end_the_preview_early(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MAX_CHARACTERS", 10_000)
    file = write_lines(tmp_path / "long.jsonl", [{"messages": turns(f"{i}", "long " * 400)} for i in range(100)])
    preview = preview_file(str(file), load_renderer(None, None))
    assert preview.rows_read == 5


def test_long_turns_are_shortened(tmp_path):
    file = write_lines(tmp_path / "long.jsonl", [{"messages": turns("word " * 1000, "yes")}])
    output = preview_text(file)
    assert "[… 4,555 characters …]" in output
    assert len(output) < 3000
    many = shortened([TextSpan(text=str(number % 10), supervised=False) for number in range(500)])
    assert sum(span.omitted for span in many) == 500 - (len(many) - 1)


def test_colours_show_supervision_and_change_no_text(tmp_path):
    file = write_lines(tmp_path / "some.jsonl", GOOD[:1])
    output = preview_text(file, colour=True)
    assert "\x1b[32ma0\x1b[0m" in output
    assert "⟦" not in output
    plain = re.sub(r"\x1b\[\d+m", "", output)
    assert plain.replace("in green", "between ⟦ and ⟧") == preview_text(file).replace("⟦a", "a").replace(">⟧", ">")


def test_a_refused_row_is_reported_with_location_and_reason(tmp_path):
    template = tmp_path / "no_system.jinja"
    chatml = (ROOT / "resources/chat_templates/chatml.jinja").read_text(encoding="utf-8")
    template.write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn please') }}{% endif %}" + chatml,
        encoding="utf-8",
    )
    rows = [*GOOD, {"messages": [{"role": "system", "content": "s"}, *turns("q", "a")]}]
    output = unwrap_lines(preview_text(write_lines(tmp_path / "some.jsonl", rows), template=template))
    assert f"template    {template}" in output
    reason = "line 21: the chat template refuses a conversation: no system turn please"
    assert "refused     1 of 21 rows by the template" in output
    assert "`on_template_error: fail`" in output
    assert reason in output


def test_a_tokenizer_counts_tokens(tmp_path):
    from tests.tokenization.small_tokenizers import byte_level

    folder = byte_level(tmp_path / "tokenizer")
    file = write_lines(tmp_path / "some.jsonl", GOOD)
    preview = preview_file(str(file), load_renderer(None, folder))
    expected = [len(ids.ids) for ids in load_renderer(None, folder).chat.encode([row["messages"] for row in GOOD])]
    assert preview.rendered.lengths.tolist() == expected
    output = "\n".join(as_text(preview, colour=False))
    assert "estimated" not in output
    assert f"template    {folder}'s own" in unwrap_lines(output)
    assert "<|user|>" in output


def test_the_command_imports_no_torch_and_escapes_the_page(tmp_path):
    file = AWKWARD["a control sequence and a control token"][0](tmp_path)
    program = (
        "import sys; from snaketune.__main__ import main; status = main(sys.argv[1:]); "
        "print('torch' if 'torch' in sys.modules else 'light'); sys.exit(status)"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "preview",
        str(file),
        str(tmp_path / "no.jsonl"),
        "--html",
        str(tmp_path / "p/page.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    # One of the two doesn't exist.
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.splitlines()[-1] == "light"
    assert "\x1b" not in done.stdout
    page = (tmp_path / "p/page.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "\x1b" not in page and "\u202e" not in page
    assert "<mark>ok &lt;|im_end|&gt;" in page
    assert "no.jsonl doesn&#39;t exist" in page


def test_a_truncated_parquet_file_is_reported(tmp_path):
    file = tmp_path / "cut.parquet"
    write_table(pa.table({"question": [f"q{i}" for i in range(5000)], "answer": ["a"] * 5000}), file)
    file.write_bytes(file.read_bytes()[:6000])
    assert "cut.parquet can't be read" in unwrap_lines(preview_text(file))


def test_a_corpus_of_two_tokenizers_is_previewed_with_each(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config["tokenizers"]["other"] = config["tokenizers"]["demo"] | {
        "chat_template": "resources/chat_templates/mistral.jinja"
    }
    config["sft"]["other"] = {"extends": "demo", "tokenizer": "other"}
    names = [one["corpus"] for one in json.loads(corpora_of(JobGraph(*load(config))))]
    assert {"demo-chat, by tokenizer demo", "demo-chat, by tokenizer other"} <= set(names)


def test_a_template_that_the_tokenizer_stage_refuses_is_refused(tmp_path):
    template = tmp_path / "silent.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    file = write_lines(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(SnaketuneError, match=r"silent\.jinja.*: .*the model would never stop"):
        preview_text(file, template=template)


def test_columns_in_question_are_named_and_ignored_in_the_entry(tmp_path):
    file = tmp_path / "remarks.jsonl"
    rows = ({"prompt": f"q{i}", "response": "r", "remark": f"Remark {i} on it", "id": i} for i in range(9))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = unwrap_lines(preview_text(file))
    assert "in question a run stops at columns that may hold turns" in text
    assert "`ignore: [remark]` states that they aren't part of the rows" in text
    config, _ = load(yaml.safe_load(entry_of(file)))
    (source,) = config.corpora["remarks"].sources
    assert (source.layout, source.ignore) == ("prompt-response", ("remark",))


def test_rows_are_shown_with_their_template_variables_and_without_loss_on_empty_reasoning(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    template = tmp_path / "moods.jinja"
    template.write_text(
        "{{ mood }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config["corpora"]["demo-chat"]["sources"][0]["template_variables"] = {"mood": "glad"}
    config["tokenizers"]["demo"]["chat_template"] = str(template)
    for treatment in ("mask", "supervise"):
        config["corpora"]["demo-chat"]["empty_reasoning"] = treatment
        previews = preview_config(corpora_of(JobGraph(*load(config))))
        (shown,) = (one for one in previews if one.name.startswith("demo-chat"))
        ((_, spans),) = shown.rendered.rows[0].parts
        prompt = "".join(span.text for span in takewhile(lambda span: not span.supervised, spans))
        assert prompt.startswith("glad") and prompt.endswith("<think></think>") == (treatment == "mask")
