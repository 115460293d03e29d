"""A preference training that was cut off, wherever and however often, ends with the very files of an undisturbed one."""

from dataclasses import dataclass
from typing import Any

import pytest

from snaketune.artifacts.manifest import describe_files
from snaketune.config.training_runs import Lora
from snaketune.training.checkpoint import checkpoints
from snaketune.training.preference.dpo_trainer import DpoTrainer

from .pipeline_runs import Interrupted
from .preference_runs import Trained

# Of nine steps in three epochs, with a checkpoint after every second one. The methods before whose nth call the process ends:
# amid a step, between its passes, amid a checkpoint whose weights are there already, before one counts, at the very end.
STEP = (DpoTrainer, "batch_loss")
WEIGH = (DpoTrainer, "_weigh")
SAVE = (checkpoints.CheckpointMixin, "_save_optimizer_and_scheduler")
MARK = (checkpoints, "sync_folder")
END = (DpoTrainer, "conclusions")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training and where it is killed, one time after the other; each count is of that attempt alone."""

    told: dict[str, Any]
    kills: tuple[tuple[Any, str, int], ...]
    family: str = "llama"
    kind: str = "preference"
    rows_at_once: int = 2
    lora: Lora | None = None


CASES = {
    "amid a checkpoint": Case(told={"loss": {"ipo": 0.5, "sft": 1.0}}, kills=((*SAVE, 2),), family="gpt2"),
    "between two passes": Case(told={"loss": "aot"}, kills=((*WEIGH, 4),), rows_at_once=1),
    "three times": Case(told={"loss": "orpo"}, kills=((*STEP, 9), (*SAVE, 2), (*STEP, 3)), family="mixtral"),
    "adapters": Case(
        told={"loss": "aot"}, kills=((*WEIGH, 6), (*END, 1)), lora=Lora(rank=2, dropout=0.3), rows_at_once=1
    ),
    "single completions": Case(told={"loss": "kto"}, kills=((*STEP, 7), (*MARK, 2)), kind="unpaired", family="qwen3"),
    "amid a step": Case(told={"loss": "sigmoid"}, kills=((*STEP, 8),)),
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
def test_cut_off_or_not_it_ends_with_the_same_files(what, tmp_path, monkeypatch):
    case = CASES[what]
    trained = Trained(tmp_path, case.kind, family=case.family)
    settings = {"every": 2, "lora": case.lora, "micro_batch_rows": case.rows_at_once}
    straight, work = trained.train("straight", case.told, **settings)
    for kill in case.kills:
        with monkeypatch.context() as patch:
            kill_before(*kill, patch)
            with pytest.raises(Interrupted):
                trained.train("resumed", case.told, **settings)
    resumed, again = trained.train("resumed", case.told, **settings)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert (resumed.counts, resumed.about) == (straight.counts, straight.about)
    # Every line of the log too, but for what is measured.
    for one, other in zip(resumed.run["history"], straight.run["history"], strict=True):
        for name in ("step", "loss", "grad_norm", "margin", "chosen_reward", "rejected_logp"):
            assert one[name] == other[name], (one["step"], name)
