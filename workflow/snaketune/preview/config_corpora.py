"""The corpora of a config for the preview, with the tokenizers and row lengths that they are used with.

Passed from the rule to the command as one text. Imported by planning, so it imports nothing slow.
"""

import json

from snaketune.config.base import Model
from snaketune.config.corpora import CorpusContent
from snaketune.config.corpus_sources import EmptyReasoning, Reasoning
from snaketune.config.packing import TrainOn
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job


class PreviewedCorpus(Model):
    """One corpus.

    Attributes:
        train_on, reasoning, empty_reasoning: where loss is taken in conversations.
        chat_template: path of a file; None if the tokenizer's own is used.
        tokenizer: path where it is, or will be.
        adopt: the model or folder that it is adopted from.
        lengths: tokens per row of all packings of the corpus.
    """

    corpus: str
    content: CorpusContent
    train_on: TrainOn = "assistant"
    reasoning: Reasoning | None = "exact"
    empty_reasoning: EmptyReasoning = "mask"
    chat_template: str | None = None
    tokenizer: str | None = None
    adopt: str | None = None
    lengths: tuple[int, ...] = ()


def corpora_of(graph: JobGraph) -> str:
    """All corpora of a config as JSON, each once per tokenizer that reads it."""
    tokens: dict[str, dict[str, Job]] = {}
    lengths: dict[str, set[int]] = {}
    for job in graph.stage("tokenize"):
        tokens.setdefault(job.artifacts["corpus"][0].name, {}).setdefault(job.artifacts["tokenizer"][0].name, job)
    for job in graph.stage("plan"):
        corpus = job.artifacts["tokens"][0].artifacts["corpus"][0].name
        lengths.setdefault(corpus, set()).update(job.spec.lengths)
    entries = []
    for job in graph.stage("corpus"):
        # Responses of models aren't there yet.
        if job.artifacts["selected"]:
            continue
        entry = {"corpus": job.name, "content": job.spec.model_dump(mode="json", exclude_defaults=True)}
        read_by = tokens.get(job.name, {})
        for tokenized in read_by.values():
            (tokenizer,) = tokenized.artifacts["tokenizer"]
            entries.append(
                entry
                | {
                    "corpus": job.name if len(read_by) == 1 else f"{job.name}, by tokenizer {tokenizer.name}",
                    "train_on": tokenized.spec.train_on,
                    "reasoning": tokenized.spec.reasoning,
                    "empty_reasoning": tokenized.spec.empty_reasoning,
                    "chat_template": next(iter(tokenizer.files["chat_template"]), None),
                    "tokenizer": tokenizer.payload,
                    "adopt": tokenizer.spec.adopt,
                    "lengths": sorted(lengths.get(job.name, ())),
                }
            )
        if not read_by:
            entries.append(entry)
    return json.dumps(entries, ensure_ascii=False, sort_keys=True)
