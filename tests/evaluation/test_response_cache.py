"""Cached responses are reused by any job, and those of other keys never."""

import numpy as np

from snaketune.artifacts.manifest import write_manifest
from snaketune.evaluation.generation import GeneratedText
from snaketune.evaluation.model_scores import ResponseCache, prompt_digest
from snaketune.stages.cache.clean import clean

WEIGHTS = {"weights": ["a"], "decoding": {"seed": 0}}
ODD = GeneratedText('½\u2028\n\x85 {"text"} \ud800', 3)
P, Q = (prompt_digest(np.array([token])) for token in (1, 2))


def kept(work_root, key_parts):
    cache = ResponseCache(work_root, key_parts)
    cache.find([P, Q])
    return cache.known


def test_responses_of_one_job_are_reused_by_another(tmp_path):
    first = ResponseCache(tmp_path, WEIGHTS)
    first.add({P: ODD})
    first.add({Q: GeneratedText("", 0)})
    assert kept(tmp_path, WEIGHTS) == first.known == {P: ODD, Q: GeneratedText("", 0)}
    assert kept(tmp_path, WEIGHTS | {"weights": ["b"]}) == {}
    assert kept(tmp_path, WEIGHTS | {"decoding": {"seed": 1}}) == {}


def test_prompts_are_identified_by_their_tokens():
    assert prompt_digest(np.array([1, 2], np.int32)) == prompt_digest(np.array([1, 2], np.int64))
    assert len({prompt_digest(np.array(ids, np.int32)) for ids in ([], [1], [1, 2], [2, 1], [258])}) == 5


def test_an_unwritable_folder_loses_no_responses(tmp_path):
    (tmp_path / ".rows").write_text("in the way")
    cache = ResponseCache(tmp_path, WEIGHTS)
    cache.add({P: ODD})
    assert cache.known == {P: ODD}


def test_cleaning_retains_responses_of_published_evaluations(tmp_path, capsys):
    work, published = tmp_path / "results/.work", tmp_path / "results/eval/e/sft-a"
    current, old = ResponseCache(work, WEIGHTS), ResponseCache(work, {})
    for cache in (current, old):
        cache.add({P: ODD})
    published.mkdir(parents=True)
    manifest = {"fingerprint": "f", "generation": {"responses": current.rows.key}, "payload": {}, "records": {}}
    write_manifest(published / "manifest.json", manifest)
    clean(work, remove=False)
    assert old.rows.folder.exists() and "would remove" in capsys.readouterr().out
    clean(work, remove=True)
    assert current.rows.folder.exists() and not old.rows.folder.exists()
