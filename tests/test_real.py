"""The scripts of `make real`: rows are the same every time, answers are shown side by side."""

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


def test_orders_are_the_same_every_time_and_state_all_that_their_lines_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_orders = script("make_orders")
    written = []
    for _ in range(2):
        make_orders.main()
        written.append({path.name: path.read_bytes() for path in Path("data/orders").iterdir()})
    assert written[0] == written[1]
    orders, reviews = (
        [json.loads(line) for line in written[0][name].splitlines()] for name in ("orders.jsonl", "reviews.jsonl")
    )
    for row in orders:
        user, assistant = row["messages"]
        assert stated(make_orders, json.loads(assistant["content"]), user["content"])
    for row in reviews:
        chosen, rejected = json.loads(row["chosen"]), json.loads(row["rejected"])
        assert stated(make_orders, rejected, row["prompt"])
        assert chosen == rejected | {"day": rejected["day"][:3]}
    # Splits go by prompt.
    assert len({row["prompt"] for row in reviews}) > 0.95 * len(reviews)


def stated(make_orders, details, text: str) -> bool:
    quantity = details["quantity"]
    values = [value for key, value in details.items() if key not in ("quantity", "item")]
    number = any(f"{spelled} " in text.lower() for spelled in (str(quantity), make_orders.NUMBERS.get(quantity, "?")))
    return number and details["item"] in text.lower() and all(value in text for value in values)


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
