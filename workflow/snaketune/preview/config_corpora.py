"""The corpora of a config that a preview looks at, with what their rows will be written and packed by.

As one text, in which the rule hands them to the command. Imported while planning, so that nothing here takes its time.
"""

import json

from snaketune.config.base import Model
from snaketune.config.corpus_sources import CorpusContent
from snaketune.config.packing import TrainOn
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job


class PreviewedCorpus(Model):
    """One corpus.

    Attributes:
        train_on: where loss is taken in conversations.
        chat_template: a file; none where the tokenizer's own is used.
        tokenizer: where it is, or will be.
        adopt: what it is adopted from.
        lengths: tokens per row, of all that is packed of the corpus.
    """

    corpus: str
    content: CorpusContent
    train_on: TrainOn = "assistant"
    chat_template: str | None = None
    tokenizer: str | None = None
    adopt: str | None = None
    lengths: tuple[int, ...] = ()


def corpora_of(graph: JobGraph) -> str:
    """All corpora of a config, each once for every tokenizer that reads it."""
    tokens: dict[str, dict[str, Job]] = {}
    lengths: dict[str, set[int]] = {}
    for job in graph.stage("tokenize"):
        tokens.setdefault(job.artifacts["corpus"][0].name, {}).setdefault(job.artifacts["tokenizer"][0].name, job)
    for job in graph.stage("plan"):
        corpus = job.artifacts["tokens"][0].artifacts["corpus"][0].name
        lengths.setdefault(corpus, set()).update(job.spec.lengths)
    found = []
    for job in graph.stage("corpus"):
        entry = {"corpus": job.name, "content": job.spec.model_dump(mode="json", exclude_defaults=True)}
        read_by = tokens.get(job.name, {})
        for tokenized in read_by.values():
            (tokenizer,) = tokenized.artifacts["tokenizer"]
            found.append(
                entry
                | {
                    "corpus": job.name if len(read_by) == 1 else f"{job.name}, by tokenizer {tokenizer.name}",
                    "train_on": tokenized.spec.train_on,
                    "chat_template": next(iter(tokenizer.files["chat_template"]), None),
                    "tokenizer": tokenizer.payload,
                    "adopt": tokenizer.spec.adopt,
                    "lengths": sorted(lengths.get(job.name, ())),
                }
            )
        if not read_by:
            found.append(entry)
    return json.dumps(found, ensure_ascii=False, sort_keys=True)
