"""Rules that find problems in results: each takes facts, and returns a finding with an action and a config key, or None.

A rule fires when a number is outside of what healthy runs show with any model and data; the reason for each threshold is given
beside it. Rules read no files and write no pages, so each can be tested separately.
"""

from collections.abc import Callable
from dataclasses import dataclass

from snaketune.report.judge.facts import BestRun, CorpusFacts, EvaluatedPrompts, PackFacts, SweptKey, TrainingFacts
from snaketune.report.judge.verdict import INCONCLUSIVE, WORSE, Difference, Verdict
from snaketune.report.text import decimal, duration, percent, whole, words

# A loss that falls by a smaller share than this shows no learning.
MIN_LOSS_CHANGE = 0.01
# Nats per chosen token: the threshold of `training.preference.dpo_monitor` for a collapse.
CHOSEN_FELL = 0.1
# Ratio of held-out loss to the training loss of the last steps that indicates overfitting after more than one epoch.
OVERFIT = 1.5
# Dense models of useful size reach 0.3 to 0.5 on GPUs, and on a CPU 0.2 to 0.4 of a measured matrix multiplication.
LOW_MFU, LOW_MFU_CPU = 0.15, 0.10
WAITED = 0.05
SLOWER = 10.0
SUPERVISED = 0.02
QUARANTINED = 0.005
REPEATED = 0.05
TRUNCATED = 0.1
# The best of this many equally good runs leads by about one standard error.
MANY_RUNS = 5
# The difference of shares that an evaluation should be able to detect.
RESOLUTION = 0.1

WARNS, NOTES = "warns", "notes"


@dataclass(frozen=True, kw_only=True)
class ReportFinding:
    """A problem, where it is, and what to do about it.

    Attributes:
        kind: The rule's name, and after a colon what distinguishes its findings. Findings of one kind and key are grouped.
        where: A run, a pack, a corpus or an evaluation.
        key: The config key to edit.
        action: What to do with that key.
    """

    kind: str
    where: str
    message: str
    action: str = ""
    key: str = ""
    severity: str = WARNS


def _training_finding(facts: TrainingFacts, kind: str, message: str, action: str, key: str) -> ReportFinding:
    return ReportFinding(kind=kind, where=facts.label, message=message, action=action, key=f"{facts.key}.{key}")


def ended_early(run: TrainingFacts) -> ReportFinding | None:
    if run.stopped is None:
        return None
    message = f"stopped by stop_if at step {whole(run.stopped.step)}: {run.stopped.reason}"
    return _training_finding(run, "stopped early", message, "halve it", "training.learning_rate")


# By kind of warning: the action, and the key.
REMEDIES = {
    "collapse": ("add an SFT term on the chosen completions, {sigmoid: 1.0, sft: 0.2}, or raise beta", "loss"),
    "only rejected": ("add an SFT term on the chosen completions, {sigmoid: 1.0, sft: 0.2}", "loss"),
    "length": (
        "lower it (to 0.5, say), so that tokens beyond the shorter length weigh less, or use a length-normalized loss (simpo)",
        "ld_alpha",
    ),
}


def training_warning(run: TrainingFacts) -> ReportFinding | None:
    """The first warning of the training that still held at its end."""
    lasting = [one for one in run.warnings if one.at_end is not None]
    if not lasting:
        return None
    first = lasting[0]
    action, key = REMEDIES.get(first.kind, ("", ""))
    more = f" (and {len(lasting) - 1} more, below)" if len(lasting) > 1 else ""
    return ReportFinding(
        kind=f"training warning: {first.kind}",
        where=run.label,
        message=f"{first.at_end}{more}",
        action=action,
        key=key and f"{run.key}.{key}",
    )


def loss_not_falling(run: TrainingFacts) -> ReportFinding | None:
    if run.loss is None or run.stopped:
        return None
    first, last = run.loss
    if first - last >= MIN_LOSS_CHANGE * abs(first):
        return None
    rose = last - first > MIN_LOSS_CHANGE * abs(first)
    message = f"the training loss {'rose' if rose else 'did not fall'}: {decimal(first)} → {decimal(last)}"
    action = "divide it by three" if rose else "multiply it by three, or train more epochs"
    return _training_finding(run, "loss not falling", message, action, "training.learning_rate")


def chosen_falling(run: TrainingFacts) -> ReportFinding | None:
    """Only for runs without warnings of their own, such as those of TRL's trainers."""
    if run.chosen is None or run.warnings or run.chosen[0] - run.chosen[1] < CHOSEN_FELL:
        return None
    first, last = run.chosen
    message = f"log-probability of chosen completions fell: {decimal(first)} → {decimal(last)} nats per token"
    return _training_finding(run, "chosen falling", message, REMEDIES["collapse"][0], "loss")


def held_out_rising(run: TrainingFacts) -> ReportFinding | None:
    """Held-out loss rose while the training loss fell."""
    if run.loss is None or run.loss[1] >= run.loss[0]:
        return None
    for corpus, (before, after) in run.held_out.items():
        if after > before * (1 + MIN_LOSS_CHANGE):
            message = (
                f"the training loss fell, but held-out loss of {corpus} rose: {decimal(before)} → {decimal(after)}; "
                "overfitting, or the held-out rows differ from the training rows"
            )
            return _training_finding(
                run,
                "held-out loss rising",
                message,
                "train fewer epochs, or lower the learning rate",
                "training.epochs",
            )
    return None


def overfitted(run: TrainingFacts) -> ReportFinding | None:
    if run.loss is None or run.epochs is None or run.epochs <= 1 or not run.held_out or held_out_rising(run):
        return None
    corpus, (_, lowest) = min(run.held_out.items(), key=lambda entry: entry[1][1])
    if lowest <= OVERFIT * max(run.loss[1], 0.01):
        return None
    message = (
        f"overfitting after {decimal(run.epochs)} epochs: held-out loss of {corpus} is {decimal(lowest)}, training loss of the "
        f"last steps {decimal(run.loss[1])}"
    )
    return _training_finding(run, "overfitting", message, "train fewer epochs, or on more rows", "training.epochs")


def low_mfu(run: TrainingFacts) -> ReportFinding | None:
    low = LOW_MFU if run.gpu else LOW_MFU_CPU
    if run.mfu is None or run.mfu >= low:
        return None
    usual = "30 to 50%" if run.gpu else "20 to 40%"
    message = f"MFU is {percent(run.mfu)}; {usual} is usual for a model that keeps the device busy"
    if run.calibrated:
        return _training_finding(
            run, "low MFU", message, "use more rows per step, which allows larger micro-batches", "training.batch_rows"
        )
    return _training_finding(
        run, "low MFU", message, "remove it, so that the fastest size is measured", "training.micro_batch_rows"
    )


def waited_for_data(run: TrainingFacts) -> ReportFinding | None:
    if not run.waited_s or not run.seconds or run.waited_s < WAITED * run.seconds:
        return None
    message = f"waited {duration(run.waited_s)} for data, {percent(run.waited_s / run.seconds)} of its time"
    return _training_finding(run, "waited for data", message, "set it to true", "operation.load_in_memory")


def slow_micro_batch(run: TrainingFacts) -> ReportFinding | None:
    if run.slowdown_percent is None or run.slowdown_percent < SLOWER:
        return None
    message = f"the configured micro-batch is {run.slowdown_percent:.0f}% slower than the best that was measured"
    return _training_finding(run, "slow micro-batch", message, "remove it", "training.micro_batch_rows")


def lost_to_length(pack: PackFacts) -> ReportFinding | None:
    if pack.lost_to_length is None:
        return None
    sequences, tokens, enough = pack.lost_to_length
    message = (
        f"{words(pack.split)}: {percent(sequences)} of the {pack.unit} and {percent(tokens)} of the tokens don't fit into rows "
        f"of {whole(pack.length)} tokens"
    )
    action = f"set it to {enough}, which keeps 99% of the tokens"
    return ReportFinding(
        kind="tokens lost", where=pack.name, message=message, action=action, key=pack.key and f"{pack.key}.length"
    )


def little_supervised(pack: PackFacts) -> ReportFinding | None:
    if not pack.tokens or pack.split != "train" or pack.supervised >= SUPERVISED * pack.tokens:
        return None
    share = percent(pack.supervised / pack.tokens, 2)
    message = f"only {share} of the tokens are supervised, so most of the computation trains nothing"
    action = "see supervised text in packing.html; set it to `all`, or use a chat template that marks assistant turns"
    return ReportFinding(
        kind="little supervised",
        where=pack.name,
        message=message,
        action=action,
        key=pack.key and f"{pack.key}.train_on",
    )


def pack_count_errors(pack: PackFacts) -> ReportFinding | None:
    return _count_error_finding(pack.name, pack.count_errors)


def corpus_count_errors(corpus: CorpusFacts) -> ReportFinding | None:
    return _count_error_finding(corpus.name, corpus.count_errors)


def _count_error_finding(where: str, count_errors: tuple[str, ...]) -> ReportFinding | None:
    return (
        ReportFinding(
            kind="counts", where=where, message=f"counts don't add up: {'; '.join(count_errors)}", severity=NOTES
        )
        if count_errors
        else None
    )


def much_quarantined(corpus: CorpusFacts) -> ReportFinding | None:
    bad = sum(corpus.quarantined.values())
    if not corpus.read or bad < QUARANTINED * corpus.read:
        return None
    reasons = ", ".join(f"{whole(n)} {words(reason)}" for reason, n in list(corpus.quarantined.items())[:3])
    message = f"{whole(bad)} of {whole(corpus.read)} rows ({percent(bad / corpus.read)}) are quarantined: {reasons}"
    action = "fix the files, map their columns (fields), or enable repairs; corpus.html has examples"
    return ReportFinding(
        kind="quarantined", where=corpus.name, message=message, action=action, key=f"{corpus.key}.repair"
    )


def repeated_prompts(prompts: EvaluatedPrompts) -> ReportFinding | None:
    again = prompts.prompts - prompts.distinct
    if not prompts.prompts or again < REPEATED * prompts.prompts:
        return None
    message = (
        f"{whole(again)} of {whole(prompts.prompts)} held-out prompts of {prompts.corpus} are duplicates, so intervals are too "
        "narrow"
    )
    return ReportFinding(
        kind="repeated prompts",
        where=prompts.evaluation,
        message=message,
        action="drop near duplicates",
        key=f"corpora.{prompts.corpus}.near_duplicates",
    )


def truncated_answers(prompts: EvaluatedPrompts) -> ReportFinding | None:
    if not prompts.answers or prompts.truncated < TRUNCATED * prompts.answers:
        return None
    message = (
        f"{percent(prompts.truncated / prompts.answers)} of the responses of {prompts.model} to {prompts.corpus} were "
        f"truncated at {whole(prompts.max_new_tokens)} tokens"
    )
    return ReportFinding(
        kind="truncated responses",
        where=prompts.evaluation,
        message=message,
        action=f"set it to {2 * (prompts.max_new_tokens or 0)} if responses may be longer; else the model didn't learn to stop",
        key=f"eval.{prompts.evaluation}.generation.max_new_tokens",
    )


def worse_than_before(one: Difference, verdict: Verdict) -> ReportFinding | None:
    if one.outcome != WORSE:
        return None
    message = f"worse than {verdict.against}: {one.name} {one.text} ({one.interval_text})"
    action = "lower it, or train fewer epochs"
    return ReportFinding(
        kind=f"worse: {verdict.against}, {one.name}",
        where=verdict.model,
        message=message,
        action=action,
        key=verdict.key and f"{verdict.key}.training.learning_rate",
    )


def too_few_rows(one: Difference, verdict: Verdict) -> ReportFinding | None:
    """An inconclusive difference on so few rows that a difference of RESOLUTION would be inconclusive too."""
    if one.outcome != INCONCLUSIVE or one.measure.unit != "share" or one.interval is None:
        return None
    low, high = one.interval
    half = (high - low) / 2
    if half <= RESOLUTION:
        return None
    # The width of an interval is proportional to one over the square root of the rows.
    needed = round((half / RESOLUTION) ** 2, 1)
    message = (
        f"{one.name} is inconclusive for {verdict.model} against {verdict.against}: with {whole(one.rows)} rows, only "
        f"differences above {100 * half:.0f} points are significant"
    )
    return ReportFinding(
        kind="too few rows",
        where=one.evaluation,
        message=message,
        action=f"hold out about {decimal(needed)} times as many rows to detect {100 * RESOLUTION:.0f} points",
        key=f"corpora.{one.measure.path.split('.')[1]}.held_out",
        severity=NOTES,
    )


def best_at_the_edge(one: SweptKey) -> ReportFinding | None:
    if one.best not in (one.values[0], one.values[-1]):
        return None
    highest = one.best == one.values[-1]
    message = (
        f"the best run, {one.run}, has the {'highest' if highest else 'lowest'} {one.name} that was tried, {one.best:g}"
    )
    further = one.best * 2 if highest else one.best / 2
    return ReportFinding(
        kind=f"edge of {one.name}",
        where=one.key,
        message=message,
        action=f"extend it {'upwards' if highest else 'downwards'}: {one.name} {further:g}",
        key=f"{one.key}.grid",
        severity=NOTES,
    )


def best_of_many_runs(one: BestRun) -> ReportFinding | None:
    if one.candidates < MANY_RUNS:
        return None
    message = (
        f"selected as the best of {one.candidates} runs on the rows of its verdict, which is therefore biased upwards"
    )
    action = "evaluate the first few runs on rows that weren't used to select them"
    return ReportFinding(
        kind="best of many runs", where=one.run, message=message, action=action, key="eval", severity=NOTES
    )


DIFFERENCE_RULES: tuple[Callable[[Difference, Verdict], ReportFinding | None], ...] = (worse_than_before, too_few_rows)
TRAINING_RULES: tuple[Callable[[TrainingFacts], ReportFinding | None], ...] = (
    ended_early,
    training_warning,
    loss_not_falling,
    chosen_falling,
    held_out_rising,
    overfitted,
    low_mfu,
    slow_micro_batch,
    waited_for_data,
)
PACK_RULES: tuple[Callable[[PackFacts], ReportFinding | None], ...] = (
    lost_to_length,
    little_supervised,
    pack_count_errors,
)
CORPUS_RULES: tuple[Callable[[CorpusFacts], ReportFinding | None], ...] = (much_quarantined, corpus_count_errors)
PROMPT_RULES: tuple[Callable[[EvaluatedPrompts], ReportFinding | None], ...] = (repeated_prompts, truncated_answers)
SWEEP_RULES: tuple[Callable[[SweptKey], ReportFinding | None], ...] = (best_at_the_edge,)
BEST_RUN_RULES: tuple[Callable[[BestRun], ReportFinding | None], ...] = (best_of_many_runs,)
