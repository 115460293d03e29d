"""Every malformed input gives a row with a reason, or an error that names the file."""

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
from snaketune.corpus.layouts.recognise import UnknownLayout
from snaketune.corpus.reading.sources import read_file
from snaketune.corpus.rows import Conversation, Dropped, Malformed, content_hash
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


def outcomes(case: Input, folder: Path):
    """Yield the result of every row, with the last check that the stage makes."""
    path = folder / case.name
    path.write_bytes(case.content)
    source = Source(files=[f"data/{case.name}"], layout=case.layout)
    raws = read_file(path, f"data/{case.name}")
    for made in canonical_rows(raws, kind=case.kind, source=source, repair=()):
        row = made.row
        if row is not None and not isinstance(row, Malformed | Dropped):
            try:
                content_hash(row)
            except Malformed as error:
                row = error
        yield made.raw, row


def test_the_inputs_are_many_and_differ():
    assert len(INPUTS) > 350
    assert len({(case.name, case.content, case.kind, case.layout) for case in INPUTS}) == len(INPUTS)
    assert {case.layout for case in INPUTS} == {"auto", *SOUND}


@pytest.mark.parametrize("case", INPUTS, ids=[f"{i}-{case.layout}-{case.name}" for i, case in enumerate(INPUTS)])
def test_a_row_with_a_reason_or_an_error_that_names_the_file(tmp_path, case):
    started = time.monotonic()
    if case.reasons is None:
        with pytest.raises(SnaketuneError) as error:
            list(outcomes(case, tmp_path))
        assert f"data/{case.name}" in str(error.value)
        assert any(word in str(error.value) for word in ("fetch", "fix", "rename", "close", "write", "read", "unpack"))
    else:
        made = list(outcomes(case, tmp_path))
        bad = [(raw, row) for raw, row in made if isinstance(row, Malformed | Dropped)]
        found = Counter(row.reason for _, row in bad)
        assert not Counter(case.reasons) - found
        assert bad
        for raw, row in bad:
            assert raw.number >= 1 and raw.unit in ("line", "row")
            assert row.reason.isidentifier() and row.reason.islower()
            if isinstance(row, Malformed):
                assert row.detail and len(row.detail) < 500
                # The record has an excerpt of the error, or the row can be quoted.
                assert row.excerpt if isinstance(raw.value, Malformed) else excerpt(raw.value)
        # Except for layouts where a row needs others, the valid rows beside the damaged one are read.
        if len(made) == 3 and case.layout not in ("unpaired", "message-tree"):
            assert len(bad) == 1
    assert time.monotonic() - started < ENOUGH_SECONDS


@pytest.mark.parametrize("layout", SOUND)
def test_the_inputs_are_valid_before_they_are_damaged(tmp_path, layout):
    row, kind, _ = SOUND[layout]
    ((raw, found),) = outcomes(Input("one.jsonl", json.dumps(row).encode(), (), kind, layout), tmp_path)
    # One message is no conversation, and one completion no pair.
    dropped = {"unpaired": "unpaired", "message-tree": "unanswered"}
    assert getattr(found, "reason", None) == dropped.get(layout)
    assert raw.value == row


WHOLE = [case for case in whole_files() for _ in range(12)]


@pytest.mark.parametrize("seed, case", enumerate(WHOLE), ids=[f"{i}-{case.name}" for i, case in enumerate(WHOLE)])
def test_random_byte_changes(tmp_path, seed, case):
    generator = random.Random(seed)
    content = bytearray(case.content)
    for _ in range(generator.choice((1, 3, 20))):
        content[generator.randrange(len(content))] = generator.randrange(256)
    # Without a checksum, a changed byte may give another valid text.
    with suppress(SnaketuneError, UnknownLayout):
        for raw, row in outcomes(case._replace(content=bytes(content)), tmp_path):
            assert raw.number >= 1
            assert row.reason if isinstance(row, Malformed | Dropped) else isinstance(row, Conversation)


def job_file(spec: dict, out: Path, path: Path) -> str:
    job = {"stage": "corpus", "spec": spec, "out": str(out), "inputs": {"files": [str(path)]}}
    Path("job.json").write_text(json.dumps(job), encoding="utf-8")
    return "job.json"


SAMPLE = [*damaged_files()[::3], *damaged_lines()[1::9], *damaged_csv()[::3], *wrong_turns()[::12], *wrong_trees()[:2]]


@pytest.mark.parametrize("case", SAMPLE, ids=[f"{i}-{case.name}" for i, case in enumerate(SAMPLE)])
def test_the_command_line_publishes_all_or_nothing(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    path = Path("data") / case.name
    path.parent.mkdir()
    path.write_bytes(case.content)
    sources = [{"files": [str(path)], "layout": case.layout}]
    spec = {"kind": case.kind, "sources": sources, "held_out": 0.0, "max_quarantined_fraction": 1.0}
    out = Path("results/corpus/broken")
    status = main(["corpus", job_file(spec, out, path)])
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    if status:
        assert str(path) in output.err + output.out and not (out / "manifest.json").exists()
        # Malformed rows fail the stage only if no valid one is left.
        assert case.reasons is None or "none of the" in output.err
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
