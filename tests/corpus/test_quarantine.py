"""The list of malformed rows: personal data and control characters in it, and its path when the stage fails."""

import json
import re
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from tests.corpus.row_spelling import turns

MASKED = {"mask_personal_data": ["email", "phone"]}


def test_personal_data_is_masked_in_record_and_log(make, capsys):
    rows = [
        {"messages": [{"role": "user", "content": "I am ann@example.org, (555) 123-4567"}]},
        {"messages": "ann@example.org"},
        {"messages": [{"role": "ann@example.org", "content": "x"}]},
        {"ann@example.org": {"ann@example.org": ["ann@example.org", 1.5]}},
        ["ann@example.org"],
        # The cut at 200 characters is inside the address.
        {"messages": [{"role": "user", "content": "x" * 140 + " ann@example.org"}]},
    ]
    damaged = [
        b'{"prompt": "ann@example.org',
        *(b'{"prompt": "' + b"x" * cut + b" ann@example.org (555) 123-4567" for cut in range(150, 190)),
    ]
    lines = [json.dumps(row).encode() for row in rows] + damaged
    sound = json.dumps({"messages": turns("U a", "A b")}).encode() + b"\n"
    with pytest.raises(SnaketuneError) as error:
        make(sound + b"\n".join(lines), cleaning=MASKED)
    built = make(sound + b"\n".join(lines), cleaning=MASKED, max_quarantined_fraction=1.0)
    assert len(built.quarantine) == len(lines)
    listed = (built.folder / "quarantine.jsonl").read_text()
    for text in (listed, capsys.readouterr().out, str(error.value)):
        assert "ann" not in text and "@" not in text and "(555) 1" not in text
    assert "[EMAIL], [PHONE]" in built.quarantine[0]["excerpt"]
    # What isn't masked in rows isn't masked here.
    plain = make(sound + b"\n".join(lines), max_quarantined_fraction=1.0)
    assert plain.quarantine[0]["excerpt"].endswith('"I am ann@example.org, (555) 123-4567"}]}')


@pytest.mark.parametrize("escape", ["\x1b[31m", "\x9b31m", "\x07", "\r", "\u202e"])
def test_no_control_character_reaches_the_terminal(make, capsys, escape):
    rows = [
        {f"key{escape}": escape},
        {"messages": [{"role": f"role{escape}", "content": escape}]},
        {"messages": f"text{escape}"},
    ]
    content = json.dumps({"messages": turns("U a", "A b")}).encode() + b"\n"
    content += b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + f"\n{{{escape}".encode()
    with pytest.raises(SnaketuneError) as error:
        make(content)
    output = capsys.readouterr().out
    assert len(output.splitlines()) >= 4
    for text in (output, str(error.value)):
        assert escape not in text and all(line.isprintable() for line in text.split("\n"))
    # The value is the same, only escaped.
    first = json.loads(output.splitlines()[0].removeprefix("quarantined: "))
    assert f"key{escape}" in first["detail"] or f"key{escape}"[:4] in first["detail"]


@pytest.mark.parametrize("sound", [0, 1])
def test_the_list_survives_a_failed_stage(make, tmp_path, sound):
    rows = [{"prompt": "a", "response": "b"}] * sound + [{"n": i} for i in range(50)]
    with pytest.raises(SnaketuneError) as error:
        make(rows, source={"layout": "prompt-response"})
    saved = Path(re.search(r"All are listed in (\S+)", str(error.value))[1])
    assert len(saved.read_text().splitlines()) == 50
    # The next attempt starts with this.
    WorkFolder(saved.parent).start()
    assert saved.is_file()


def test_a_source_without_a_usable_row_stops_the_run(make, chat):
    good = [chat(f"q{number}") for number in range(500)]
    sources = [{"files": ["data/0.jsonl"]}, {"files": ["data/1.jsonl"], "layout": "prompt-response"}]
    with pytest.raises(SnaketuneError, match=r"none of the 2 rows of the source data/1.jsonl can be used") as error:
        make(good, [{"n": 1}, {"n": 2}], sources=sources)
    record = Path(re.search(r"See (\S+)", str(error.value))[1])
    assert [json.loads(line)["line"] for line in record.read_text().splitlines()] == [1, 2]


def test_the_lists_survive_when_no_row_is_left(make, chat):
    exam = make([chat("a question of six words altogether")], held_out=1.0)
    rows = [chat("a question of six words altogether"), {"n": 1}]
    with pytest.raises(SnaketuneError, match="none of the 2 rows is left") as error:
        make(rows, decontamination={}, against=[exam.artifact("exam")], max_quarantined_fraction=1.0)
    saved = [Path(path) for path in re.findall(r"See (\S+)", str(error.value))]
    assert [path.name for path in saved] == ["quarantine.jsonl", "contamination.jsonl"]
    assert [json.loads(path.read_text())["line"] for path in saved] == [2, 1]


def test_the_repair_that_makes_rows_valid_is_named(make, chat):
    broken = {"messages": turns("U a", "U b", "A c")}
    other = {"messages": turns("U d", "A ", "U b", "A c")}
    with pytest.raises(SnaketuneError) as error:
        make([broken, other, chat()])
    assert "\n2 of them can be used with `corpora.<name>.repair: [merge-same-role, drop-empty-turns]`" in str(
        error.value
    )
    assert "Fix these rows" in str(error.value)
    fixed = make([broken, other, chat()], repair=["merge-same-role", "drop-empty-turns"])
    assert len(fixed.train) == 3
    # The layout was right.
    with pytest.raises(SnaketuneError, match=r"1 of them .*repair: \[merge-same-role\]`$"):
        make([broken, {"messages": turns("U a")}])
    # A configured repair that isn't enough, and a row that none makes valid.
    with pytest.raises(SnaketuneError, match=r"`corpora.<name>.repair: \[drop-empty-turns, merge-same-role\]`"):
        make([other, chat()], repair=["drop-empty-turns"])
    with pytest.raises(SnaketuneError) as error:
        make([{"messages": turns("U a", "T b", "A c")}])
    assert "`corpora.<name>.repair" not in str(error.value) and "Check `layout`" in str(error.value)
