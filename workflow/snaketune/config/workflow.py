"""Model of the whole config file."""

from typing import Annotated, Literal

from pydantic import Field

from snaketune.config.base import Model, Name
from snaketune.config.corpus_sources import Corpus
from snaketune.config.doctor import Doctor
from snaketune.config.evaluations import Evaluation, Report
from snaketune.config.merging import Merge
from snaketune.config.publishing import Gguf, Push
from snaketune.config.tokenizers import Tokenizer
from snaketune.config.tracking import Tracking
from snaketune.config.training_runs import Dpo, Sft

# By section and name, the names of the runs that a name in the config refers to: those of a grid, or itself.
Variants = dict[str, dict[str, tuple[str, ...]]]


class Workflow(Model):
    """A snaketune config: named corpora, tokenizers, trainings and evaluations."""

    corpora: Annotated[dict[Name, Corpus], Field(min_length=1)]
    tokenizers: dict[Name, Tokenizer] = {}
    sft: dict[Name, Sft] = {}
    dpo: dict[Name, Dpo] = {}
    merge: dict[Name, Merge] = {}
    eval: dict[Name, Evaluation] = {}
    doctor: Doctor = Doctor()
    tracking: Tracking = Tracking()
    report: Report = Report()
    push: dict[Name, Push] = {}
    gguf: dict[Name, Gguf] = {}
    reruns_on: dict[str, Literal["code", "versions"]] = {}
    """Additional reasons to rerun a stage, by the name of its rule: `code` reruns it when its code changes; `versions` also
    when versions of its libraries change."""

    def tokenizer_of(self, run: Sft | Dpo) -> str:
        """Return the name of a run's tokenizer."""
        return (run if isinstance(run, Sft) else self.sft[run.from_]).tokenizer
