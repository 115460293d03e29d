"""Decisions of races: which variants of a grid are paused, and where.

A paused run is its snapshot at that rung: its spec ends there (`training.until`), so the snapshot's result is published under
the run's name. If a later race doesn't pause the run, its spec is the whole run's again, which resumes from the snapshot.
"""

from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import read_json

PAYLOAD, FILE = "decisions", "race.json"


def paused_at(manifest: Path, run: str) -> float | None:
    """The share of its steps at which a race has paused a run; None if it hasn't, or has no result yet.

    Args:
        manifest: of the race.
        run: as `stage/name`.
    """
    decisions = read_json(manifest.with_name(PAYLOAD) / FILE, {"paused": {}})
    return decisions["paused"].get(run.partition("@")[0])


def ending_at(spec: dict[str, Any], share: float | None) -> dict[str, Any]:
    """The spec, as plain JSON, of a run that ends after this share of its steps; None: at its own end."""
    return spec | {"training": spec["training"] | {"until": share}} if share else spec
