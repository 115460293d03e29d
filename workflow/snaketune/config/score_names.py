"""The values of `report.sort_by`: paths of scores in an evaluation's scores.json."""

from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow, missing_answers_hint
from snaketune.errors import SnaketuneError

# The scores of each corpus, by section of scores.json. The scores of tasks are defined by lm-evaluation-harness.
SCORES = {
    "conversations": (
        "held_out_loss",
        "perplexity",
        "exact_match.share",
        "exact_match.mean_response_tokens",
    ),
    "preferences": (
        "logp_accuracy",
        "logp_accuracy_per_token",
        "logp_margin_nats",
        "chosen_logp_nats",
        "rejected_logp_nats",
        "reward_accuracy",
        "reward_margin_nats",
        "chosen_reward_nats",
        "rejected_reward_nats",
    ),
}
# Preference scores that need a reference.
REWARDS = ("reward_accuracy", "reward_margin_nats", "chosen_reward_nats", "rejected_reward_nats")
# Scores by task: their names depend on the rows, so any name with this prefix is accepted.
OPEN_ENDED = {"conversations": "exact_match.by_task."}


def check_sort_by(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Check that at least one run of `dpo:` can have the score that `report.sort_by` names, as far as the config shows.

    Args:
        variants: as `config.load` returns them.
    Raises:
        SnaketuneError: no run can have the score; names the scores that exist.
    """
    path = config.report.sort_by
    if path is None:
        return
    key = "report.sort_by"
    evaluations = [one for one in config.eval.values() if any(name.startswith("dpo:") for name in one.models)]
    if not evaluations:
        raise SnaketuneError(f"{key}: {path!r} sorts the runs of `dpo:`, but no entry of `eval:` evaluates one")
    sections = {
        "conversations": {name for one in evaluations for name in one.conversations},
        "preferences": {name for one in evaluations for name in one.preferences},
        "tasks": {name for one in evaluations if one.tasks for name in one.tasks.names},
    }
    section, _, rest = path.partition(".")
    if section not in sections:
        raise SnaketuneError(f"{key}: {path!r} begins with {section!r}{unknown(section, sections)}")
    if section == "tasks":
        # Tags, groups and metrics are defined in task files, which aren't read here.
        if not sections[section]:
            raise SnaketuneError(f"{key}: {path!r}, but no entry of `eval:` with a run of `dpo:` has tasks")
        return
    # Names of corpora may contain dots.
    on = next((name for name in sorted(sections[section], key=len, reverse=True) if rest.startswith(f"{name}.")), None)
    if on is None:
        name = rest.partition(".")[0]
        raise SnaketuneError(
            f"{key}: {path!r}: no entry of `eval:` with a run of `dpo:` has {name!r} under `{section}:`"
            f"{unknown(name, sections[section])}"
        )
    score = rest.removeprefix(f"{on}.")
    if score not in SCORES[section] and not (section in OPEN_ENDED and score.startswith(OPEN_ENDED[section])):
        raise SnaketuneError(f"{key}: {path!r}: {section} have no score {score!r}{unknown(score, SCORES[section])}")
    compared = score.startswith("exact_match.") and score != "exact_match.mean_response_tokens"
    if compared and not config.corpora[on].may_have_answers:
        raise SnaketuneError(f"{key}: {path!r}: {missing_answers_hint((on,), config)}")
    if section == "preferences" and score in REWARDS:
        names = {name.removeprefix("dpo:") for one in evaluations if on in one.preferences for name in one.models}
        runs = [config.dpo[run] for name in names for run in variants["dpo"].get(name, ()) if run in config.dpo]
        # Runs on single completions have no reference log-probabilities of pairs, and 4-bit weights differ from those of an
        # evaluation.
        if not any(run.needs_reference and not run.unpaired and run.quantization is None for run in runs):
            others = ", ".join(name for name in SCORES[section] if name not in REWARDS)
            raise SnaketuneError(
                f"{key}: {path!r}: none of the runs of `dpo:` that are evaluated on {on!r} can have rewards: they require a "
                f"loss of pairs with a reference, without `quantization`; use one of {others}"
            )
