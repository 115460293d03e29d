"""Checks of what samples, scores and corpora of scored responses name."""

from snaketune.config.lineage import cycle_of
from snaketune.config.named_entries import check_corpus, check_held_out_corpus, check_known, check_known_model
from snaketune.config.sampling import Sample
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError


def check_sampled(name: str, config: Workflow) -> None:
    """Raise SnaketuneError if a corpus of scored responses names unknown scores, or is made from itself."""
    for number, source in enumerate(config.corpora[name].sources):
        if source.scores:
            check_known(f"corpora.{name}.sources.{number}.scores", source.scores, config.score, "score")
    if config.corpora[name].sampled and (circle := cycle_of(config, f"corpora.{name}")):
        raise SnaketuneError(
            f"corpora.{name}: its responses are of a model that is trained on it: {' → '.join(circle)}; train on another corpus"
        )


def check_sample(key: str, sample: Sample, config: Workflow, variants: Variants) -> None:
    check_known_model(f"{key}.model", sample.model, config, variants)
    for score in sample.prompts.scored:
        check_known(f"{key}.prompts.scored", score, config.score, "score")
    if circle := cycle_of(config, key):
        raise SnaketuneError(f"{key}: is made from itself: {' → '.join(circle)}; name scores of earlier samples")
    for corpus in sample.prompts.corpora:
        check_corpus(f"{key}.prompts.corpora", corpus, config, "conversations", "preferences", "unpaired")
        if sample.prompts.split == "held_out":
            check_held_out_corpus(f"{key}.prompts.corpora", corpus, config, config.corpora[corpus].kind)


def check_score(name: str, config: Workflow, variants: Variants, above: tuple[str, ...] = ()) -> None:
    key, score = f"score.{name}", config.score[name]
    check_known(f"{key}.samples", score.samples, config.sample, "sample")
    if score.by.reward and score.by.reward.model:
        check_known_model(f"{key}.by.reward.model", score.by.reward.model, config, variants)
    if score.by.judge and score.by.judge.model:
        check_known_model(f"{key}.by.judge.model", score.by.judge.model, config, variants)
    for summand in score.by.sum or ():
        check_known(f"{key}.by.sum", summand, config.score, "score")
        if summand in (*above, name):
            raise SnaketuneError(f"{key}.by.sum: {' → '.join((*above, name, summand))} is circular")
        if (other := config.score[summand].samples) != score.samples:
            raise SnaketuneError(
                f"{key}.by.sum: {summand!r} scores the sample {other!r}, and {name!r} scores {score.samples!r}; sum scores of "
                "one sample"
            )
        check_score(summand, config, variants, (*above, name))
    prompts = config.sample[score.samples].prompts
    if score.by.answer and not any(config.corpora[corpus].may_have_answers for corpus in prompts.corpora):
        raise SnaketuneError(f"{key}.by.answer: {missing_answers_hint(prompts.corpora, config)}")


def missing_answers_hint(corpora: tuple[str, ...], config: Workflow) -> str:
    """An error message for corpora without checkable answers for exact match, with what to configure."""
    chats = [corpus for corpus in corpora if config.corpora[corpus].kind != "text"]
    if not chats:
        return f"no row of {' and '.join(corpora)} can have a checkable answer, as documents have no questions: name others"
    return (
        f"no row of {' and '.join(chats)} can have a checkable answer: set fields.answer of corpora.{chats[0]}.sources to the "
        f"column that holds it, or corpora.{chats[0]}.answer_pattern to a pattern that finds it in the last assistant turn"
    )
