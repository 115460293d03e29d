"""Initial weights, dependencies and references of trainings, and which of them are shared."""

from itertools import pairwise

from snaketune.config.held_out import Evaluate
from snaketune.config.training_runs import Training
from snaketune.stages.plan.training_jobs import _learning
from tests.stages.plan.large import keys, made_from, of_stage


def test_a_family_is_checked_once_before_its_first_training(jobs, planned):
    families = {"scratch", "raw", "merged", "unmerged", "apart"} | {
        job.name for job in of_stage(planned, "sft") if "rates" in job.name and "@" not in job.name
    }
    assert {job.name for job in of_stage(planned, "preflight")} == families
    assert len(families) == 7
    apart = jobs["preflight/apart"]
    sweep = "reward.sweep-center_rewards_coefficient0.01"
    assert {run.key for run in apart.spec.runs} == {"sft.apart", "sft.again", "dpo.continued", "dpo.stacked", sweep}
    assert keys(apart.artifacts["corpora"]) == [
        key.split("-")[0].replace("pack", "corpus") for key in keys(apart.artifacts["packs"])
    ]
    for key in ("sft/apart", "sft/again", "dpo/continued", "dpo/stacked"):
        assert jobs[key].after[0] is apart
        assert jobs[key].operation.preflight == apart.manifest


def test_a_check_knows_the_trainings_below_a_run_and_whether_it_has_a_reference(jobs):
    runs = {run.key: run for run in jobs["preflight/apart"].spec.runs}
    below = {key: [(one.lora.rank, one.pack) for one in run.earlier] for key, run in runs.items()}
    apart, again = ((runs[key].run.lora.rank, runs[key].pack) for key in ("sft.apart", "sft.again"))
    rewards = {"reward.sweep-center_rewards_coefficient0.01": [apart]}
    dpo = {"dpo.continued": [apart], "dpo.stacked": [again, apart]}
    assert below == {"sft.apart": [], "sft.again": [apart]} | dpo | rewards
    assert [key for key, run in runs.items() if run.rewards] == list(rewards)
    assert [key for key, run in runs.items() if run.needs_reference] == ["dpo.continued", "dpo.stacked"]


def test_a_training_waits_for_the_measurement_that_auto_needs(jobs):
    automatic, fixed = jobs["sft/scratch"], jobs["sft/chatty"]
    assert automatic.operation.calibration == automatic.after[1].manifest
    assert automatic.after[1].artifacts["pack"] == automatic.artifacts["pack"]
    assert fixed.operation.calibration
    assert keys(fixed.after) == ["preflight/scratch"]


def test_trainings_that_take_the_same_time_and_memory_are_measured_and_examined_once(jobs, planned):
    rates = [job.operation.calibration for job in of_stage(planned, "sft") if "rates" in job.name]
    assert {*rates, jobs["sft/unmerged"].operation.calibration} == {jobs["sft/merged"].operation.calibration}
    # With the two rungs of their race.
    assert len(rates) == 2 * 3
    assert [name for job in of_stage(planned, "bottleneck") if "merged" in (name := job.name) or "rates" in name] == [
        "sft-merged"
    ]


def test_runs_share_reference_log_probabilities(jobs, planned):
    losses = [job for job in of_stage(planned, "dpo") if job.name.startswith("losses")]
    assert len(losses) == 8
    without = [job for job in losses if not job.artifacts["ref_logps"]]
    assert [job.spec.loss for job in without] == ["orpo", "orpo"]
    shared = jobs["dpo/plain"].artifacts["ref_logps"]
    assert all(job.artifacts["ref_logps"] == shared for job in losses if job not in without)


def test_log_probabilities_without_those_of_tokens_are_taken_from_those_with_them(jobs):
    (plain,), (limited,) = jobs["dpo/plain"].artifacts["ref_logps"], jobs["dpo/limited"].artifacts["ref_logps"]
    assert (plain.spec.token_logps, limited.spec.token_logps) == (False, True)
    # One of the runs that share it sets two parts.
    assert plain.after == (limited, *plain.after[1:])
    assert [job.name for job in plain.after[1:]] == [f"{plain.name}/{part}-of-2" for part in (1, 2)]
    assert [job.name for job in limited.after] == [f"{limited.name}/{part}-of-3" for part in (1, 2, 3)]
    assert limited.operation.parts == f"results/ref_pass/{limited.name}/*-of-3/manifest.json"
    assert {job.stage for job in limited.after} == {"ref_pass"}


def test_a_reference_of_its_own_is_a_model_from_outside(jobs):
    (own,) = jobs["dpo/other"].artifacts["ref_logps"]
    assert made_from(own) == {"pack": ["pack/pairs-own-1024"], "tokenizer": ["tokenizer/own"]}
    assert own.files["base"] == ("base/config.json", "base/model.safetensors")


def test_an_adapter_that_is_trained_further_stays_apart_from_the_base(jobs):
    for job in (continued := jobs["dpo/continued"], *continued.artifacts["ref_logps"]):
        assert (keys(job.artifacts["model"]), job.artifacts["base_layers"], job.spec.base.path) == (
            ["sft/apart"],
            (),
            "some/model",
        )
    assert continued.spec.continued
    assert (continued.spec.lora.rank, continued.spec.lora.dropout) == (4, 0)
    # An adapter that the SFT run has merged is taken apart again.
    further = jobs["dpo/further"]
    assert (keys(further.artifacts["model"]), further.artifacts["base_layers"], further.spec.base.path) == (
        ["sft/merged"],
        (),
        "base",
    )
    # Its adapter has taken the place of the one before it.
    evaluated = jobs["eval/texts/dpo-continued"]
    assert (keys(evaluated.artifacts["model"]), evaluated.artifacts["base_layers"]) == (["dpo/continued"], ())


def test_timings_wait_for_each_other(jobs):
    timings = jobs["bottleneck/sft-merged"].artifacts["timings"]
    for before, after in pairwise(timings):
        assert after.after[-1] is before
    assert timings[0].after == jobs["sft/merged"].after
    assert [timing.spec.repeat for timing in timings] == [1, 1, 1, 2, 2, 2]
    # Each variant is applied to the run itself.
    assert [keys(timing.artifacts["pack"])[0] for timing in timings[:3]] == [
        f"pack/chat-adopted-{length}" for length in (1024, 512, 1024)
    ]


def test_what_is_slow_on_most_machines_is_tried_before_what_is_configured(jobs):
    limited = jobs["bottleneck/dpo-limited"]
    names = ["baseline", "activations-kept", "precision-auto", "fused-optimizer", "compile-auto", "wide", "few"]
    assert [variant.name for variant in limited.spec.variants] == names
    assert [timing.name.split("/")[1] for timing in limited.artifacts["timings"]] == names * 2
    assert [timing.spec.profile for timing in limited.artifacts["timings"]] == [True] + [False] * 13
    values = {key: value for variant in limited.spec.variants for key, value in variant.baseline.items()}
    assert values["training.precision"] == "float32" and values["packing.length"] == 1024


def test_an_evaluation_reads_the_reference_of_pairs_only(jobs):
    assert keys(jobs["eval/texts/dpo-stacked"].artifacts["ref_logps"]) == ["ref_logps/again-pairs-adopted-1024"]
    assert jobs["dpo/single"].artifacts["ref_logps"]
    assert jobs["eval/texts/dpo-single"].artifacts["ref_logps"] == ()
    assert keys(jobs["eval/all/sft-chatty"].artifacts["packs"]) == [
        "pack/chat-own-1024",
        "pack/maths-own-1024",
        "pack/pairs-own-1024",
    ]


def test_measurements_that_decide_are_in_the_spec_whatever_the_defaults_are():
    def spec(**settings) -> dict:
        return _learning(Training(learning_rate=0.1, **settings)).model_dump(mode="json")

    decides = spec(keep="best")["evaluate"]
    assert {key: decides[key] for key in ("every", "rows")} == Evaluate().model_dump(include={"every", "rows"})
    assert spec(keep="best", evaluate={"samples": 7}) == spec(keep="best")
    assert spec(evaluate={"rows": 7}) == spec() and spec()["evaluate"] is False
