"""Reward models in a config: what is refused, and what to do instead."""

import pytest

from snaketune.config.load import load

from .edits import put, refused

REWARD = {"from": "demo", "corpus": "demo-preferences", "training": {"learning_rate": 1e-5}}
PLAIN = {"kind": "preferences", "sources": [{"files": ["resources/demo/preferences.jsonl"], "layout": "pairs"}]}


@pytest.fixture
def with_reward(raw) -> dict:
    return put(raw, "reward", {"liked": REWARD})


@pytest.mark.parametrize(
    ("key", "value", "messages"),
    [
        ("from", "other", ["reward.liked.from: there is no 'other' under `sft:`"]),
        ("corpus", "demo-chat", ["reward.liked.corpus", "kind conversations, expected preferences"]),
        ("packing", {"strategy": "wrapped"}, ["pairs are never split"]),
        ("packing", {"strategy": "none"}, ["reward trains on packed pairs"]),
        ("training.neftune_noise_alpha", 5, ["neftune_noise_alpha: it is for runs of `sft:`"]),
        ("training.metric", "margin", ["metric: margin has no effect"]),
        ("lora", {"merge": False}, ["lora.merge: a reward model is saved with its adapter merged"]),
        ("lora", "continued", ["reward.liked.lora"]),
        ("center_rewards_coefficient", 0, ["center_rewards_coefficient", "above 0"]),
        ("quantization", {}, ["quantization freezes the base weights, so it needs `lora`"]),
        ("race", {"metric": "reward_accuracy", "rungs": [0.5]}, ["reward.liked.race: unknown key"]),
    ],
)
def test_a_wrong_run_is_refused(with_reward, key, value, messages):
    refused(put(with_reward, f"reward.liked.{key}", value), messages)


def test_margins_need_ratings_as_far_as_the_config_shows(with_reward):
    # `auto` may find ratings.
    load(put(with_reward, "reward.liked.margin", True))
    plain = put(put(with_reward, "corpora.plain", PLAIN), "reward.liked.corpus", "plain")
    load(plain)
    refused(
        put(plain, "reward.liked.margin", True),
        ["reward.liked.margin", "no source of corpora.plain has ratings", "`layout: rated`", "or remove margin"],
    )


def test_an_evaluation_of_conversations_alone_has_nothing_for_a_reward_model(with_reward):
    evaluation = {"models": ["sft:demo", "reward:liked"], "conversations": ["demo-chat"]}
    refused(
        put(with_reward, "eval.chats", evaluation),
        ["eval.chats.models: reward:liked is a reward model, which is evaluated on pairs alone", "`preferences`"],
    )
    load(put(with_reward, "eval.chats", evaluation | {"preferences": ["demo-preferences"]}))


def test_a_judge_compares_policies_alone(with_reward):
    judge = {"engine": {"url": "http://localhost:1", "model": "m"}, "rubric": "README.md", "against": "reward:liked"}
    evaluation = {"models": ["sft:demo", "reward:liked"], "conversations": ["demo-chat"]}
    evaluation |= {"preferences": ["demo-preferences"], "judge": judge}
    refused(put(with_reward, "eval.chats", evaluation), ["eval.chats.judge.against"])


@pytest.mark.parametrize(
    ("reward", "messages"),
    [
        ({"model": "reward:liked", "path": "some/model"}, ["expected either `model: reward:NAME` or `path`", "both"]),
        ({"batch_size": 4}, ["expected either `model: reward:NAME` or `path`", "neither"]),
        ({"model": "reward:liked", "revision": "main"}, ["revision applies to a reward model under `path`"]),
        ({"model": "reward:other"}, ["score.worth.by.reward.model", "there is no 'other' under `reward:`"]),
        ({"model": "sft:demo"}, ["expected a reward model: reward:NAME"]),
    ],
)
def test_scores_name_one_reward_model(with_reward, reward, messages):
    sample = {"model": "sft:demo", "prompts": {"corpora": ["demo-chat"]}}
    config = put(put(with_reward, "sample", {"tries": sample}), "score", {"worth": {"samples": "tries"}})
    refused(put(config, "score.worth.by", {"reward": reward}), messages)


def test_a_reward_model_of_responses_to_itself_is_refused(with_reward):
    """A corpus of scores by a reward model that is trained on that corpus."""
    sample = {"model": "sft:demo", "prompts": {"corpora": ["demo-chat"]}, "generation": {"temperature": 1.0}}
    config = put(with_reward, "sample", {"tries": sample})
    config = put(config, "score", {"worth": {"samples": "tries", "by": {"reward": {"model": "reward:liked"}}}})
    own = {"kind": "preferences", "sources": [{"scores": "worth", "pairs": "best-worst"}]}
    config = put(config, "corpora.own", own)
    load(config)
    refused(
        put(config, "reward.liked.corpus", "own"),
        ["corpora.own", "score.worth", "reward.liked", "train on another corpus"],
    )
