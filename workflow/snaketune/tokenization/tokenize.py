"""The `tokenize` stage: encode one part of a corpus to token ids and loss masks (`tokenization.corpus_part`)."""

from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.specs import TokenizeSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.tokenization.corpus_part",
    spec=TokenizeSpec,
    payload="tokens",
    job_name="{name}/{part}",
    inputs={"corpus": exactly_one("corpus"), "tokenizer": exactly_one("tokenizer")},
    libraries=("tokenizers", "transformers", "jinja2", "pyarrow"),
    cost=Cost(mb_per_gb=300, minutes_per_gb=30, disk_per_text=1.2),
    group="data",
    array=True,
    in_report=True,
)
