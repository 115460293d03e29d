"""What a run ends with: the manifest of the `report` stage has it, and `snakemake_adapter.terminal` prints it."""

from typing import Any

from snaketune.report.data.results import ResultSet
from snaketune.report.judge.headline import Headline
from snaketune.stages.table import STAGES


def ending(results: ResultSet, top: Headline) -> dict[str, Any]:
    """The entry `ending` of the manifest. `model` is the folder of the judged model, or else of the last one that was trained,
    below the folder of all results; None if there is none."""
    trained = results.of("sft", "dpo", "merge")
    judged = [result for result in trained if top.models and result.label == top.models[-1]]
    model = next(reversed(judged or trained), None)
    return {
        "verdict": [top.sentence, *top.more],
        "scores": [["", *top.models], *([f"{row.name} of {row.on}", *row.values] for row in top.table)],
        "model": model and f"{model.stage}/{model.name}/{STAGES[model.stage].payload}",
    }
