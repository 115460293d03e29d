"""The scripts of `make real`: files are the expected ones, tasks are the same every time, answers are shown side by side."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "resources/real"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def test_another_file_than_the_expected_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put("data/gsm8k/train.jsonl", "{}")
    with pytest.raises(
        SystemExit, match=r"data/gsm8k/train.jsonl isn't the file at https://.*44136fa355.*expected 17f347dc51"
    ):
        script("fetch").fetch_files()


def test_a_file_that_cannot_be_downloaded_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fetch = script("fetch")

    def refused(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refused)
    with pytest.raises(SystemExit, match=r"data/gsm8k/train.jsonl: can't download .* put the file there yourself"):
        fetch.fetch_files()


def test_tasks_have_one_right_answer_each_and_are_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(
        "data/gsm8k/test.jsonl",
        "".join(json.dumps({"question": f"q{n}", "answer": f"a\n#### {n}"}) + "\n" for n in range(9)),
    )
    put(
        "data/svamp/SVAMP.json",
        json.dumps([{"Body": f"b{n}.", "Question": "q?", "Answer": float(n)} for n in range(9)]),
    )
    written = []
    for _ in range(2):
        script("fetch").write_tasks()
        written.append({path.name: path.read_bytes() for path in Path("data/real_tasks").iterdir()})
    assert written[0] == written[1]
    assert set(written[0]) == {f"{name}_choice.{kind}" for name in ("gsm8k", "svamp") for kind in ("jsonl", "yaml")}
    for number, line in enumerate(written[0]["svamp_choice.jsonl"].decode().splitlines()):
        row = json.loads(line)
        assert row["question"] == f"b{number}. q?"
        assert row["choices"][row["label"]] == f"#### {number}"
        assert len(set(row["choices"])) == 3


def test_answers_are_shown_by_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for model in ("base-x", "sft-x"):
        row = {"id": "1", "corpus": "c", "prompt": "[user] Hi?", "response": f"{model} says"}
        put(f"results/eval/e/{model}/scores/responses.jsonl", json.dumps(row) + "\n")
    script("show_answers").main("e")
    assert capsys.readouterr().out.split() == [
        "c:",
        "[user]",
        "Hi?",
        "base-x",
        "base-x",
        "says",
        "sft-x",
        "sft-x",
        "says",
    ]
    with pytest.raises(SystemExit, match="has no responses"):
        script("show_answers").main("other")
