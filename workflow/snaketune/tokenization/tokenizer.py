"""The `tokenizer` stage: train or adopt a tokenizer, check it, and write it with its template (`tokenization.vocabulary`)."""

from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TokenizerSpec

STAGE = Stage(
    module=__name__,
    spec=TokenizerSpec,
    payload="tokenizer",
    inputs={"corpora": any_number("corpus")},
    files=("chat_template", "base"),
    libraries=libraries.of_tokenizer,
    cost=Cost(mb_per_gb=6000, minutes_per_gb=60, threads=4),
    group="data",
    in_report=True,
)


def build(
    spec: TokenizerSpec, work: WorkFolder, *, corpora: list[Artifact], chat_template: list[Path], base: list[Path]
) -> Outcome:
    from snaketune.tokenization.vocabulary import make_tokenizer

    return make_tokenizer(spec, work, corpora=corpora, chat_template=chat_template, base=base)
