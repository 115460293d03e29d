"""What is suspicious, rule by rule: facts in, a sentence out, or nothing; with what to try and the key of the config to edit.

A rule speaks where its numbers are beyond what a sound run shows, whatever the model and the data; what lies behind the bound
is said beside it. Rules know nothing of files and pages, so that each is tried by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from snaketune.report.judge.facts import BestRun, CorpusFacts, EvaluatedPrompts, PackFacts, SweptKey, TrainingFacts
from snaketune.report.judge.verdict import INCONCLUSIVE, WORSE, Difference, Verdict
from snaketune.report.text import decimal, duration, percent, whole, words

# A loss that falls by less than this share of itself hasn't learned what its curve could show.
MIN_LOSS_CHANGE = 0.01
# Of chosen tokens, in nats: what `training.preference.dpo_monitor` calls a collapse.
CHOSEN_FELL = 0.1
# Held-out loss this much above the loss of the last steps, after more than one epoch, is learned by heart.
OVERFIT = 1.5
# Dense models of a useful size reach 0.3 to 0.5 on GPUs, and as much of a measured matrix product on a CPU.
LOW_MFU, LOW_MFU_CPU = 0.15, 0.10
WAITED = 0.05
SLOWER = 10.0
SUPERVISED = 0.02
QUARANTINED = 0.005
REPEATED = 0.05
TRUNCATED = 0.1
# The best of so many runs that are all alike leads by a standard error.
MANY_RUNS = 5
# A difference of shares that an evaluation should tell from none.
RESOLUTION = 0.1

WARNS, NOTES = "warns", "notes"


@dataclass(frozen=True, kw_only=True)
class ReportFinding:
    """What was found where, and what to try.

    Attributes:
        kind: the rule, and after a colon what is told apart; alike suspicions of many runs stand together.
        where: a run, a pack, a corpus.
        key: of the config, the one to edit.
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
    message = f"ended by stop_if at step {whole(run.stopped.step)}: {run.stopped.reason}"
    return _training_finding(run, "ended early", message, "halve the learning rate", "training.learning_rate")


# By kind of warning: what to try, and the key.
REMEDIES = {
    "collapse": ("add the chosen completions' own loss, as {sigmoid: 1.0, sft: 0.2}, or raise beta", "loss"),
    "only rejected": ("add the chosen completions' own loss, as {sigmoid: 1.0, sft: 0.2}", "loss"),
    "length": ("weigh what is longer less (0.5, say), or take a loss of probabilities per token (simpo)", "ld_alpha"),
}


def training_warning(run: TrainingFacts) -> ReportFinding | None:
    """The first of what the training said of itself and didn't take back."""
    lasting = [one for one in run.warnings if one.at_end is not None]
    if not lasting:
        return None
    first = lasting[0]
    action, key = REMEDIES.get(first.kind, ("", ""))
    more = f" (and {len(lasting) - 1} more, below)" if len(lasting) > 1 else ""
    return ReportFinding(
        kind=f"warned of {first.kind}",
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
    message = f"the loss {'rose' if rose else 'did not fall'}: {decimal(first)} → {decimal(last)}"
    action = "a third of the learning rate" if rose else "three times the learning rate, or more epochs"
    return _training_finding(run, "loss not falling", message, action, "training.learning_rate")


def chosen_falling(run: TrainingFacts) -> ReportFinding | None:
    """Where the training itself wasn't watched, as by TRL."""
    if run.chosen is None or run.warnings or run.chosen[0] - run.chosen[1] < CHOSEN_FELL:
        return None
    first, last = run.chosen
    message = f"chosen completions became less likely: {decimal(first)} → {decimal(last)} nats per token"
    return _training_finding(run, "chosen falling", message, REMEDIES["collapse"][0], "loss")


def held_out_rising(run: TrainingFacts) -> ReportFinding | None:
    """Worse on held-out rows than before, while the loss of the training fell."""
    if run.loss is None or run.loss[1] >= run.loss[0]:
        return None
    for corpus, (before, after) in run.held_out.items():
        if after > before * (1 + MIN_LOSS_CHANGE):
            message = (
                f"the training loss fell, but held-out loss of {corpus} rose: {decimal(before)} → {decimal(after)}; "
                "it learned what isn't in those rows, or by heart"
            )
            return _training_finding(
                run, "held-out loss rising", message, "fewer epochs, or a lower learning rate", "training.epochs"
            )
    return None


def overfitted(run: TrainingFacts) -> ReportFinding | None:
    if run.loss is None or run.epochs is None or run.epochs <= 1 or not run.held_out or held_out_rising(run):
        return None
    corpus, (_, lowest) = min(run.held_out.items(), key=lambda entry: entry[1][1])
    if lowest <= OVERFIT * max(run.loss[1], 0.01):
        return None
    message = (
        f"held-out loss of {corpus} is {decimal(lowest)}, and that of the last steps {decimal(run.loss[1])}: after "
        f"{decimal(run.epochs)} epochs it knows its rows by heart"
    )
    return _training_finding(run, "learned by heart", message, "fewer epochs, or more rows", "training.epochs")


def low_mfu(run: TrainingFacts) -> ReportFinding | None:
    low = LOW_MFU if run.gpu else LOW_MFU_CPU
    if run.mfu is None or run.mfu >= low:
        return None
    usual = "30 to 50%" if run.gpu else "20 to 40%"
    message = f"MFU is {percent(run.mfu)}; {usual} is usual where the model keeps the device busy"
    if run.calibrated:
        return _training_finding(
            run, "low MFU", message, "more rows a step, of which more are computed at once", "training.batch_rows"
        )
    return _training_finding(
        run, "low MFU", message, "leave it out, so that the fastest is measured", "training.micro_batch_rows"
    )


def waited_for_data(run: TrainingFacts) -> ReportFinding | None:
    if not run.waited_s or not run.seconds or run.waited_s < WAITED * run.seconds:
        return None
    message = f"waited {duration(run.waited_s)} for data, {percent(run.waited_s / run.seconds)} of its time"
    return _training_finding(run, "waited for data", message, "true", "operation.load_in_memory")


def slow_micro_batch(run: TrainingFacts) -> ReportFinding | None:
    if run.slowdown_percent is None or run.slowdown_percent < SLOWER:
        return None
    message = f"the micro-batch chosen by hand is {run.slowdown_percent:.0f}% slower than the best that was measured"
    return _training_finding(run, "slow by choice", message, "leave it out", "training.micro_batch_rows")


def lost_to_length(pack: PackFacts) -> ReportFinding | None:
    if pack.lost_to_length is None:
        return None
    sequences, tokens, enough = pack.lost_to_length
    message = (
        f"{words(pack.split)}: {percent(sequences)} of the {pack.unit} and {percent(tokens)} of the tokens don't fit into rows "
        f"of {whole(pack.length)} tokens"
    )
    action = f"{enough} keeps 99% of the tokens"
    return ReportFinding(
        kind="tokens lost", where=pack.name, message=message, action=action, key=pack.key and f"{pack.key}.length"
    )


def little_supervised(pack: PackFacts) -> ReportFinding | None:
    if not pack.tokens or pack.split != "train" or pack.supervised >= SUPERVISED * pack.tokens:
        return None
    share = percent(pack.supervised / pack.tokens, 2)
    message = f"{share} of the tokens are supervised: most of what is computed teaches nothing"
    action = "see in packing.html what is supervised; `all`, or a chat template that marks what the assistant says"
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
            kind="sums", where=where, message=f"counts don't add up: {'; '.join(count_errors)}", severity=NOTES
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
    action = "mend the files, name their columns (fields), or repair rows; corpus.html has examples"
    return ReportFinding(
        kind="quarantined", where=corpus.name, message=message, action=action, key=f"{corpus.key}.repair"
    )


def repeated_prompts(prompts: EvaluatedPrompts) -> ReportFinding | None:
    again = prompts.prompts - prompts.distinct
    if not prompts.prompts or again < REPEATED * prompts.prompts:
        return None
    message = (
        f"{whole(again)} of {whole(prompts.prompts)} held-out prompts of {prompts.corpus} repeat another: the intervals look "
        "narrower than they are"
    )
    return ReportFinding(
        kind="repeated prompts",
        where=prompts.evaluation,
        message=message,
        action="drop rows that say nearly the same",
        key=f"corpora.{prompts.corpus}.near_duplicates",
    )


def truncated_answers(prompts: EvaluatedPrompts) -> ReportFinding | None:
    if not prompts.answers or prompts.truncated < TRUNCATED * prompts.answers:
        return None
    message = (
        f"{percent(prompts.truncated_answers / prompts.answers)} of the answers of {prompts.model} to {prompts.corpus} were cut off at "
        f"{whole(prompts.max_new_tokens)} tokens"
    )
    return ReportFinding(
        kind="answers cut off",
        where=prompts.evaluation,
        message=message,
        action=f"{2 * (prompts.max_new_tokens or 0)}, if answers may be that long; else the model doesn't know where to end",
        key=f"eval.{prompts.evaluation}.generation.max_new_tokens",
    )


def worse_than_before(one: Difference, verdict: Verdict) -> ReportFinding | None:
    if one.outcome != WORSE:
        return None
    message = f"worse than {verdict.against}: {one.name} {one.text} ({one.interval_text})"
    action = "a lower learning rate, or fewer epochs"
    return ReportFinding(
        kind=f"worse: {verdict.against}, {one.name}",
        where=verdict.model,
        message=message,
        action=action,
        key=verdict.key and f"{verdict.key}.training.learning_rate",
    )


def too_few_rows(one: Difference, verdict: Verdict) -> ReportFinding | None:
    """A difference that is open, of so few rows that one of TELLS would be too."""
    if one.outcome != INCONCLUSIVE or one.measure.unit != "share" or one.interval is None:
        return None
    low, high = one.interval
    half = (high - low) / 2
    if half <= RESOLUTION:
        return None
    # Intervals narrow with the root of the rows.
    needed = round((half / RESOLUTION) ** 2, 1)
    message = (
        f"{one.name} can't tell {verdict.model} from {verdict.against}: of {whole(one.rows)} rows, only differences above "
        f"{100 * half:.0f} points are told from none"
    )
    return ReportFinding(
        kind="too few rows",
        where=one.evaluation,
        message=message,
        action=f"about {decimal(needed)} times as many held-out rows tell {100 * RESOLUTION:.0f} points",
        key=f"corpora.{one.measure.path.split('.')[1]}.held_out",
        severity=NOTES,
    )


def best_at_the_edge(one: SweptKey) -> ReportFinding | None:
    if one.best not in (one.values[0], one.values[-1]):
        return None
    highest = one.best == one.values[-1]
    message = (
        f"the best, {one.run}, has the {'highest' if highest else 'lowest'} {one.name} that was tried, {one.best:g}"
    )
    further = one.best * 2 if highest else one.best / 2
    return ReportFinding(
        kind=f"edge of {one.name}",
        where=one.key,
        message=message,
        action=f"try further {'up' if highest else 'down'}: {one.name} {further:g}",
        key=f"{one.key}.grid",
        severity=NOTES,
    )


def best_of_many_runs(one: BestRun) -> ReportFinding | None:
    if one.candidates < MANY_RUNS:
        return None
    message = (
        f"picked as the best of {one.candidates} runs by the rows that its verdict is of: some of its lead is luck"
    )
    action = "ask the first few about rows that none was picked by"
    return ReportFinding(
        kind="picked of many", where=one.run, message=message, action=action, key="eval", severity=NOTES
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
