"""Validation of `report.sort_by`."""

import copy

import pytest

from snaketune.config.load import load
from snaketune.errors import SnaketuneError

from .edits import put


@pytest.mark.parametrize(
    "path",
    [
        "conversations.demo-chat.exact_match.by_task.weekday.share",
        "conversations.demo-chat.held_out_loss",
        # Names of tasks and metrics are lm-eval's and the files'.
        "tasks.demo_choice.acc",
    ],
)
def test_runs_can_be_sorted_by_any_score_of_an_evaluation(raw, path):
    config, _ = load(put(raw, "report.sort_by", path))
    assert config.report.sort_by == path


def test_a_count_of_a_task_is_no_score(raw):
    path = "conversations.demo-chat.exact_match.by_task.weekday.prompts"
    with pytest.raises(SnaketuneError, match=r"conversations have no score 'exact_match\.by_task\.weekday\.prompts'"):
        load(put(raw, "report.sort_by", path))


def test_rewards_are_refused_without_a_loss_with_a_reference(raw):
    raw["report"]["sort_by"] = "preferences.demo-preferences.reward_accuracy"
    load(raw)
    for run in raw["dpo"].values():
        run.pop("grid", None)
        run["loss"] = "simpo"
    with pytest.raises(SnaketuneError, match=r"require a loss of pairs with a reference.* use one of logp_accuracy, "):
        load(raw)


def test_rewards_need_a_run_that_is_evaluated_on_that_corpus(raw):
    """Runs that are evaluated on another corpus don't count."""
    raw["report"]["sort_by"] = "preferences.demo-preferences.reward_accuracy"
    wrong = "none of the runs of `dpo:` that are evaluated on 'demo-preferences' can have rewards"
    run = {key: value for key, value in raw["dpo"]["demo"].items() if key != "stop_if"}
    raw["corpora"]["labels"] = raw["corpora"]["demo-preferences"] | {"kind": "unpaired"}
    raw["dpo"] |= {
        "free": run | {"loss": "simpo"},
        "labelled": run | {"loss": "kto", "corpus": "labels"},
        "in-4-bits": run | {"lora": {}, "quantization": {}},
    }
    for name in ("free", "labelled", "in-4-bits"):
        raw["eval"]["demo"]["models"] = [f"dpo:{name}"]
        with pytest.raises(SnaketuneError, match=wrong):
            load(raw)
    raw["eval"]["demo"]["models"] = ["dpo:in-4-bits", "dpo:sweep"]
    load(raw)


def test_names_with_dots_can_be_sorted_by(raw):
    config = copy.deepcopy(raw)
    config["corpora"]["votes.v1.5"] = config["corpora"].pop("demo-preferences")
    config["dpo"]["demo"]["corpus"] = "votes.v1.5"
    config["eval"]["demo"]["preferences"] = ["votes.v1.5"]
    config["tokenizers"]["demo"]["train"]["corpora"] = ["demo-chat", "votes.v1.5"]
    config["report"]["sort_by"] = "preferences.votes.v1.5.reward_accuracy"
    load(config)


def test_exact_match_is_refused_if_no_row_can_have_an_answer(raw):
    raw = put(raw, "corpora.demo-chat.sources.0.fields", {"prompt": "question", "response": "reply"})
    raw = put(raw, "eval.demo", {"models": ["dpo:demo"], "conversations": ["demo-chat"]})
    load(put(raw, "report.sort_by", "conversations.demo-chat.held_out_loss"))
    for figure in ("share", "by_task.weekday.share"):
        with pytest.raises(SnaketuneError, match=r"report\.sort_by: .*no row of demo-chat can have a checkable answer"):
            load(put(raw, "report.sort_by", f"conversations.demo-chat.exact_match.{figure}"))
