"""A self-test that passed isn't repeated on the same weights and rows; on any others it is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Learning
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.model import kernels, selftest
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.self_test_record import SelfTestRecord
from snaketune.engine.model.selftest import self_test
from snaketune.engine.model.selftest_rows import rows_to_test
from snaketune.evaluation import held_out
from snaketune.evaluation.held_out import choose_forward
from snaketune.stages.cache.attempt import Attempt
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import SftSpec
from snaketune.training import prepared
from snaketune.training.self_test_records import record_of_evaluation, record_of_test
from tests.models.conftest import CPU, tiny_model
from tests.models.test_attention import packed_rows
from tests.models.test_selftest import Rows

ROWS = [Rows(packed_rows())]


@pytest.fixture
def models_tested_once():
    """Here every check is made."""


@pytest.fixture
def record(tmp_path):
    """Return a function for the record of a run, with changes of its inputs, attempt, spec and device."""
    base = tmp_path / "base"
    base.mkdir()

    def of(inputs=None, compute=CPU, spec=None, **attempt):
        work = WorkFolder(tmp_path / "results/.work/sft/f00")
        work.state.mkdir(parents=True, exist_ok=True)
        known = {
            "stage": "sft",
            "code": "c",
            "stamps": {},
            "versions": {"torch": "2"},
        }
        digests = {"pack": "rows", "tokenizer": "t", "ref_logps": "r", "base": "w model.safetensors"} | (inputs or {})
        Attempt(inputs={role: [digest] for role, digest in digests.items()}, **known | attempt).save(work.state)
        values = {
            "base": Pretrained(path=str(base)),
            "training": Learning(learning_rate=1e-3),
            "lora": None,
            "quantization": None,
        }
        return record_of_test(SftSpec(**values | (spec or {})), work, compute)

    return of


def test_a_record_is_of_what_the_test_depends_on(record):
    plain = record()
    for same in (
        record(inputs={"ref_logps": "others"}),
        record(spec={"training": Learning(learning_rate=1e-4, epochs=9, until=0.1)}),
        record(spec={"loss": "dft"}),
    ):
        assert same == plain
    others = [
        record(inputs={"pack": "other rows"}),
        record(inputs={"model": "weights"}),
        record(inputs={"base": "other weights"}),
        record(code="d"),
        record(versions={"torch": "3"}),
        record(spec={"training": Learning(learning_rate=1e-3, seed=1)}),
        record(spec={"lora": Lora()}),
        record(spec={"base": Pretrained(path="owner/model", revision="f00")}),
        record(compute=replace(CPU, kernel="dense")),
        record(compute=replace(CPU, dtype=torch.bfloat16)),
    ]
    assert len({plain.path, *(other.path for other in others)}) == 1 + len(others)
    # It may be another model tomorrow.
    assert record(spec={"base": Pretrained(path="owner/model")}) is None


def test_a_passed_test_isnt_repeated(tmp_path, monkeypatch, capsys):
    record = SelfTestRecord(tmp_path / "records/f00")
    assert record.share() is None
    first = self_test(tiny_model("llama"), ROWS, CPU, training=True, record=record)
    assert record.share() == first.share
    state = torch.get_rng_state()
    monkeypatch.setattr(selftest, "check_kernel", None)
    model = tiny_model("llama")
    second = self_test(model, ROWS, CPU, training=True, record=record)
    assert second == first and model.allowed_packed == {("sdpa", False), ("sdpa", True)}
    assert "as an earlier training found" in capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), state)
    # A damaged record is none.
    record.path.write_text("", encoding="utf-8")
    assert record.share() is None


def test_a_kernel_that_fails_leaves_no_record(tmp_path, monkeypatch):
    monkeypatch.setitem(kernels.KERNELS, "sdpa", lambda q, k, v, segments, options: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=options.scaling, enable_gqa=True
    ).transpose(1, 2))  # fmt: skip
    record = SelfTestRecord(tmp_path / "records/f00")
    tested = self_test(tiny_model("llama"), ROWS, CPU, training=True, record=record)
    assert tested.compute.kernel != "sdpa" and record.share() is None


def test_an_evaluation_of_other_weights_repeats_the_synthetic_rows_only(tmp_path, monkeypatch):
    record, rows = SelfTestRecord(tmp_path / "records/f00"), Rows(packed_rows())
    tested = []
    monkeypatch.setattr(
        selftest, "rows_to_test", lambda *arguments: tested.append(arguments) or rows_to_test(*arguments)
    )
    chosen = []
    monkeypatch.setattr(
        held_out, "choose_kernel", lambda *given, **more: chosen.append(given) or choose_kernel(*given, **more)
    )
    models = tiny_model("llama"), tiny_model("llama")
    torch.nn.init.normal_(models[1].lm_head.weight)
    for model in models:
        choose_forward(model, model.config, [rows], CPU, record)
    assert [(packs, prefixes) for _, packs, prefixes in tested] == [
        ([rows], rows.has_prefixes),
        ([], rows.has_prefixes),
    ]
    # Nor is the kernel checked again.
    assert len(chosen) == 1
    # What synthetic rows show to be wrong is wrong.
    monkeypatch.setitem(kernels.KERNELS, "sdpa", lambda q, k, v, segments, options: v.transpose(1, 2))
    compute, _, _ = choose_forward(models[0], models[0].config, [rows], CPU, record)
    assert compute.kernel != "sdpa"


def test_a_record_of_evaluations_is_of_architecture_and_rows(tmp_path):
    work, config = WorkFolder(tmp_path / "results/.work/eval/f00"), tiny_model("llama").config
    packs = [Artifact(tmp_path / "manifest.json", {"payload": {name: {"digest": name}}}, tmp_path) for name in "ab"]
    assert record_of_evaluation(config, packs[:1], work, CPU) is None
    work.state.mkdir(parents=True)
    Attempt(stage="eval", code="c", stamps={}, digests={}, versions={}).save(work.state)
    elsewhere = tiny_model("llama").config
    elsewhere._name_or_path = "results/dpo/other/model"
    plain = record_of_evaluation(config, packs[:1], work, CPU)
    assert plain == record_of_evaluation(elsewhere, packs[:1], work, CPU)
    others = [
        record_of_evaluation(tiny_model("llama", hidden_act="gelu").config, packs[:1], work, CPU),
        record_of_evaluation(config, packs[1:], work, CPU),
        record_of_evaluation(config, packs[:1], work, replace(CPU, kernel="dense")),
    ]
    assert len({plain.path, *(other.path for other in others)}) == 4


def test_a_record_is_of_the_kernel_that_passed(tmp_path, monkeypatch):
    record, rows, model = SelfTestRecord(tmp_path / "records/f00"), Rows(packed_rows()), tiny_model("llama")
    monkeypatch.setattr(held_out, "choose_kernel", lambda compute, *_, **__: replace(compute, kernel="dense"))
    compute, _, _ = choose_forward(model, model.config, [rows], CPU, record)
    assert compute.kernel == "dense" and record.share() is None


def test_the_kernel_of_a_training_that_passed_isnt_checked_again(tmp_path, monkeypatch):
    record, rows = SelfTestRecord(tmp_path / "records/f00"), Rows(packed_rows())
    monkeypatch.setattr(prepared, "record_of_test", lambda *_: record)
    run = prepared.TrainingRun(spec=None, operation=None, work=None, compute=CPU)
    model = SimpleNamespace(config=lambda: tiny_model("llama").config)
    training = prepared.PreparedTraining(trainer_class=TrainingFeatures, rows=rows, run=run, initial=model, loss={})
    monkeypatch.setattr(prepared, "choose_kernel", lambda compute, *_, **__: replace(compute, kernel="dense"))
    assert training.with_kernel().run.compute.kernel == "dense"
    record.write(0.0)
    assert training.with_kernel() == training
