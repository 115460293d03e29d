"""Jobs of reward models: what they are made from, and what is made with them."""

from tests.stages.plan.large import made_from, of_stage


def test_a_reward_model_is_made_from_a_model_and_pairs(jobs):
    liked = jobs["reward/liked"]
    assert made_from(liked) == {"model": ["sft/chatty"], "pack": ["pack/pairs-own-1024"]}
    assert liked.spec.margin and liked.spec.base is None
    # The same rows as those of DPO runs on the corpus.
    assert liked.artifacts["pack"] == jobs["dpo/plain"].artifacts["pack"]
    assert {job.stage for job in liked.after} == {"preflight", "calibrate"}


def test_the_base_layers_of_an_adapter_are_below_it(jobs):
    sweep = jobs["reward/sweep-center_rewards_coefficient0.1"]
    assert made_from(sweep)["model"] == ["sft/apart"]
    assert sweep.spec.base.path == "some/model" and sweep.spec.lora.rank == 2
    assert sweep.spec.center_rewards_coefficient == 0.1


def test_runs_with_another_loss_share_the_calibration(jobs, planned):
    calibrations = {
        job.operation.calibration for job in of_stage(planned, "reward") if job.name.startswith("sweep-center")
    }
    assert len(calibrations) == 1


def test_of_an_evaluation_pairs_alone_are_for_a_reward_model(jobs):
    rewarded = jobs["eval/all/reward-sweep-center_rewards_coefficient0.1"]
    spec = rewarded.spec
    assert spec.rewards and spec.preferences == ("pairs",)
    assert (spec.conversations, spec.tasks, spec.judged, spec.base) == ((), None, 0, None)
    assert made_from(rewarded).keys() == {"model", "tokenizer", "packs"}
    assert made_from(rewarded)["model"] == ["reward/sweep-center_rewards_coefficient0.1"]
    policy = jobs["eval/all/sft-chatty"].spec
    assert not policy.rewards and policy.conversations and policy.tasks


def test_scores_wait_for_the_reward_model(jobs):
    liked = jobs["rate/liked"]
    assert made_from(liked) == {"samples": ["sample/tries"], "model": ["reward/sweep-center_rewards_coefficient0.1"]}
    assert liked.spec.base is None and not liked.files["base"]
    other = jobs["rate/rated"]
    assert made_from(other) == {"samples": ["sample/tries"]} and other.spec.base.path == "base"


def test_the_report_shows_reward_models_and_their_evaluations(planned):
    shown = {job.key for job in planned[-1].artifacts["results"]}
    assert {"reward/liked", "eval/all/reward-sweep-center_rewards_coefficient0.1", "rate/liked"} <= shown
