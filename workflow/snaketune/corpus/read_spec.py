"""What of a corpus its rows are read by: an edit of the rest, such as caps and weights, reads nothing again."""

from snaketune.config.corpus_sources import CorpusContent, Source
from snaketune.stages.specs import ReadSpec


def read_spec(
    corpus: CorpusContent, sources: tuple[Source, ...] = (), ranges: tuple[tuple[int, int, int], ...] = ()
) -> ReadSpec:
    """The spec for sources of a corpus, for all of them by default. Args: ranges: as in the spec."""
    near, against = corpus.near_duplicates, corpus.decontamination
    of_selection = {"weight": 1.0, "max_rows": None}
    of_corpus = {name: getattr(corpus, name) for name in ReadSpec.model_fields if hasattr(corpus, name)}
    return ReadSpec.model_construct(
        **of_corpus
        | {
            "sources": tuple(source.model_copy(update=of_selection) for source in sources or corpus.sources),
            "ranges": ranges,
            "near_duplicates": near and near.model_copy(update={"drop": True}),
            "ngram": against and against.ngram,
            "own_held_out": bool(against) and 0 < corpus.held_out < 1,
        }
    )
