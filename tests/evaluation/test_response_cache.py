"""Responses that were written already are taken, whole and from any job; those of anything else, and damaged ones, never."""

import threading

import numpy as np
import pytest

from snaketune.evaluation.generation import GeneratedText
from snaketune.evaluation.response_cache import ResponseCache, prompt_digest
from snaketune.stages.cache.clean import clean

WEIGHTS = {"weights": ["a"], "decoding": {"seed": 0}}
ODD = GeneratedText('½\u2028\n\x85 {"text"} \ud800', 3)


def test_what_one_job_wrote_another_finds(tmp_path):
    first = ResponseCache(tmp_path, WEIGHTS)
    assert first.known == {}
    first.add({"p": ODD})
    first.add({"q": GeneratedText("", 0)})
    again = ResponseCache(tmp_path, WEIGHTS)
    assert again.known == {"p": ODD, "q": GeneratedText("", 0)}
    assert again.key == first.key
    assert ResponseCache(tmp_path, WEIGHTS | {"weights": ["b"]}).known == {}
    assert ResponseCache(tmp_path, WEIGHTS | {"decoding": {"seed": 1}}).known == {}


def test_prompts_are_told_apart_by_their_tokens():
    assert prompt_digest(np.array([1, 2], np.int32)) == prompt_digest(np.array([1, 2], np.int64))
    assert len({prompt_digest(np.array(ids, np.int32)) for ids in ([], [1], [1, 2], [2, 1], [258])}) == 5


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-5], lambda text: text.replace(b"right", b"wrong"), lambda text: b""]
)
def test_a_damaged_file_is_removed_and_not_read(tmp_path, damage, capsys):
    ResponseCache(tmp_path, WEIGHTS).add({"p": GeneratedText("right", 1)})
    ResponseCache(tmp_path, WEIGHTS).add({"q": GeneratedText("whole", 1)})
    path = next(path for path in tmp_path.rglob("*.jsonl") if b"right" in path.read_bytes())
    path.write_bytes(damage(path.read_bytes()))
    assert ResponseCache(tmp_path, WEIGHTS).known == {"q": GeneratedText("whole", 1)}
    assert "is damaged" in capsys.readouterr().out
    assert not path.exists()


def test_many_jobs_add_at_once(tmp_path):
    jobs = [ResponseCache(tmp_path, WEIGHTS) for _ in range(8)]
    same = [
        threading.Thread(target=job.add, args=({"p": ODD, f"q{n}": GeneratedText("x", n)},))
        for n, job in enumerate(jobs)
    ]
    for thread in same:
        thread.start()
    for thread in same:
        thread.join()
    assert ResponseCache(tmp_path, WEIGHTS).known == {"p": ODD} | {f"q{n}": GeneratedText("x", n) for n in range(8)}
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_that_cannot_be_written_to_loses_nothing(tmp_path):
    (tmp_path / ".responses").write_text("in the way")
    kept = ResponseCache(tmp_path, WEIGHTS)
    kept.add({"p": ODD})
    assert kept.known == {"p": ODD}


def test_cleaning_keeps_what_a_published_evaluation_has(tmp_path, capsys):
    work, published = tmp_path / "results/.work", tmp_path / "results/eval/e/sft-a"
    current, old = ResponseCache(work, WEIGHTS), ResponseCache(work, {})
    for kept in (current, old):
        kept.add({"p": ODD})
    published.mkdir(parents=True)
    (published / "manifest.json").write_text(f'{{"fingerprint": "f", "generation": {{"responses": "{current.key}"}}}}')
    clean(work, remove=False)
    assert old.folder.exists() and "would remove" in capsys.readouterr().out
    clean(work, remove=True)
    assert current.folder.exists() and not old.folder.exists()
