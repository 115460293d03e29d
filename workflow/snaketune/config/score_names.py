"""What `report.sort_by` may name: the figures of an evaluation's scores.json."""

from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow, missing_answers_hint
from snaketune.errors import SnaketuneError

# By section of scores.json, the figures that each of its corpora has. Those of tasks are lm-evaluation-harness's own.
FIGURES = {
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
# Of these, those that are held against a reference.
REWARDS = ("reward_accuracy", "reward_margin_nats", "chosen_reward_nats", "rejected_reward_nats")
# By task, what depends on what the rows and the task files hold.
OPEN = {"conversations": "exact_match.by_task."}


def check_sort_by(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Refuse a `report.sort_by` that no variant can have, as far as the config alone tells it.

    Args:
        variants: as `config.load` gives them.
    Raises:
        SnaketuneError: with the names that there are.
    """
    path = config.report.sort_by
    if path is None:
        return
    key = "report.sort_by"
    evaluations = [one for one in config.eval.values() if any(name.startswith("dpo:") for name in one.models)]
    if not evaluations:
        raise SnaketuneError(
            f"{key}: {path!r} sorts the runs of `dpo:`, and no entry of `eval:` has one among its models"
        )
    sections = {
        "conversations": {name for one in evaluations for name in one.conversations},
        "preferences": {name for one in evaluations for name in one.preferences},
        "tasks": {name for one in evaluations if one.tasks for name in one.tasks.names},
    }
    section, _, rest = path.partition(".")
    if section not in sections:
        raise SnaketuneError(f"{key}: {path!r} begins with {section!r}{unknown(section, sections)}")
    if section == "tasks":
        # Tags and groups stand for tasks that only the files name, and metrics are theirs.
        if not sections[section]:
            raise SnaketuneError(f"{key}: {path!r}, but no entry of `eval:` with a run of `dpo:` has tasks")
        return
    # A name may hold dots.
    on = next((name for name in sorted(sections[section], key=len, reverse=True) if rest.startswith(f"{name}.")), None)
    if on is None:
        name = rest.partition(".")[0]
        raise SnaketuneError(
            f"{key}: {path!r}: no entry of `eval:` with a run of `dpo:` has {name!r} under `{section}:`"
            f"{unknown(name, sections[section])}"
        )
    figure = rest.removeprefix(f"{on}.")
    if figure not in FIGURES[section] and not (section in OPEN and figure.startswith(OPEN[section])):
        raise SnaketuneError(f"{key}: {path!r}: {section} have no figure {figure!r}{unknown(figure, FIGURES[section])}")
    compared = figure.startswith("exact_match.") and figure != "exact_match.mean_response_tokens"
    if compared and not config.corpora[on].may_have_answers:
        raise SnaketuneError(f"{key}: {path!r}: {missing_answers_hint((on,), config)}")
    if section == "preferences" and figure in REWARDS:
        names = {name.removeprefix("dpo:") for one in evaluations if on in one.preferences for name in one.models}
        runs = [config.dpo[run] for name in names for run in variants["dpo"].get(name, ()) if run in config.dpo]
        # Those of completions with a label are of no pairs; weights in 4 bits are other weights than an evaluation's.
        if not any(run.needs_reference and not run.unpaired and run.quantization is None for run in runs):
            there = ", ".join(name for name in FIGURES[section] if name not in REWARDS)
            raise SnaketuneError(
                f"{key}: {path!r}: none of the runs of `dpo:` that are asked about {on!r} can have rewards there: that takes a "
                f"loss of pairs with a reference, without `quantization`; there are {there}"
            )
