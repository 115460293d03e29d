"""The `doctor:` section: which runs are timed, and their variants."""

import pytest

from snaketune.config.doctor import Doctor
from snaketune.config.load import load
from snaketune.config.training_runs import Dpo, Sft
from snaketune.errors import SnaketuneError

RUN = Sft.model_validate(
    {
        "base": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2},
        "corpus": "chat",
        "tokenizer": "small",
        "packing": {"length": 256},
        "training": {"learning_rate": 1e-3, "batch_rows": 8},
    }
)


def test_each_change_is_applied_to_the_baseline():
    changes = {"short": {"packing.length": 128}, "one": {"training.micro_batch_rows": 1, "lora": {"rank": 4}}}
    changes["adapter"] = {"lora.rank": 8}
    pretrained = RUN.model_copy(update={"base": None, "use_base": "sft:other"})
    variants = Doctor(changes=changes).variants(pretrained)
    assert list(variants) == ["baseline", "short", "one", "adapter"]
    assert [run.packing.length for run in variants.values()] == [256, 128, 256, 256]
    assert variants["one"].lora.rank == 4 and variants["one"].training.micro_batch_rows == 1
    assert variants["adapter"].lora.rank == 8


def test_what_is_usually_slow_is_tried():
    slow = {"gradient_checkpointing": True, "precision": "float32", "optimizer": "adamw_torch", "compile": False}
    operation = RUN.operation.model_copy(update={"activation_offloading": True})
    run = RUN.model_copy(update={"training": RUN.training.model_copy(update=slow), "operation": operation})
    assert Doctor().tried_on(RUN) == {}
    tried = ["activations-kept", "activations-on-device", "precision-auto", "fused-optimizer", "compile-auto"]
    assert list(Doctor().tried_on(run)) == tried
    # Raw rows aren't compiled.
    raw = run.model_copy(update={"packing": RUN.packing.model_copy(update={"strategy": "none"})})
    assert list(Doctor().tried_on(raw)) == ["packed", *tried[:-1]]


def test_the_loss_of_sft_can_be_changed_and_that_of_dpo_cannot():
    dft = Doctor(changes={"dft": {"loss": "dft"}}).variants(RUN)
    assert [run.loss for run in dft.values()] == ["nll", "dft"]
    dpo = Dpo.model_validate({"from": "demo", "corpus": "pairs", "training": RUN.training.model_dump()})
    with pytest.raises(
        SnaketuneError, match=r"changes.ipo.loss: can't be changed here; expected .* quantization, operation$"
    ):
        Doctor(changes={"ipo": {"loss": "ipo"}}).variants(dpo)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"changes": {"x": {"corpus": "other"}}},
            r"doctor\.changes\.x\.corpus: can't be changed here; expected a key below packing, training",
        ),
        (
            {"changes": {"baseline": {"training.seed": 1}}},
            r"doctor\.changes\.baseline: .* unchanged run; choose another",
        ),
        (
            {"changes": {"x": {"training.batch_rows": "many"}}},
            r"doctor\.changes\.x\.training\.batch_rows: found 'many'; expected a whole",
        ),
        # Of two keys together.
        ({"changes": {"x": {"lora.rank": 8}}}, r"doctor\.changes\.x: lora adapts a pretrained model"),
        ({"changes": {"x": {"packing.length": 2**15}}}, r"doctor\.changes\.x\.packing\.length: 32768 tokens"),
        ({"runs": ["sft:dmo"]}, r"doctor\.runs: there is no 'dmo' under `sft:`; did you mean 'demo'"),
        ({"runs": ["demo"]}, r"doctor\.runs\.0"),
    ],
)
def test_a_section_that_makes_no_run_is_refused_with_its_key(raw, section, expected):
    raw["doctor"] = section
    with pytest.raises(SnaketuneError, match=expected):
        load(raw)


def test_changes_are_tried_on_the_chosen_runs_only(raw):
    raw["doctor"] = {"runs": ["sft:demo"], "changes": {"dft": {"loss": "dft"}}}
    doctor = load(raw)[0].doctor
    assert doctor.examines("sft", "demo") and not doctor.examines("dpo", "demo")
    del raw["doctor"]["runs"]
    with pytest.raises(SnaketuneError, match=r"doctor\.changes\.dft\.loss: can't be changed here"):
        load(raw)
