"""The `card` stage: README.md of a trained model, as the Hub reads it, from the manifests of all that it was made from.

No weights and no rows are read, and of payloads the scores alone. What a manifest doesn't know (licences, what a corpus is) is
said as the config says it, or not at all.
"""

from pathlib import Path

from snaketune.stages import libraries
from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.cards import card_jobs
from snaketune.stages.specs import CardSpec
from snaketune.stages.work import WorkFolder

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
    from snaketune.publishing import sections
    from snaketune.publishing.figures import figures
    from snaketune.publishing.loading import loading
    from snaketune.publishing.markdown import text
    from snaketune.publishing.metadata import metadata
    from snaketune.publishing.told import Told

    told = Told(spec, manifests)
    found = figures(told)
    parts = {
        "Training data": sections.data(told),
        "Training": sections.training(told),
        "Evaluation": sections.scores(found),
        "How to load it": loading(told),
        "Files": sections.files(told),
    }
    card = [f"---\n{metadata(told, found)}\n---", f"# {text(told.model.job.name)}", sections.summary(told)]
    card += [f"## {title}\n\n{part}" for title, part in parts.items()]
    (work.payload / CARD).write_text("\n\n".join(card) + "\n", encoding="utf-8", newline="\n")
    return Outcome(counts={"scores": len(found)})
