"""A preference training that is killed, anywhere and repeatedly, ends with the same files as an uninterrupted one."""

from dataclasses import dataclass
from typing import Any

import pytest

from snaketune.artifacts.manifest import describe_files
from snaketune.config.lora import Lora
from snaketune.engine import checkpoints
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.features import TrainingFeatures

from .pipeline_runs import Interrupted
from .preference_runs import Trained

# A training has nine steps in three epochs, with a checkpoint after every second one. It is killed before the nth call of one
# of these: in a step, between its passes, in a checkpoint with its weights written, before it is marked complete, at the end.
STEP = (DpoTrainer, "batch_loss")
WEIGH = (DpoTrainer, "_add_derivatives")
SAVE = (TrainingFeatures, "_save_optimizer_and_scheduler")
MARK = (checkpoints, "sync_folder")
END = (DpoTrainer, "conclusions")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training and the calls before which it is killed, one per attempt; calls are counted per attempt."""

    loss_settings: dict[str, Any]
    kills: tuple[tuple[Any, str, int], ...]
    family: str = "llama"
    kind: str = "preference"
    micro_batch_rows: int = 2
    lora: Lora | None = None


CASES = {
    "in a checkpoint": Case(loss_settings={"loss": {"ipo": 0.5, "sft": 1.0}}, kills=((*SAVE, 2),), family="gpt2"),
    "between two passes": Case(loss_settings={"loss": "aot"}, kills=((*WEIGH, 4),), micro_batch_rows=1),
    "three times": Case(loss_settings={"loss": "orpo"}, kills=((*STEP, 9), (*SAVE, 2), (*STEP, 3)), family="mixtral"),
    "adapters": Case(
        loss_settings={"loss": "aot"},
        kills=((*WEIGH, 6), (*END, 1)),
        lora=Lora(rank=2, dropout=0.3),
        micro_batch_rows=1,
    ),
    "single completions": Case(
        loss_settings={"loss": "kto"}, kills=((*STEP, 7), (*MARK, 2)), kind="unpaired", family="qwen3"
    ),
    "in a step": Case(loss_settings={"loss": "sigmoid"}, kills=((*STEP, 8),)),
}


def kill_before(owner: Any, method: str, call: int, patch: pytest.MonkeyPatch) -> None:
    original, calls = getattr(owner, method), []

    def called(*arguments: Any, **keywords: Any) -> Any:
        calls.append(method)
        if len(calls) == call:
            raise Interrupted
        return original(*arguments, **keywords)

    patch.setattr(owner, method, called)


@pytest.mark.parametrize("what", CASES)
def test_a_killed_training_ends_with_the_same_files(what, tmp_path, monkeypatch):
    case = CASES[what]
    trained = Trained(tmp_path, case.kind, family=case.family)
    settings = {"every": 2, "lora": case.lora, "micro_batch_rows": case.micro_batch_rows}
    straight, work = trained.train("straight", case.loss_settings, **settings)
    for kill in case.kills:
        with monkeypatch.context() as patch:
            kill_before(*kill, patch)
            with pytest.raises(Interrupted):
                trained.train("resumed", case.loss_settings, **settings)
    resumed, again = trained.train("resumed", case.loss_settings, **settings)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert (resumed.counts, resumed.about) == (straight.counts, straight.about)
    # Also every log line, except for measured times.
    for one, other in zip(resumed.run["history"], straight.run["history"], strict=True):
        for name in ("step", "loss", "grad_norm", "margin", "chosen_reward", "rejected_logp"):
            assert one[name] == other[name], (one["step"], name)
