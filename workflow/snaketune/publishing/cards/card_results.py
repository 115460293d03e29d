"""The results of a model card: the training, those that it builds on, their data, and the scores of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.config.load import HUB_ID
from snaketune.publishing.results import Result, Results, at_path, is_number, read_json
from snaketune.stages.specs import CardSpec

# By section of scores.json: path of a score → its name, and the path of its size (tokens, prompts or pairs).
SCORES = {
    "conversations": {
        "held_out_loss": ("held-out loss, nats per token", "supervised_tokens"),
        "perplexity": ("perplexity", "supervised_tokens"),
        "exact_match.share": ("exact match, share", "exact_match.prompts"),
    },
    "preferences": {
        "logp_accuracy": ("log-prob accuracy, share", "pairs"),
        "logp_accuracy_per_token": ("log-prob accuracy per token, share", "pairs"),
        "reward_accuracy": ("reward accuracy, share", "pairs_with_reference"),
        "reward_margin_nats": ("reward margin without beta, nats", "pairs_with_reference"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score, on a corpus or a task.

    Attributes:
        path: Its path in its section of scores.json, which is the metric type on the Hub.
        interval: Lower and upper bound, if known.
        size: Number of prompts, pairs or tokens, if known.
    """

    evaluation: str
    section: str
    on: str
    path: str
    name: str
    value: float
    interval: tuple[float, float] | None
    size: int | None = None


class CardResults(Results):
    """All results of a card; a SnaketuneError is raised if one can't be read or isn't that of its job."""

    def __init__(self, spec: CardSpec, manifests: list[Path]):
        super().__init__(spec.jobs, manifests)
        self.spec = spec
        # The training of the model first, then those that it builds on.
        self.trainings = self.of("sft", "dpo")
        self.model = self.trainings[0]
        # The base model in the spec of the first training: a model with a `path`, or the architecture of a new one.
        self.base: dict[str, Any] = self.trainings[-1].spec["base"]
        self.is_adapter = "base_dtype" in self.model.manifest
        self.trusts_remote_code = bool(self.model.spec.get("trust_remote_code"))

    @cached_property
    def corpora(self) -> list[Result]:
        """The corpora that were trained on, in the order of the trainings."""
        corpora = [self.corpus_of(run) for run in reversed(self.trainings)]
        return list({corpus.name: corpus for corpus in corpora if corpus}.values())

    def corpus_of(self, run: Result) -> Result | None:
        return self.first(self.first(run, "pack"), "corpus")

    @property
    def base_on_hub(self) -> dict[str, Any] | None:
        """The base model if it is on the Hub; None for a local folder, whose files are in the manifest, and for a new model."""
        local = self.trainings[-1].manifest["inputs"].get("base")
        return self.base if not local and HUB_ID.fullmatch(self.base.get("path", "")) else None

    def hub_datasets(self, corpus: Result) -> list[str]:
        """The Hub datasets that a corpus is made of."""
        paths = (source["hub"]["path"] for source in corpus.spec["sources"] if source["hub"])
        # These become URLs, and manifests of other origin are untrusted.
        return [path for path in paths if HUB_ID.fullmatch(path)]

    @cached_property
    def scores(self) -> list[Score]:
        """The scores of all evaluations of the model, with intervals where known."""
        return [score for evaluation in self.of("eval") for score in _scores_of(evaluation)]


def _scores_of(result: Result) -> Iterator[Score]:
    scores, evaluation = read_json(result.artifact.file("scores.json")), result.name.partition("/")[0]
    for section, known in SCORES.items():
        for on, measured in scores.get(section, {}).items():
            for path, (name, size) in known.items():
                if is_number(value := at_path(measured, path)):
                    interval, size = _bounds(at_path(measured, f"{path}_interval")), at_path(measured, size)
                    about = {"evaluation": evaluation, "section": section, "on": on, "path": path, "name": name}
                    yield Score(**about, value=value, interval=interval, size=size)
    # Metric names of tasks are those of lm-evaluation-harness, and may contain dots.
    for task, measured in scores.get("tasks", {}).items():
        intervals = scores.get("task_intervals", {}).get(task, {})
        for metric, value in measured.items():
            if is_number(value):
                about = {"evaluation": evaluation, "section": "tasks", "on": task, "path": metric, "name": metric}
                yield Score(**about, value=value, interval=_bounds(intervals.get(metric)))


def _bounds(interval: Any) -> tuple[float, float] | None:
    known = isinstance(interval, list) and len(interval) == 2 and all(map(is_number, interval))
    return (interval[0], interval[1]) if known else None
