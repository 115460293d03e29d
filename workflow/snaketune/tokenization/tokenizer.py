"""The `tokenizer` stage: train or adopt a tokenizer, check it, and write it with its template (`tokenization.vocabulary`)."""

from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.specs import TokenizerSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.tokenization.vocabulary",
    spec=TokenizerSpec,
    payload="tokenizer",
    inputs={"corpora": any_number("corpus")},
    files=("chat_template", "base"),
    # An adopted template may have a training template in TRL.
    libraries=("tokenizers", "transformers", "sentencepiece", "trl"),
    cost=Cost(mb_per_gb=6000, minutes_per_gb=60, threads=4),
    group="data",
    in_report=True,
)
