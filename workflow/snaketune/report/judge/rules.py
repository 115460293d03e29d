"""What is suspicious, rule by rule: facts in, a sentence out, or nothing; with what to try and the key of the config to edit.

A rule speaks where its numbers are beyond what a sound run shows, whatever the model and the data; what lies behind the bound
is said beside it. Rules know nothing of files and pages, so that each is tried by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from snaketune.report.judge.facts import Asked, Packed, Picked, Rows, Swept, Training
from snaketune.report.judge.verdict import OPEN, WORSE, Difference, Verdict
from snaketune.report.text import decimal, duration, percent, whole, words

# A loss that falls by less than this share of itself hasn't learned what its curve could show.
FELL = 0.01
# Of chosen tokens, in nats: what `training.preference.dpo_monitor` calls a collapse.
CHOSEN_FELL = 0.1
# Held-out loss this much above the loss of the last steps, after more than one epoch, is learned by heart.
BY_HEART = 1.5
# Dense models of a useful size reach 0.3 to 0.5 on GPUs, and as much of a measured matrix product on a CPU.
LOW_MFU, LOW_MFU_CPU = 0.15, 0.10
WAITED = 0.05
SLOWER = 10.0
SUPERVISED = 0.02
QUARANTINED = 0.005
REPEATED = 0.05
CUT_OFF = 0.1
# The best of so many runs that are all alike leads by a standard error.
MANY = 5
# A difference of shares that an evaluation should tell from none.
TELLS = 0.1

WARNS, NOTES = "warns", "notes"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What was found where, and what to try.

    Attributes:
        kind: the rule, and after a colon what is told apart; alike suspicions of many runs stand together.
        where: a run, a pack, a corpus.
        key: of the config, the one to edit.
    """

    kind: str
    where: str
    found: str
    do: str = ""
    key: str = ""
    severity: str = WARNS


def _of(facts: Training, kind: str, found: str, do: str, key: str) -> Suspicion:
    return Suspicion(kind=kind, where=facts.label, found=found, do=do, key=f"{facts.key}.{key}")


def ended_early(run: Training) -> Suspicion | None:
    if run.stopped is None:
        return None
    found = f"ended by stop_if at step {whole(run.stopped.step)}: {run.stopped.reason}"
    return _of(run, "ended early", found, "halve the learning rate", "training.learning_rate")


# By kind of warning: what to try, and the key.
REMEDIES = {
    "collapse": ("add the chosen completions' own loss, as {sigmoid: 1.0, sft: 0.2}, or raise beta", "loss"),
    "only rejected": ("add the chosen completions' own loss, as {sigmoid: 1.0, sft: 0.2}", "loss"),
    "length": ("weigh what is longer less (0.5, say), or take a loss of probabilities per token (simpo)", "ld_alpha"),
}


def warned(run: Training) -> Suspicion | None:
    """The first of what the training said of itself and didn't take back."""
    lasting = [one for one in run.warnings if one.at_end is not None]
    if not lasting:
        return None
    first = lasting[0]
    do, key = REMEDIES.get(first.kind, ("", ""))
    more = f" (and {len(lasting) - 1} more, below)" if len(lasting) > 1 else ""
    return Suspicion(
        kind=f"warned of {first.kind}",
        where=run.label,
        found=f"{first.at_end}{more}",
        do=do,
        key=key and f"{run.key}.{key}",
    )


def loss_not_falling(run: Training) -> Suspicion | None:
    if run.loss is None or run.stopped:
        return None
    first, last = run.loss
    if first - last >= FELL * abs(first):
        return None
    rose = last - first > FELL * abs(first)
    found = f"the loss {'rose' if rose else 'did not fall'}: {decimal(first)} → {decimal(last)}"
    do = "a third of the learning rate" if rose else "three times the learning rate, or more epochs"
    return _of(run, "loss not falling", found, do, "training.learning_rate")


def chosen_falling(run: Training) -> Suspicion | None:
    """Where the training itself wasn't watched, as by TRL."""
    if run.chosen is None or run.warnings or run.chosen[0] - run.chosen[1] < CHOSEN_FELL:
        return None
    first, last = run.chosen
    found = f"chosen completions became less likely: {decimal(first)} → {decimal(last)} nats per token"
    return _of(run, "chosen falling", found, REMEDIES["collapse"][0], "loss")


def held_out_rising(run: Training) -> Suspicion | None:
    """Worse on held-out rows than before, while the loss of the training fell."""
    if run.loss is None or run.loss[1] >= run.loss[0]:
        return None
    for corpus, (before, after) in run.held_out.items():
        if after > before * (1 + FELL):
            found = (
                f"the training loss fell, but held-out loss of {corpus} rose: {decimal(before)} → {decimal(after)}; "
                "it learned what isn't in those rows, or by heart"
            )
            return _of(run, "held-out loss rising", found, "fewer epochs, or a lower learning rate", "training.epochs")
    return None


def learned_by_heart(run: Training) -> Suspicion | None:
    if run.loss is None or run.epochs is None or run.epochs <= 1 or not run.held_out or held_out_rising(run):
        return None
    corpus, (_, lowest) = min(run.held_out.items(), key=lambda entry: entry[1][1])
    if lowest <= BY_HEART * max(run.loss[1], 0.01):
        return None
    found = (
        f"held-out loss of {corpus} is {decimal(lowest)}, and that of the last steps {decimal(run.loss[1])}: after "
        f"{decimal(run.epochs)} epochs it knows its rows by heart"
    )
    return _of(run, "learned by heart", found, "fewer epochs, or more rows", "training.epochs")


def slow_machine_use(run: Training) -> Suspicion | None:
    low = LOW_MFU if run.gpu else LOW_MFU_CPU
    if run.mfu is None or run.mfu >= low:
        return None
    usual = "30 to 50%" if run.gpu else "20 to 40%"
    found = f"MFU is {percent(run.mfu)}; {usual} is usual where the model keeps the device busy"
    if run.measured:
        return _of(run, "low MFU", found, "more rows a step, of which more are computed at once", "training.batch_rows")
    return _of(run, "low MFU", found, "leave it out, so that the fastest is measured", "training.micro_batch_rows")


def waited_for_data(run: Training) -> Suspicion | None:
    if not run.waited or not run.seconds or run.waited < WAITED * run.seconds:
        return None
    found = f"waited {duration(run.waited)} for data, {percent(run.waited / run.seconds)} of its time"
    return _of(run, "waited for data", found, "true", "operation.load_in_memory")


def slower_by_choice(run: Training) -> Suspicion | None:
    if run.slower is None or run.slower < SLOWER:
        return None
    found = f"the micro-batch chosen by hand is {run.slower:.0f}% slower than the best that was measured"
    return _of(run, "slow by choice", found, "leave it out", "training.micro_batch_rows")


def lost_to_length(pack: Packed) -> Suspicion | None:
    if pack.lost is None:
        return None
    sequences, tokens, enough = pack.lost
    found = (
        f"{words(pack.split)}: {percent(sequences)} of the {pack.unit} and {percent(tokens)} of the tokens don't fit into rows "
        f"of {whole(pack.length)} tokens"
    )
    do = f"{enough} keeps 99% of the tokens"
    return Suspicion(kind="tokens lost", where=pack.name, found=found, do=do, key=pack.key and f"{pack.key}.length")


def little_supervised(pack: Packed) -> Suspicion | None:
    if not pack.tokens or pack.split != "train" or pack.supervised >= SUPERVISED * pack.tokens:
        return None
    share = percent(pack.supervised / pack.tokens, 2)
    found = f"{share} of the tokens are supervised: most of what is computed teaches nothing"
    do = "see in packing.html what is supervised; `all`, or a chat template that marks what the assistant says"
    return Suspicion(
        kind="little supervised", where=pack.name, found=found, do=do, key=pack.key and f"{pack.key}.train_on"
    )


def sums_of_pack(pack: Packed) -> Suspicion | None:
    return _gaps(pack.name, pack.gaps)


def sums_of_rows(corpus: Rows) -> Suspicion | None:
    return _gaps(corpus.name, corpus.gaps)


def _gaps(where: str, gaps: tuple[str, ...]) -> Suspicion | None:
    return (
        Suspicion(kind="sums", where=where, found=f"counts don't add up: {'; '.join(gaps)}", severity=NOTES)
        if gaps
        else None
    )


def much_quarantined(corpus: Rows) -> Suspicion | None:
    bad = sum(corpus.quarantined.values())
    if not corpus.read or bad < QUARANTINED * corpus.read:
        return None
    reasons = ", ".join(f"{whole(n)} {words(reason)}" for reason, n in list(corpus.quarantined.items())[:3])
    found = f"{whole(bad)} of {whole(corpus.read)} rows ({percent(bad / corpus.read)}) are quarantined: {reasons}"
    do = "mend the files, name their columns (fields), or repair rows; corpus.html has examples"
    return Suspicion(kind="quarantined", where=corpus.name, found=found, do=do, key=f"{corpus.key}.repair")


def repeated_prompts(asked: Asked) -> Suspicion | None:
    again = asked.prompts - asked.different
    if not asked.prompts or again < REPEATED * asked.prompts:
        return None
    found = (
        f"{whole(again)} of {whole(asked.prompts)} held-out prompts of {asked.corpus} repeat another: the intervals look "
        "narrower than they are"
    )
    return Suspicion(
        kind="repeated prompts",
        where=asked.evaluation,
        found=found,
        do="drop rows that say nearly the same",
        key=f"corpora.{asked.corpus}.near_duplicates",
    )


def cut_off(asked: Asked) -> Suspicion | None:
    if not asked.answers or asked.cut_off < CUT_OFF * asked.answers:
        return None
    found = (
        f"{percent(asked.cut_off / asked.answers)} of the answers of {asked.model} to {asked.corpus} were cut off at "
        f"{whole(asked.most_tokens)} tokens"
    )
    return Suspicion(
        kind="answers cut off",
        where=asked.evaluation,
        found=found,
        do=f"{2 * (asked.most_tokens or 0)}, if answers may be that long; else the model doesn't know where to end",
        key=f"eval.{asked.evaluation}.generation.max_new_tokens",
    )


def worse_than_before(one: Difference, verdict: Verdict) -> Suspicion | None:
    if one.outcome != WORSE:
        return None
    found = f"worse than {verdict.against}: {one.name} {one.text} ({one.interval_text})"
    do = "a lower learning rate, or fewer epochs"
    return Suspicion(
        kind=f"worse: {verdict.against}, {one.name}",
        where=verdict.model,
        found=found,
        do=do,
        key=verdict.key and f"{verdict.key}.training.learning_rate",
    )


def too_small_to_tell(one: Difference, verdict: Verdict) -> Suspicion | None:
    """A difference that is open, of so few rows that one of TELLS would be too."""
    if one.outcome != OPEN or one.measure.unit != "share" or one.interval is None:
        return None
    low, high = one.interval
    half = (high - low) / 2
    if half <= TELLS:
        return None
    # Intervals narrow with the root of the rows.
    needed = round((half / TELLS) ** 2, 1)
    found = (
        f"{one.name} can't tell {verdict.model} from {verdict.against}: of {whole(one.rows)} rows, only differences above "
        f"{100 * half:.0f} points are told from none"
    )
    return Suspicion(
        kind="too few rows",
        where=one.evaluation,
        found=found,
        do=f"about {decimal(needed)} times as many held-out rows tell {100 * TELLS:.0f} points",
        key=f"corpora.{one.measure.path.split('.')[1]}.held_out",
        severity=NOTES,
    )


def best_at_the_edge(one: Swept) -> Suspicion | None:
    if one.best not in (one.values[0], one.values[-1]):
        return None
    highest = one.best == one.values[-1]
    found = f"the best, {one.run}, has the {'highest' if highest else 'lowest'} {one.name} that was tried, {one.best:g}"
    further = one.best * 2 if highest else one.best / 2
    return Suspicion(
        kind=f"edge of {one.name}",
        where=one.key,
        found=found,
        do=f"try further {'up' if highest else 'down'}: {one.name} {further:g}",
        key=f"{one.key}.grid",
        severity=NOTES,
    )


def picked_of_many(one: Picked) -> Suspicion | None:
    if one.of < MANY:
        return None
    found = f"picked as the best of {one.of} runs by the rows that its verdict is of: some of its lead is luck"
    do = "ask the first few about rows that none was picked by"
    return Suspicion(kind="picked of many", where=one.run, found=found, do=do, key="eval", severity=NOTES)


OF_DIFFERENCES: tuple[Callable[[Difference, Verdict], Suspicion | None], ...] = (worse_than_before, too_small_to_tell)
OF_TRAININGS: tuple[Callable[[Training], Suspicion | None], ...] = (
    ended_early,
    warned,
    loss_not_falling,
    chosen_falling,
    held_out_rising,
    learned_by_heart,
    slow_machine_use,
    slower_by_choice,
    waited_for_data,
)
OF_PACKS: tuple[Callable[[Packed], Suspicion | None], ...] = (lost_to_length, little_supervised, sums_of_pack)
OF_CORPORA: tuple[Callable[[Rows], Suspicion | None], ...] = (much_quarantined, sums_of_rows)
OF_PROMPTS: tuple[Callable[[Asked], Suspicion | None], ...] = (repeated_prompts, cut_off)
OF_SWEEPS: tuple[Callable[[Swept], Suspicion | None], ...] = (best_at_the_edge,)
OF_PICKED: tuple[Callable[[Picked], Suspicion | None], ...] = (picked_of_many,)
