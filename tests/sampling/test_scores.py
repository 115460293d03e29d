"""Scores of responses: by the corpus' answers, by a function of the user's, and sums; kept by row."""

import json
import os
import signal
import threading
import time
from multiprocessing.context import SpawnProcess

import pytest

from snaketune.artifacts.manifest import Artifact
from snaketune.config.scoring import AnswerScore
from snaketune.errors import SnaketuneError
from snaketune.patterns import TooSlow
from snaketune.sampling.scorer import Scorer
from snaketune.sampling.scores import build
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import ScoreSpec
from snaketune.tables import read_table, write_table

from .conftest import TEXTS, artifact

PATTERN = AnswerScore(pattern=r"Answer: ([^\n]*)")


@pytest.fixture
def scored(tmp_path, samples):
    """Returns a function that runs the stage: the outcome, and the table's columns besides the keys."""
    made = []

    def run(spec: ScoreSpec, code: str = "", scores: tuple[Artifact, ...] = ()):
        work = WorkFolder(tmp_path / f"results/.work/score/{len(made)}")
        made.append(work.start())
        python = tmp_path / "scorer.py"
        python.write_text(code)
        outcome = build(spec, work, samples=samples, scores=scores, python=[python] if code else [])
        table = read_table(work.payload / "scores.arrow").to_pydict()
        assert list(zip(table.pop("id"), table.pop("turn"), table.pop("index"))) == [
            (f"p{n}", 1, index) for n in range(3) for index in range(4)
        ]
        return outcome, table, artifact(work.payload)

    return run


def test_an_answer_is_right_or_wrong_where_the_row_has_one(scored):
    outcome, table, _ = scored(ScoreSpec(answer=PATTERN))
    assert table == {"score": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, None, None, None, None]}
    assert outcome.counts == {"responses": 12, "scored": 8, "without": {"the row has no answer": 4}}
    assert outcome.about["mean"] == 0.25


def test_a_function_gets_prompt_response_and_row_and_may_return_several_numbers(scored):
    code = (
        "def score(prompt, response, row):\n"
        "    print('noise')\n"
        "    assert prompt[0]['content'].startswith('Q') and row['content'] in response and row['tokens'] == [1, 2]\n"
        "    return {'score': len(row['content']), 'known': row['answer'] is not None}\n"
    )
    _, table, _ = scored(ScoreSpec(python=True, seconds=10), code)
    assert table["score"] == [float(len(text)) for text in TEXTS] * 3 and table["known"] == [1.0] * 8 + [0.0] * 4


def test_what_fails_takes_too_long_or_ends_the_process_has_no_score_and_the_rest_has(scored, capsys):
    code = (
        "import os, time\n"
        "def score(prompt, response, row):\n"
        "    if 'Q0' not in prompt[0]['content']: return 1\n"
        "    if row['index'] == 0: raise ValueError('odd row')\n"
        "    if row['index'] == 1: time.sleep(60)\n"
        "    if row['index'] == 2: os._exit(3)\n"
        "    return float('nan')\n"
    )
    outcome, table, _ = scored(ScoreSpec(python=True, seconds=0.5), code)
    assert table["score"] == [None] * 4 + [1.0] * 8
    reasons = list(outcome.counts["without"])
    assert reasons[:3] == ["ValueError: odd row", "it took more than 0.5 s", "the scorer's process ended"]
    assert "finite numbers" in reasons[3] and "response 0 to p0: ValueError: odd row" in capsys.readouterr().out


def test_ctrl_c_ends_a_call_and_its_process(tmp_path):
    file = tmp_path / "scorer.py"
    file.write_text(
        "import os, time\n"
        "def score(*_):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    request = {"prompt": [], "response": "", "row": {}}

    def interrupt() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), Scorer(file, 60) as scorer:
        scorer.score(request)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_why_a_process_does_not_start_is_raised(tmp_path, monkeypatch):
    def start(process: SpawnProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SpawnProcess, "start", start)
    with pytest.raises(KeyboardInterrupt), Scorer(tmp_path / "scorer.py", 1) as scorer:
        scorer.score({})


def test_a_function_may_print_to_any_stream_and_start_processes(scored, capfd):
    code = (
        "import os, subprocess, sys\n"
        "def score(prompt, response, row):\n"
        "    os.write(1, b'[1] below Python')\n"
        "    subprocess.run(['echo', '{}'], check=True)\n"
        "    with subprocess.Popen([sys.executable, '-c', 'print(7)'], stdout=subprocess.PIPE, text=True) as process:\n"
        "        return int(process.stdout.read()) + len(sys.stdin.read())\n"
    )
    _, table, _ = scored(ScoreSpec(python=True, seconds=10), code)
    assert table["score"] == [7.0] * 12
    out, error = capfd.readouterr()
    assert (out + error).count("[1] below Python") == 12


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def scores(): pass", "defines no function `score`"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("def score(", "SyntaxError"),
        ("raise SystemExit(3)", "the scorer's process ended"),
        ("def score(*_): return {'score': 1, 'turn': 2}", "a number called 'turn'"),
        ("def score(*_): return 'high'", "none of the 12 responses has a score"),
    ],
)
def test_a_file_that_scores_nothing_is_refused(scored, code, said):
    with pytest.raises(SnaketuneError, match=said):
        scored(ScoreSpec(python=True, seconds=5), code)


def test_scores_of_a_function_are_kept_by_row(scored, tmp_path):
    code = f"def score(p, r, row):\n    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n    return row['index']\n"
    spec = ScoreSpec(python=True, seconds=10)
    scored(spec, code)
    assert len((tmp_path / "calls").read_text()) == 12
    _, table, _ = scored(spec, code)
    assert len((tmp_path / "calls").read_text()) == 12 and table["score"] == [0.0, 1.0, 2.0, 3.0] * 3
    scored(spec, code + "# another file\n")
    assert len((tmp_path / "calls").read_text()) == 24


def test_a_sum_weighs_scores_of_the_same_responses(scored, samples):
    _, _, checked = scored(ScoreSpec(answer=PATTERN))
    _, _, short = scored(ScoreSpec(python=True, seconds=10), "def score(p, r, row): return -row['index']")
    _, table, _ = scored(ScoreSpec(weights=(1.0, 0.25)), scores=(checked, short))
    assert table["score"] == [1.0, -0.25, -0.5, -0.75, 0.0, 0.75, -0.5, -0.75, None, None, None, None]
    path = checked.folder / "scores.arrow"
    write_table(path, read_table(path).slice(0, 4))
    with pytest.raises(SnaketuneError, match="another sample"):
        scored(ScoreSpec(weights=(1.0, 1.0)), scores=(artifact(checked.folder), short))


def test_a_pattern_that_takes_too_long_names_the_response(scored, monkeypatch):
    def slow(*_):
        raise TooSlow("it takes too long")

    monkeypatch.setattr("snaketune.sampling.scores.search", slow)
    with pytest.raises(SnaketuneError, match=r"score.by.answer.pattern, response to p0: the pattern"):
        scored(ScoreSpec(answer=PATTERN))


def test_the_scores_have_a_manifest_without_times(scored):
    outcome, _, _ = scored(ScoreSpec(answer=PATTERN))
    assert json.loads(json.dumps(outcome.about)) == {"mean": 0.25}
