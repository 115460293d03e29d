"""A judge compares two models' responses in both orders; what is shown where doesn't change what a verdict means."""

import json
import re
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.evaluation import comparison
from snaketune.evaluation.comparison import VERDICT
from snaketune.patterns import search_last
from snaketune.sampling.judge_models import Answer
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import CompareSpec
from snaketune.tables import read_table

FIELDS = {"server_model": "judge", "base": None, "trust_remote_code": False, "frozen_weights": True}
SPEC = CompareSpec(**FIELDS, max_new_tokens=64, batch_size=8, prompts=9)


def evaluation(folder: Path, responses: dict[str, str]) -> Artifact:
    folder.mkdir(parents=True)
    rows = [
        {"corpus": "chat", "id": id, "prompt": f"[user] {id}?", "response": text, "tokens": len(text)}
        for id, text in responses.items()
    ]
    (folder / "responses.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    manifest = {"payload": describe_files(folder), "records": {}}
    manifest["spec"] = {"generation": {"max_new_tokens": 14}}
    return Artifact(folder.parent / "manifest.json", manifest, folder)


class Preferring:
    """A judge that replies what a function says of the two responses, in the order in which it is shown them."""

    def __init__(self, verdict):
        self.verdict, self.asked = verdict, []

    def ask(self, questions):
        self.asked += questions
        return [Answer(self.verdict(*self.shown(question)), complete=True) for question in questions]

    def shown(self, question) -> tuple[str, str]:
        pattern = r"=+ [0-9a-f]{16} response A\n(.*?)\n=+ [0-9a-f]{16} response B\n(.*?)\n=+ [0-9a-f]{16} end"
        return re.search(pattern, question[0]["content"], re.DOTALL).groups()

    def about(self):
        return {"judge": {"name": "server", "model": "judge"}}

    def run(self):
        return {}


def compared(monkeypatch, tmp_path: Path, verdict, ours: dict[str, str], theirs: dict[str, str]):
    tmp_path.mkdir(exist_ok=True)
    judge, rubric = Preferring(verdict), tmp_path / "rubric.md"
    rubric.write_text("Longer is better.")
    work = WorkFolder(tmp_path / "results/.work/compare/0")
    work.start()
    artifacts = [evaluation(tmp_path / name / "scores", rows) for name, rows in (("ours", ours), ("theirs", theirs))]
    monkeypatch.setattr(comparison, "judge_of", lambda *_, **__: judge)
    evaluated, opponent = artifacts
    outcome = comparison.build(
        SPEC, work, evaluated=evaluated, opponent=opponent, rubric=[rubric], operation=Execution()
    )
    verdicts = {
        row["id"]: (row["first"], row["second"]) for row in read_table(work.payload / "verdicts.arrow").to_pylist()
    }
    return json.loads((work.payload / "win_rate.json").read_text()), verdicts, judge, outcome


OURS = {"a": "long answer", "b": "no", "c": "same", "d": "odd\u2028line", "only ours": "x"}
THEIRS = {"a": "short", "b": "yes, certainly", "c": "same", "d": "odd line", "only theirs": "x"}


def test_a_verdict_is_of_the_models_and_not_of_the_places(tmp_path, monkeypatch):
    def longer(a: str, b: str) -> str:
        return "**Verdict: A**" if len(a) > len(b) else "Verdict: B" if len(b) > len(a) else "verdict: tie"

    scores, verdicts, judge, outcome = compared(monkeypatch, tmp_path, longer, OURS, THEIRS)
    assert verdicts == {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (0.5, 0.5), "d": (0.5, 0.5)}
    assert (scores["win_rate"], scores["wins"], scores["ties"], scores["losses"]) == (0.5, 1, 2, 1)
    assert scores["position_bias"] == 0.0 and scores["equal"] == 1
    # Equal responses aren't paid for.
    assert len(judge.asked) == 6 and outcome.counts["verdicts"] == 6
    assert "Longer is better." in judge.asked[0][0]["content"] and "[user] a?" in judge.asked[0][0]["content"]


def test_a_judge_of_places_gives_no_model_a_win(tmp_path, monkeypatch):
    scores, verdicts, _, _ = compared(monkeypatch, tmp_path, lambda a, b: "Verdict: A", OURS, THEIRS)
    assert verdicts["a"] == (1.0, 0.0)
    assert (scores["win_rate"], scores["position_bias"], scores["inconsistent"]) == (0.5, 0.75, 0.75)


def test_unclear_verdicts_are_asked_for_once_more_and_counted(tmp_path, monkeypatch):
    scores, verdicts, judge, outcome = compared(
        monkeypatch, tmp_path, lambda a, b: "Verdict: neither" if "long" in a + b else "Verdict: B", OURS, THEIRS
    )
    assert verdicts["a"] == (None, None) and verdicts["b"] == (0.0, 1.0)
    assert scores["unclear"] == 0.25 and scores["judged"] == 3 and outcome.counts["asked_again"] == 2
    assert len(judge.asked) == 8 and judge.asked[-1][-1]["content"].startswith("Your answer could not be read.")


def test_nothing_in_common_or_nothing_readable_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(SnaketuneError, match="no response to the same prompt"):
        compared(monkeypatch, tmp_path / "1", lambda a, b: "Verdict: A", {"a": "x"}, {"b": "y"})
    with pytest.raises(SnaketuneError, match=r"none of the 2 verdicts can be read; .*'both are fine'"):
        compared(monkeypatch, tmp_path / "2", lambda a, b: "both are fine", {"a": "x"}, {"a": "y"})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Verdict: A", "A"), ("**Verdict: B**", "B"), ("verdict: tie.", "tie"), ("Verdict: a tie", "tie"),
        ('So "Verdict: A"', "A"), ("Verdict:\nB", "B"), ("Verdict: A\nNo, Verdict: B", "B"),
        ("Verdict: A is not as good as B", None), ("Verdict: A/B", None), ("Verdict: neither", None),
        ('"Verdict: A", "Verdict: B" or "Verdict: tie". So let me', None),
    ],
)  # fmt: skip
def test_a_verdict_ends_its_line(reply, expected):
    match = search_last(VERDICT, reply)
    assert (match and match[1]) == expected
