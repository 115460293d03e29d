"""The values of `report.sort_by`: paths of scores in an evaluation's scores.json."""

from snaketune.config.response_references import missing_answers_hint
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown

# Preference scores that need a reference.
REWARDS = ("reward_accuracy", "reward_margin_nats", "chosen_reward_nats", "rejected_reward_nats")
_LOGPS = ("logp_accuracy", "logp_accuracy_per_token", "logp_margin_nats", "chosen_logp_nats", "rejected_logp_nats")
# The scores of each corpus, by section of scores.json. The scores of tasks are defined by lm-evaluation-harness.
SCORES = {
    "conversations": ("held_out_loss", "perplexity", "exact_match.share", "exact_match.mean_response_tokens"),
    "preferences": (*_LOGPS, *REWARDS),
}
# Scores by task: their names depend on the rows, so any name between the two is accepted.
BY_TASK = "exact_match.by_task.", ".share"


def check_sort_by(config: Workflow, variants: Variants) -> None:
    """Raise SnaketuneError if no run of `dpo:` can have the score that `report.sort_by` names, as far as the config shows."""
    path = config.report.sort_by
    if path is None:
        return
    key = f"report.sort_by: {path!r}"
    evaluations = [
        evaluation for evaluation in config.eval.values() if any(name.startswith("dpo:") for name in evaluation.models)
    ]
    if not evaluations:
        raise SnaketuneError(f"{key} sorts the runs of `dpo:`, but no entry of `eval:` evaluates one")
    sections = {
        "conversations": {name for evaluation in evaluations for name in evaluation.conversations},
        "preferences": {name for evaluation in evaluations for name in evaluation.preferences},
        "tasks": {name for evaluation in evaluations if evaluation.tasks for name in evaluation.tasks.names},
    }
    section, _, rest = path.partition(".")
    if section not in sections:
        raise SnaketuneError(f"{key} begins with {section!r}{unknown(section, sections)}")
    names = sections[section]
    if section == "tasks":
        # Tags, groups and metrics are defined in task files, which aren't read here.
        if not names:
            raise SnaketuneError(f"{key}, but no entry of `eval:` with a run of `dpo:` has tasks")
        return
    # Names of corpora may contain dots.
    corpus = max((name for name in names if rest.startswith(f"{name}.")), key=len, default=None)
    if corpus is None:
        name = rest.partition(".")[0]
        raise SnaketuneError(
            f"{key}: no entry of `eval:` with a run of `dpo:` has {name!r} under `{section}:`{unknown(name, names)}"
        )
    score = rest.removeprefix(f"{corpus}.")
    begin, end = BY_TASK
    of_task = section == "conversations" and score.startswith(begin) and score.endswith(end)
    if score not in SCORES[section] and not of_task:
        raise SnaketuneError(f"{key}: {section} have no score {score!r}{unknown(score, SCORES[section])}")
    compared = score.startswith("exact_match.") and score != "exact_match.mean_response_tokens"
    if compared and not config.corpora[corpus].may_have_answers:
        raise SnaketuneError(f"{key}: {missing_answers_hint((corpus,), config)}")
    if section == "preferences" and score in REWARDS:
        models = {
            name.removeprefix("dpo:")
            for evaluation in evaluations
            if corpus in evaluation.preferences
            for name in evaluation.models
        }
        runs = [config.dpo[run] for name in models for run in variants["dpo"].get(name, ()) if run in config.dpo]
        # Runs on single completions have no reference log-probabilities of pairs, and 4-bit weights differ from those of an
        # evaluation.
        if not any(run.needs_reference and not run.unpaired and run.quantization is None for run in runs):
            raise SnaketuneError(
                f"{key}: none of the runs of `dpo:` that are evaluated on {corpus!r} can have rewards: they require a loss of "
                f"pairs with a reference, without `quantization`; use one of {', '.join(_LOGPS)}"
            )
