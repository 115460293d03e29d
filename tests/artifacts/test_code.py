"""What the code digest of each stage covers."""

import pytest

from snaketune.artifacts import code
from snaketune.stages import STAGES


def modules(stage: str) -> set[str]:
    return {module.removeprefix("snaketune.") for module in code.shaping_modules(STAGES[stage].module)}


def test_each_stage_covers_what_shapes_it_and_nothing_that_only_follows_it():
    assert "corpus.layouts" in modules("corpus")
    assert modules("corpus") & (modules("sft") | modules("eval")) == {"patterns"}
    assert "tokenization.chat" in modules("tokenize")
    assert {"packing.plan", "packing.pieces"} <= modules("plan")
    assert "packing.shards" in modules("write")
    assert not modules("tokenize") & {name for name in modules("plan") if name.startswith("packing.")}
    assert "packing.plan" not in modules("tokenize") | modules("write") | modules("sft")
    assert {"training.trainer", "models.attention", "packing.segments"} <= modules("sft")
    assert "training.dpo_loss" in modules("dpo")
    for stage in ("sft", "ref_logps", "eval"):
        assert "training.dpo_loss" not in modules(stage)
    assert "training.trainer" not in modules("ref_logps") | modules("eval")


@pytest.mark.parametrize("stage", STAGES)
def test_rooms_that_move_describe_or_draw_count_for_no_training(stage):
    rooms = {module.split(".")[0] for module in modules(stage)}
    assert not rooms & {"artifacts", "config"}
    assert ("report" in rooms) == (stage == "report")


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A package of one module, whose text a test chooses."""
    package = tmp_path / "snaketune"
    (package / "room").mkdir(parents=True)
    (package / "room/__init__.py").write_text("")
    monkeypatch.setattr(code, "PACKAGE_FOLDER", package)

    def digest(text: str) -> str:
        (package / "room/stage.py").write_text(text)
        code._syntax.cache_clear()
        return code.code_digest("snaketune.room.stage")

    yield digest
    code._syntax.cache_clear()


def test_comments_docstrings_and_layout_do_not_count_but_code_does(edited):
    plain = edited("def f(x):\n    return x + 1\n")
    assert plain == edited('"""Doc."""\n\n# why\ndef f(x):\n    """Says."""\n    return (x\n        + 1)\n')
    assert plain != edited("def f(x):\n    return x + 2\n")
    assert edited('class A:\n    """Doc."""\n') == edited("class A:\n    pass\n")
