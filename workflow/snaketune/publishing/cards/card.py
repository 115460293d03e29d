"""The `card` stage: the model card (README.md for the Hub) of a trained model, from the manifests of all its inputs.

Of the payloads, only scores are read; no weights or rows. Information that manifests don't have (licences, descriptions of
corpora) is taken from the config, or omitted.
"""

from pathlib import Path

from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.published_jobs import card_jobs
from snaketune.stages.specs import CardSpec

STAGE = Stage(
    module=__name__,
    spec=CardSpec,
    payload="card",
    job_name="{model}",
    files=("manifests",),
    libraries=("huggingface_hub",),
    cost=Cost(mb=500),
    jobs=card_jobs,
)

CARD = "README.md"


def build(spec: CardSpec, work: WorkFolder, *, manifests: list[Path]) -> Outcome:
    """Fill `work.payload` with README.md.

    Args:
        manifests: Manifests of all results in the card, in the order of `spec.jobs`.
    Raises:
        SnaketuneError: If a manifest or the scores of an evaluation can't be read.
    """
    from snaketune.publishing.cards.card_text import CardResults, card_text

    results = CardResults(spec, manifests)
    (work.payload / CARD).write_text(card_text(results), encoding="utf-8", newline="\n")
    return Outcome(counts={"scores": len(results.scores)})
