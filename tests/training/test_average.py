"""The average of a training's weights: torch's own, resumed exactly, measured and kept as the weights themselves are."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from snaketune.config.lora import Lora
from snaketune.engine.sft import SftTrainer

from .pipeline_runs import copy_after, held_out_pack, pack, spec, train
from .test_held_out import EVERY, OVERFIT, loss_of, points, same, weights


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("rows"), rows=12)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return held_out_pack(tmp_path_factory.mktemp("held"), rows=5, documents=(12, 9))


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_the_average_is_torchs_and_resumes(tmp_path, monkeypatch, rows, held_out, lora):
    made, settings = spec(lora, average={"ema": 0.8}), {"held_out": held_out, "evaluate": EVERY, "every": 4}
    independent: list[AveragedModel] = []

    class Follows(SftTrainer):
        """Averages the model by torch's own class."""

        def training_step(self, model, *arguments, **keywords):
            if not independent:
                independent.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)))
            elif self.state.global_step > (self.averaged_at if hasattr(self, "averaged_at") else 0):
                independent[0].update_parameters(model)
            self.averaged_at = self.state.global_step
            return super().training_step(model, *arguments, **keywords)

        def use_best(self):
            independent[0].update_parameters(self.model)
            self.last = {name: one.detach().clone() for name, one in self.model.named_parameters()}
            result = super().use_best()
            for (name, mine), theirs in zip(
                self.model.named_parameters(), independent[0].module.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)
            assert any(not torch.equal(one, self.last[name]) for name, one in self.model.named_parameters())
            return result

    copy_after(1, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight = train(tmp_path / "straight", rows, made, trainer=Follows, **settings)
    resumed = train(tmp_path / "resumed", rows, made, **settings)
    assert points(resumed) == points(straight)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))
    # What was measured is what is published.
    assert points(straight)[-1]["loss"] == pytest.approx(loss_of(tmp_path / "straight", held_out), abs=1e-5)


@pytest.mark.parametrize("rate", [0.002, 0.05])
def test_the_best_average_is_kept(tmp_path, held_out, rate):
    """At the low rate the last measurement is the best one."""
    made = spec(**OVERFIT | {"learning_rate": rate}, keep="best", average={"ema": 0.3})
    outcome = train(tmp_path, pack(tmp_path / "few", rows=4), made, held_out=held_out, evaluate=EVERY)
    assert (outcome.about["kept"]["step"] == 12) == (rate == 0.002)
    assert outcome.about["kept"]["value"] == pytest.approx(loss_of(tmp_path, held_out), abs=1e-5)
