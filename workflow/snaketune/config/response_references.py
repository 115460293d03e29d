"""Checks of what samples and scores name."""

from snaketune.config.named_entries import check_corpus, check_held_out_corpus
from snaketune.config.sampling import Prompts
from snaketune.config.scoring import Score
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError


def check_sample(key: str, prompts: Prompts, config: Workflow) -> None:
    for corpus in prompts.corpora:
        check_corpus(key, corpus, config, "conversations", "preferences", "unpaired")
        if prompts.split == "held_out":
            check_held_out_corpus(key, corpus, config, config.corpora[corpus].kind)


def check_score(key: str, score: Score, config: Workflow) -> None:
    for summand in score.by.sum or ():
        if (other := config.score[summand].samples) != score.samples:
            raise SnaketuneError(
                f"{key}.by.sum: {summand!r} scores the sample {other!r}, and this scores {score.samples!r}; sum scores of one "
                "sample"
            )
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
