"""The inputs of stages: what a stage can read of a manifest is exactly what its fingerprint counts."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snaketune.artifacts.manifest import FORMAT_KEYS, Artifact
from snaketune.stages.cache import code_digest
from snaketune.stages.cache.fingerprint import read_artifacts
from snaketune.stages.cache.status import Results, Status
from snaketune.stages.job import Job
from snaketune.stages.specs import Model
from snaketune.stages.table import STAGES

# A manifest with the entries of all stages.
MANIFEST: dict[str, Any] = {
    **dict.fromkeys(("kind", "format_version", "order", "base_dtype", "saved_dtype", "dtype", "kernel", "code"), "a"),
    **dict.fromkeys(("row_length", "pad_id", "padding_id"), 1),
    "stage": "pack",
    "pairs": "a",
    "stopped": {"step": 1, "reason": "a"},
    "adopted": {"own_pad_token": "a"},
    "packing_metadata": {"rows": 1, "lost_to_length": {"tokens": 1}},
    "counts": {"train": {"kept": 1, "tokens": 1, "dropped": {}}, "held_out": {"kept": 1}},
    "spec": {
        **dict.fromkeys(("kind", "near_duplicates", "decontamination", "quantization", "precision"), "a"),
        **dict.fromkeys(("split_seed", "held_out", "frozen_weights", "trust_remote_code"), 1),
    },
    "inputs": {"model": ["a"]},
    "versions": {"torch": "a"},
    "payload": {"rows.arrow": {"digest": "a", "bytes": 1}},
    "records": {"quarantine.jsonl": {"digest": "a", "bytes": 1}},
}
ROLES = [(stage, role) for stage, declared in STAGES.items() for role in declared.inputs]
PACKED = [(stage, role) for stage, role in ROLES if role in ("pack", "packs") and stage != "ref_logps"]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        yield path
    else:
        for key, below in value.items():
            yield from leaves(below, (*path, key))


def changed(path: tuple[str, ...]) -> dict[str, Any]:
    manifest = copy.deepcopy(MANIFEST)
    above = manifest
    for key in path[:-1]:
        above = above[key]
    above[path[-1]] = "changed"
    return manifest


def read(stage: str, role: str, manifest: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return what a stage can read of the manifest of an input, and what its fingerprint counts of it."""
    declared = STAGES[stage]
    artifact = Artifact(Path("manifest.json"), manifest, Path()).as_input(declared.inputs[role].entries)
    return artifact.manifest, read_artifacts({role: [artifact]}, declared.digested_by)[role][0]


@pytest.mark.parametrize(("stage", "role"), ROLES)
def test_a_stage_can_read_nothing_that_its_fingerprint_does_not_count(stage, role):
    readable, counted = read(stage, role, MANIFEST)
    # `pairs` counts instead of the rows that hold them: their format shapes no log-probability.
    by = STAGES[stage].digested_by.get(role)
    for path in leaves(MANIFEST):
        then, digest = read(stage, role, changed(path))
        if path[0] == "payload":
            assert (digest != counted) == (path[-1] == "digest" and not by), path
        elif by:
            assert (digest != counted) == (path == (by,)), path
        else:
            assert (digest != counted) == (then != readable), path


@pytest.mark.parametrize(
    ("stage", "role", "entry"),
    [
        # Two packs may differ in the order of their training alone.
        *((stage, role, "order") for stage, role in PACKED),
        ("race", "snapshots", "stopped.step"),
        ("eval", "ref_logps", "dtype"),
        ("eval", "ref_logps", "kernel"),
        ("eval", "ref_logps", "spec.quantization"),
        ("eval", "ref_logps", "spec.frozen_weights"),
        ("merge", "models", "saved_dtype"),
        ("convert", "model", "spec.trust_remote_code"),
        ("preflight", "tokenizer", "adopted.own_pad_token"),
        ("preflight", "packs", "packing_metadata.lost_to_length.tokens"),
        ("preflight", "packs", "counts.held_out.kept"),
        ("preflight", "evaluated", "spec.split_seed"),
        ("calibrate", "pack", "counts.train.tokens"),
        ("bottleneck", "pack", "packing_metadata.rows"),
    ],
)
def test_what_a_stage_reads_counts(stage, role, entry):
    assert read(stage, role, MANIFEST)[1] != read(stage, role, changed(tuple(entry.split("."))))[1]


@pytest.mark.parametrize("entry", ["counts.train.kept", "code", "inputs.model", "versions.torch", "spec.precision"])
@pytest.mark.parametrize(("stage", "role"), [("sft", "pack"), ("dpo", "model"), ("plan", "tokens"), ("pack", "plan")])
def test_the_same_rows_made_in_another_way_count_as_the_same(stage, role, entry):
    assert read(stage, role, MANIFEST) == read(stage, role, changed(tuple(entry.split("."))))


@pytest.mark.parametrize(("stage", "role"), ROLES)
def test_the_planner_counts_what_the_fingerprint_does(stage, role):
    made = Job(stage=STAGES[stage].inputs[role].stages[0], name="made", spec=Model())
    results = Results(code_of=str)
    results._known[made.manifest] = Status(manifest=MANIFEST)
    assert results._counted(STAGES[stage], role, made) == read(stage, role, MANIFEST)[1]


# Modules that read the manifest as it is: to refuse an input, or to describe it.
PROVENANCE = {
    "models.adapter_stack",
    "training.prepared_dpo",
    "training.reference.logps_table",
    "training.reference.teacher_file",
}


def test_no_stage_reads_entries_that_no_stage_counts():
    """They would be absent from its inputs."""
    declared = {
        name.split(".")[0] for one in STAGES.values() for taken in one.inputs.values() for name in taken.entries
    }
    files, uncounted, provenance = code_digest.Modules().files, set(), set()
    for stage in (one for one in STAGES.values() if not one.reads_manifests):
        for module in code_digest.Modules().shaping(stage.module):
            text = files[module].read_text(encoding="utf-8")
            entries = re.findall(r"\.manifest(?:\.get\(|\[)\"(\w+)\"", text)
            uncounted |= {(module, one) for one in entries if one not in {*FORMAT_KEYS, *declared, "payload"}}
            provenance |= {module.removeprefix("snaketune.")} if ".provenance" in text else set()
    # Parts are no inputs: they are read when the key is computed already, and those of another computation are refused.
    assert uncounted == {
        ("snaketune.training.reference.gather", "rows"),
        *(("snaketune.training.reference.teacher_rows", one) for one in ("losses", "rows")),
        *(("snaketune.sampling.response_table", one) for one in ("rows", "engine")),
    }
    assert provenance == PROVENANCE
