"""Cached responses are reused by any job; those of other keys, and damaged ones, never."""

import threading

import numpy as np
import pytest

from snaketune.evaluation.generation import GeneratedText
from snaketune.evaluation.response_cache import ResponseCache, prompt_digest
from snaketune.stages.cache.clean import clean

WEIGHTS = {"weights": ["a"], "decoding": {"seed": 0}}
ODD = GeneratedText('½\u2028\n\x85 {"text"} \ud800', 3)


def test_responses_of_one_job_are_reused_by_another(tmp_path):
    first = ResponseCache(tmp_path, WEIGHTS)
    assert first.known == {}
    first.add({"p": ODD})
    first.add({"q": GeneratedText("", 0)})
    again = ResponseCache(tmp_path, WEIGHTS)
    assert again.known == {"p": ODD, "q": GeneratedText("", 0)}
    assert again.key == first.key
    assert ResponseCache(tmp_path, WEIGHTS | {"weights": ["b"]}).known == {}
    assert ResponseCache(tmp_path, WEIGHTS | {"decoding": {"seed": 1}}).known == {}


def test_prompts_are_identified_by_their_tokens():
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


def test_concurrent_jobs_can_add_responses(tmp_path):
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


def test_an_unwritable_folder_loses_no_responses(tmp_path):
    (tmp_path / ".responses").write_text("in the way")
    cache = ResponseCache(tmp_path, WEIGHTS)
    cache.add({"p": ODD})
    assert cache.known == {"p": ODD}


def test_cleaning_retains_responses_of_published_evaluations(tmp_path, capsys):
    work, published = tmp_path / "results/.work", tmp_path / "results/eval/e/sft-a"
    current, old = ResponseCache(work, WEIGHTS), ResponseCache(work, {})
    for cache in (current, old):
        cache.add({"p": ODD})
    published.mkdir(parents=True)
    (published / "manifest.json").write_text(f'{{"fingerprint": "f", "generation": {{"responses": "{current.key}"}}}}')
    clean(work, remove=False)
    assert old.folder.exists() and "would remove" in capsys.readouterr().out
    clean(work, remove=True)
    assert current.folder.exists() and not old.folder.exists()
