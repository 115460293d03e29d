"""Whatever is wrong with an input ends as a row with a reason, or as an error that names the file. There is no third way."""

import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from snaketune.__main__ import main
from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Dropped, Malformed, content_hash
from snaketune.errors import SnaketuneError
from tests.corpus.malformed_inputs import (
    INPUTS,
    SOUND,
    Input,
    damaged_csv,
    damaged_files,
    damaged_lines,
    whole_files,
    wrong_trees,
    wrong_turns,
)
from tests.corpus.row_spelling import CONVERSATIONS

ENOUGH_SECONDS = 5.0


def outcomes(given: Input, folder: Path):
    """What becomes of every row, with the last check that the stage makes."""
    path = folder / given.name
    path.write_bytes(given.content)
    source = Source(files=[f"data/{given.name}"], layout=given.layout)
    raws = read_file(path, f"data/{given.name}")
    for made in canonical_rows(raws, kind=given.kind, source=source, repair=()):
        row = made.row
        if row is not None and not isinstance(row, Malformed | Dropped):
            try:
                content_hash(row)
            except Malformed as error:
                row = error
        yield made.raw, row


def test_the_inputs_are_many_and_differ():
    assert len(INPUTS) > 350
    assert len({(given.name, given.content, given.kind, given.layout) for given in INPUTS}) == len(INPUTS)
    assert {given.layout for given in INPUTS} == {"auto", *SOUND}


@pytest.mark.parametrize("given", INPUTS, ids=[f"{i}-{given.layout}-{given.name}" for i, given in enumerate(INPUTS)])
def test_a_row_with_a_reason_or_an_error_that_names_the_file(tmp_path, given):
    started = time.monotonic()
    if given.reasons is None:
        with pytest.raises(SnaketuneError) as error:
            list(outcomes(given, tmp_path))
        assert f"data/{given.name}" in str(error.value)
        assert any(word in str(error.value) for word in ("fetch", "fix", "rename", "close", "write", "read", "unpack"))
    else:
        made = list(outcomes(given, tmp_path))
        bad = [(raw, row) for raw, row in made if isinstance(row, Malformed | Dropped)]
        found = Counter(row.reason for _, row in bad)
        assert not Counter(given.reasons) - found
        assert bad
        for raw, row in bad:
            assert raw.number >= 1 and raw.unit in ("line", "row")
            assert row.reason.isidentifier() and row.reason.islower()
            if isinstance(row, Malformed):
                assert row.detail and len(row.detail) < 500
                # It says what was found, or the row can still be shown.
                assert row.excerpt if isinstance(raw.value, Malformed) else excerpt(raw.value)
        # But for layouts where a row needs others, the sound rows beside the damaged one come through.
        if len(made) == 3 and given.layout not in ("unpaired", "message-tree"):
            assert len(bad) == 1
    assert time.monotonic() - started < ENOUGH_SECONDS


@pytest.mark.parametrize("layout", SOUND)
def test_what_the_damage_is_done_to_was_sound(tmp_path, layout):
    row, kind, _ = SOUND[layout]
    ((raw, found),) = outcomes(Input("one.jsonl", json.dumps(row).encode(), (), kind, layout), tmp_path)
    # One message is no conversation, and one completion no pair.
    left_out = {"unpaired": "unpaired", "message-tree": "unanswered"}
    assert getattr(found, "reason", None) == left_out.get(layout)
    assert raw.value == row


WHOLE = [given for given in whole_files() for _ in range(12)]


@pytest.mark.parametrize("seed, given", enumerate(WHOLE), ids=[f"{i}-{given.name}" for i, given in enumerate(WHOLE)])
def test_bytes_gone_wrong_anywhere(tmp_path, seed, given):
    drawn = random.Random(seed)
    content = bytearray(given.content)
    for _ in range(drawn.choice((1, 3, 20))):
        content[drawn.randrange(len(content))] = drawn.randrange(256)
    # Where nothing guards against it, a changed byte may be just another text.
    with suppress(SnaketuneError):
        for raw, row in outcomes(given._replace(content=bytes(content)), tmp_path):
            assert raw.number >= 1
            assert row.reason if isinstance(row, Malformed | Dropped) else row.kind == CONVERSATIONS


def job_file(spec: dict, out: Path, path: Path) -> str:
    job = {"stage": "corpus", "spec": spec, "out": str(out), "inputs": {"files": [str(path)]}}
    Path("job.json").write_text(json.dumps(job), encoding="utf-8")
    return "job.json"


SAMPLE = [*damaged_files()[::3], *damaged_lines()[1::9], *damaged_csv()[::3], *wrong_turns()[::12], *wrong_trees()[:2]]


@pytest.mark.parametrize("given", SAMPLE, ids=[f"{i}-{given.name}" for i, given in enumerate(SAMPLE)])
def test_the_command_line_makes_nothing_by_halves(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    path = Path("data") / given.name
    path.parent.mkdir()
    path.write_bytes(given.content)
    sources = [{"files": [str(path)], "layout": given.layout}]
    spec = {"kind": given.kind, "sources": sources, "held_out": 0.0, "max_quarantined_fraction": 1.0}
    out = Path("results/corpus/broken")
    status = main(["corpus", job_file(spec, out, path)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if status:
        assert str(path) in said.err + said.out and not (out / "manifest.json").exists()
        # Rows end the stage only where no sound one is left.
        assert given.reasons is None or "none of the" in said.err
    else:
        manifest = json.loads((out / "manifest.json").read_bytes())
        quarantine = [json.loads(bad) for bad in (out / "rows" / "quarantine.jsonl").read_bytes().splitlines()]
        assert manifest["counts"]["quarantined"]["total"] == len(quarantine) > 0
        assert all(bad["file"] == str(path) and bad["reason"] and bad.get("line", bad.get("row")) for bad in quarantine)
        assert manifest["counts"]["kept"]["train"] > 0


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_the_command_line_without_a_file(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    path = Path("rows.jsonl")
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    spec = {"kind": CONVERSATIONS, "sources": [{"files": [str(path)]}]}
    assert main(["corpus", job_file(spec, Path("out"), path)]) == 1
    assert "rows.jsonl" in capsys.readouterr().err and not Path("out").exists()
