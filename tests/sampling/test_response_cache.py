"""Cached responses are reused by any job, and those of other keys never."""

import shutil

import numpy as np
import pytest

from snaketune.artifacts.manifest import write_manifest
from snaketune.sampling.responses import Request, Response, ResponseCache
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.work_folders import WorkFolder

WEIGHTS = {"weights": ["a"], "decoding": {"seed": 0}}
ODD = Response('½\u2028\n\x85 {"text"} \ud800', [3, 4, 5], "stop", -1.25)
EMPTY = Response("", [], "length", None)
P, Q = (Request(np.array([token])) for token in (1, 2))
BOTH = {P.digest: ODD, Q.digest: EMPTY}


class Recorded:
    """An engine that has its responses already; it fails after `most`."""

    def __init__(self, name: str = "recorded", most: int = 99):
        self.name, self.most, self.asked = name, most, []

    def identity(self):
        return {"name": self.name}

    def about(self):
        return self.identity()

    def generate(self, wanted):
        for batch in wanted:
            if len(self.asked) >= self.most:
                raise KeyboardInterrupt
            self.asked += [request.digest for request in batch]
            yield {request.digest: BOTH[request.digest] for request in batch}


def complete(work_root, engine, wanted=((P,), (Q,)), parts=WEIGHTS):
    """The number of generated responses, and the cache."""
    cache = ResponseCache(WorkFolder(work_root / "generate/f"), engine, parts)
    generated, tokens = cache.complete(wanted)
    assert tokens <= 3 * generated
    return generated, cache


def test_files_of_a_run_that_fails_are_merged(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, Recorded(most=2), wanted=((P,), (Q,), (Request(np.array([3])),)))
    assert len(list(tmp_path.glob(".rows/*/*.arrow"))) == 1


def test_rows_of_unfinished_work_are_not_cleaned_away(tmp_path, capsys):
    work = tmp_path / "results/.work"
    with pytest.raises(KeyboardInterrupt):
        complete(work, Recorded(most=1))
    clean(work, remove=True)
    assert complete(work, Recorded())[0] == 1


def test_responses_of_one_job_are_reused_by_another(tmp_path):
    assert complete(tmp_path, Recorded())[0] == 2
    engine = Recorded()
    generated, cache = complete(tmp_path, engine)
    assert generated == 0 and not engine.asked and cache.known == BOTH
    for parts in (WEIGHTS | {"weights": ["b"]}, WEIGHTS | {"decoding": {"seed": 1}}):
        assert complete(tmp_path, Recorded(), parts=parts)[0] == 2
    # A server's responses are never taken for those of another engine.
    assert complete(tmp_path, Recorded("server"))[0] == 2


def test_a_kill_loses_the_batch_that_was_computed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        complete(tmp_path, Recorded(most=1))
    engine = Recorded()
    assert complete(tmp_path, engine)[0] == 1 and engine.asked == [Q.digest]


def test_a_request_is_identified_by_its_tokens_and_index():
    assert Request(np.array([1, 2], np.int32)).digest == Request(np.array([1, 2], np.int64)).digest
    prompts = [np.array(ids, np.int32) for ids in ([], [1], [1, 2], [2, 1], [258])]
    assert len({Request(prompt, index).digest for prompt in prompts for index in (0, 1, 10)}) == 15


def test_an_unwritable_folder_loses_no_responses(tmp_path):
    (tmp_path / ".rows").write_text("in the way")
    assert complete(tmp_path, Recorded())[1].known == BOTH


def test_cleaning_retains_responses_of_published_evaluations(tmp_path, capsys):
    work, published = tmp_path / "results/.work", tmp_path / "results/eval/e/sft-a"
    (_, current), (_, old) = complete(work, Recorded()), complete(work, Recorded(), parts={})
    # Both are finished.
    shutil.rmtree(work / "generate")
    published.mkdir(parents=True)
    manifest = {"fingerprint": "f", "generation": {"responses": current.rows.key}, "payload": {}, "records": {}}
    write_manifest(published / "manifest.json", manifest)
    clean(work, remove=False)
    assert old.rows.folder.exists() and "would remove" in capsys.readouterr().out
    clean(work, remove=True)
    assert current.rows.folder.exists() and not old.rows.folder.exists()
