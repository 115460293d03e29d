"""Measurements of held-out rows during trainings: their curves, and the answers to sample prompts."""

from typing import Any

from snaketune.publishing.results import Result, is_number
from snaketune.report.data.results import ResultSet
from snaketune.report.text import clip

# Answers of a prompt on the page; of more measurements, some in between are left out.
ANSWERS = 6


def measurements(run: Result) -> list[dict[str, Any]]:
    """The measurements of a training, in order; empty if it has none."""
    held_out = run.run.get("held_out")
    points = held_out.get("points") if isinstance(held_out, dict) else None
    return [point for point in points or () if isinstance(point, dict) and is_number(point.get("step"))]


def held_out_points(run: Result, key: str) -> list[tuple[int, float]]:
    """The step and value of each measurement of a metric."""
    return [(point["step"], point[key]) for point in measurements(run) if is_number(point.get(key))]


def answers_while_training(results: ResultSet) -> list[dict[str, Any]]:
    """The sample prompts of each training with their expected answer, and the answers by step.

    Returns: per training and prompt: `label`, `prompt`, `expected`, and `answers`, a list of (step, text).
    """
    return [
        {
            "label": run.label,
            "prompt": clip(points[0]["samples"][number]["prompt"]),
            "expected": clip(points[0]["samples"][number]["expected"]),
            "answers": [(point["step"], clip(point["samples"][number]["answer"])) for point in _some(points)],
        }
        for run in results.of("sft", "dpo")
        if (points := [point for point in measurements(run) if point.get("samples")])
        for number in range(len(points[0]["samples"]))
    ]


def _some(points: list[Any]) -> list[Any]:
    """The first and the last of them, and some between.

    >>> _some(list(range(11))), _some([0, 1])
    ([0, 2, 4, 6, 8, 10], [0, 1])
    """
    if len(points) <= ANSWERS:
        return points
    return [points[round(n * (len(points) - 1) / (ANSWERS - 1))] for n in range(ANSWERS)]
