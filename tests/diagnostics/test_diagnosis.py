"""The attribution of gains, with invented trials whose answers are known; the workflow's tests run real ones."""

import csv
import io
import json
import math
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import pytest

from snaketune.config.diagnose import Diagnosis
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning, Sft
from snaketune.diagnostics import timed_training
from snaketune.diagnostics import trial as trial_module
from snaketune.diagnostics.attribution_picture import attribution_svg
from snaketune.diagnostics.diagnosis import as_csv, as_markdown, attribution
from snaketune.errors import SnaketuneError
from snaketune.stages.findings import Finding
from snaketune.stages.specs import DiagnosisSpec, SftSpec, TrialSpec, Variant, canonical
from tests.packing.chain import started

RUN = Sft.model_validate(
    {
        "base": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2},
        "corpus": "chat",
        "tokenizer": "small",
        "packing": {"length": 256},
        "training": {"learning_rate": 1e-3, "batch_rows": 8},
    }
)


def trial(speed: float, *, loss: float = 3.0, tokens: float = 100, matmul: float = 1e9) -> dict[str, Any]:
    windows = [{"tokens": tokens, "seconds": tokens / speed, "loss": loss + 1 - n / 10, "step": n} for n in range(10)]
    return {
        "fits": True, "why": "", "windows": windows, "tokens_in_warmup": 100.0, "tokens_per_second": speed,
        "sequences_per_second": speed / 50, "step_seconds": tokens / speed, "peak_bytes": 2e9, "device": "cpu",
        "probe": {"matmul_flops_per_second": matmul, "copy_bytes_per_second": 1e9},
    }  # fmt: skip


def spec_of(*names: str, mode: str = "one-at-a-time", repeats: int = 1) -> DiagnosisSpec:
    changed = [Variant(name=name, changes={"training.batch_rows": n}) for n, name in enumerate(names, 1)]
    spec = DiagnosisSpec(mode=mode, variants=(Variant(name="baseline"), *changed), repeats=repeats)
    # Like the spec of the stage.
    return DiagnosisSpec.model_validate_json(canonical(spec))


def test_a_change_whose_name_comes_before_the_baselines_is_no_baseline():
    rows = attribution(spec_of("add-rows"), [{"baseline": trial(100), "add-rows": trial(150)}])["rows"]
    assert [(row["variant"], row["gain_percent"]["median"]) for row in rows] == [("baseline", 0.0), ("add-rows", 50.0)]


def test_what_a_warming_machine_does_to_all_is_no_gain_of_any():
    """Rounds get slower; within each, the change is a fifth faster."""
    rounds = [{"baseline": trial(speed), "packed": trial(1.2 * speed)} for speed in (1000, 800, 500)]
    _, packed = attribution(spec_of("packed", repeats=3), rounds)["rows"]
    assert packed["gain_percent"] == {"median": 20.0, "least": 20.0, "most": 20.0}
    assert packed["tokens_per_second"] == {"median": 960.0, "least": 600.0, "most": 1200.0}


def test_shares_of_changes_that_build_on_each_other_add_up():
    one = {"baseline": trial(100), "packed": trial(400), "compiled": trial(800), "fused": trial(800)}
    rows = attribution(spec_of("packed", "compiled", "fused", mode="add-one-in"), [one])["rows"]
    assert [row["gain_percent"]["median"] for row in rows] == pytest.approx([0, 300, 100, 0])
    shares = [row["share_percent"] for row in rows]
    assert shares == pytest.approx([0, 100 * math.log(4) / math.log(8), 100 * math.log(2) / math.log(8), 0], abs=0.1)
    assert rows[2]["over_baseline_percent"]["median"] == pytest.approx(700)


def test_a_loss_that_is_off_is_not_comparable_and_losses_are_of_equal_tokens():
    # The same curve over tokens, in rows of twice as many; and another training's curve.
    same = trial(100, tokens=200)
    for n, window in enumerate(same["windows"]):
        window["loss"] = 3 + 1 - (2 * n + 0.5) / 10
    rows = attribution(
        spec_of("longer", "other"), [{"baseline": trial(100), "longer": same, "other": trial(100, loss=9)}]
    )["rows"]
    assert rows[1]["comparable"] and abs(rows[1]["loss_off_percent"]) < 0.01
    assert not rows[2]["comparable"] and "not comparable: at the same tokens its loss differs by" in rows[2]["note"]


def test_a_variant_that_diverges_is_timed_and_not_compared():
    gone = trial(200)
    for window in gone["windows"][3:]:
        window["loss"] = None
    result = attribution(spec_of("high", "packed"), [{"baseline": trial(100), "high": gone, "packed": trial(150)}])
    _, high, packed = result["rows"]
    assert high["gain_percent"]["median"] == 100 and not high["comparable"] and "isn't finite" in high["note"]
    assert packed["comparable"] and "loss" not in high
    assert json.dumps(result, allow_nan=False) and "isn't finite" in as_markdown(result)
    # Nothing can be held against a baseline of none, and no other figure is lost.
    _, other = attribution(spec_of("packed"), [{"baseline": gone, "packed": trial(150)}])["rows"]
    assert not other["comparable"] and other["gain_percent"]["median"] == -25


def test_trials_with_different_libraries_are_noted():
    old, new = trial(100) | {"libraries": {"torch": "2.12"}}, trial(150) | {"libraries": {"torch": "2.13"}}
    (note,) = attribution(spec_of("packed"), [{"baseline": old, "packed": new}])["notes"]
    assert note.startswith("trials ran with torch 2.12 and 2.13") and "--forcerun trial" in note


def test_running_out_of_memory_is_noted_and_fails_for_the_baseline():
    gone = {"fits": False, "why": "out of memory with micro-batches of 64 rows"}
    result = attribution(spec_of("huge", "packed"), [{"baseline": trial(100), "huge": gone, "packed": trial(150)}])
    assert result["rows"][1]["note"] == "doesn't fit: out of memory with micro-batches of 64 rows"
    assert result["rows"][2]["gain_percent"]["median"] == 50
    with pytest.raises(SnaketuneError, match="baseline doesn't fit"):
        attribution(spec_of("packed"), [{"baseline": gone, "packed": trial(150)}])


def test_a_machine_that_changed_between_trials_is_noted():
    (note,) = attribution(spec_of("packed"), [{"baseline": trial(100), "packed": trial(100, matmul=1.3e9)}])["notes"]
    assert "matrix products differed by 30%" in note


def test_the_table_the_csv_and_the_picture_say_the_same():
    result = attribution(spec_of("packed"), [{"baseline": trial(1000), "packed": trial(1210)}])
    assert "| packed | training.batch_rows: 1 | 1,210 | 21.0 | 100.0 |" in as_markdown(result)
    rows = list(csv.reader(io.StringIO(as_csv(result))))
    assert rows[2][:5] == ["packed", "training.batch_rows: 1", "1,210", "21.0", "100.0"]
    drawn = ElementTree.fromstring(attribution_svg(result))
    assert "packed" in "".join(drawn.itertext())
    assert attribution_svg(result) == attribution_svg(result)


def test_no_cell_is_a_formula():
    variants = (Variant(name="baseline"), Variant(name="x", changes={"=1+1": 1}))
    spec = DiagnosisSpec(mode="one-at-a-time", variants=variants, repeats=1)
    rows = list(csv.reader(io.StringIO(as_csv(attribution(spec, [{"baseline": trial(1000), "x": trial(900)}])))))
    assert rows[2][1].startswith("'=") and rows[2][3] == "-10.0"


def test_variants_build_on_each_other_or_not():
    changes = {"short": {"packing.length": 128}, "one": {"training.micro_batch_rows": 1, "lora": {"rank": 4}}}
    pretrained = RUN.model_copy(update={"base": None, "use_base": "sft:other"})
    diagnosis = Diagnosis(run="sft:run", changes=changes)
    alone = diagnosis.variants("speed", pretrained)
    assert [run.packing.length for run in alone.values()] == [256, 128, 256]
    assert alone["one"].lora.rank == 4 and alone["one"].training.micro_batch_rows == 1
    together = diagnosis.model_copy(update={"mode": "add-one-in"}).variants("speed", pretrained)
    assert [run.packing.length for run in together.values()] == [256, 128, 128]


def test_the_loss_of_sft_can_be_changed_and_that_of_dpo_cannot():
    dft = Diagnosis(run="sft:run", changes={"dft": {"loss": "dft"}}).variants("speed", RUN)
    assert [run.loss for run in dft.values()] == ["nll", "dft"]
    with pytest.raises(ValueError, match=r"ipo.loss: can't be changed here; expected .* quantization, operation \["):
        Diagnosis(run="dpo:run", changes={"ipo": {"loss": "ipo"}}).model_dump()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x": {"corpus": "other"}}, "x.corpus: can't be changed here; expected a key below packing, training"),
        ({"baseline": {"training.seed": 1}}, "'baseline' is the name of a trial of its own"),
    ],
)
def test_changes_that_would_compare_other_things_are_refused(changes, expected):
    with pytest.raises(ValueError, match=expected):
        Diagnosis(run="sft:run", changes=changes)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "expected `changes`, or `learning_rates` to test, or both; found neither"),
        ({"learning_rates": [0.1, 0.01]}, r"expected the lowest and the highest, found \[0.1, 0.01\]"),
        ({"learning_rates": [0.01, 0.1], "steps": 10}, "10 are too few to test learning_rates; expected 20 or more"),
        ({"changes": {"learning-rates": {"training.seed": 1}}}, "'learning-rates' is the name of a trial of its own"),
    ],
)
def test_a_diagnosis_without_trials_is_refused(settings, expected):
    with pytest.raises(ValueError, match=expected):
        Diagnosis(run="sft:run", **settings)


def test_a_change_that_makes_no_run_names_itself():
    diagnosis = Diagnosis(run="sft:run", changes={"x": {"training.batch_rows": "many"}})
    with pytest.raises(SnaketuneError, match=r"diagnose\.speed\.changes\.x: training\.batch_rows: .*'many'"):
        diagnosis.variants("speed", RUN)


def test_a_trial_that_is_known_beforehand_not_to_fit_is_a_finding(tmp_path, monkeypatch):
    tokenizer = SimpleNamespace(files=list)
    prepared = SimpleNamespace(trainer_class=None, rows=[], run=None, config=None, new_config=None)
    monkeypatch.setattr(timed_training.sft_trainer, "prepare_training", lambda *_: prepared)
    result = [
        Finding(key="training", problem="needs 900.0 GB before there is a single activation", do="use a smaller one")
    ]
    monkeypatch.setattr(timed_training, "examine_machine", lambda *_: SimpleNamespace(findings=result))
    spec = TrialSpec(
        run=SftSpec(base=RUN.base, training=Learning(learning_rate=1e-3, batch_rows=8), lora=None, quantization=None),
        micro_batch_rows=1, gradient_checkpointing=False, launch="single", zero_stage=None, load_in_memory="auto",
        processes=1, steps=20, warmup_steps=3, repeat=1, profile=False,
    )  # fmt: skip
    work = started(tmp_path / "work")
    operation = Execution(micro_batch_rows=1, gradient_checkpointing=False)
    trial_module.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)
    measured = json.loads((work.payload / "measured.json").read_text(encoding="utf-8"))
    assert measured == {"fits": False, "why": "needs 900.0 GB before there is a single activation"}
    # Whatever else is certain stops it, as it would stop the training.
    result[:] = [Finding(key="training.optimizer", problem="bitsandbytes has no GPU build", do="take another one")]
    with pytest.raises(SnaketuneError, match="no GPU build"):
        trial_module.build(spec, work, operation=operation, pack=None, tokenizer=tokenizer)
