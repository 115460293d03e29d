"""The `card` stage: README.md of a trained model, as the Hub reads it, from the manifests of all that it was made from.

No weights and no rows are read, and of payloads the scores alone. What a manifest doesn't know (licences, what a corpus is) is
said as the config says it, or not at all.
"""

from pathlib import Path

from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.card_jobs import card_jobs
from snaketune.stages.specs import CardSpec

STAGE = Stage(
    module=__name__,
    spec=CardSpec,
    payload="card",
    job_name="{model}",
    files=("manifests",),
    libraries=libraries.always("huggingface_hub"),
    cost=Cost(mb=500),
    jobs=card_jobs,
)

CARD = "README.md"


def build(spec: CardSpec, work: WorkFolder, *, manifests: list[Path]) -> Outcome:
    """Fill `work.payload` with README.md.

    Args:
        manifests: of all results to tell of, in the order of `spec.jobs`.
    Raises:
        SnaketuneError: a manifest or the scores of an evaluation can't be read.
    """
    from snaketune.publishing import card_sections
    from snaketune.publishing.card_metadata import metadata
    from snaketune.publishing.card_results import Told
    from snaketune.publishing.card_scores import figures
    from snaketune.publishing.markdown import text
    from snaketune.publishing.usage_snippet import loading

    told = Told(spec, manifests)
    found = figures(told)
    parts = {
        "Training data": card_sections.data(told),
        "Training": card_sections.training(told),
        "Evaluation": card_sections.scores(found),
        "How to load it": loading(told),
        "Files": card_sections.files(told),
    }
    card = [f"---\n{metadata(told, found)}\n---", f"# {text(told.model.job.name)}", card_sections.summary(told)]
    card += [f"## {title}\n\n{part}" for title, part in parts.items()]
    (work.payload / CARD).write_text("\n\n".join(card) + "\n", encoding="utf-8", newline="\n")
    return Outcome(counts={"scores": len(found)})
