"""The declarations of stages, and their table."""

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from snaketune.stages.declaration import Cost
from snaketune.stages.table import MODULES, STAGES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow/snaketune"
HEAVY = (
    *("numpy", "pyarrow", "torch", "transformers", "tokenizers", "accelerate", "matplotlib", "huggingface_hub"),
    *("jinja2", "datasets", "peft", "trl"),
)


def test_importing_the_table_imports_nothing_heavy():
    code = f"import sys; import snaketune.stages.table; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_stages_module_can_be_imported_before_the_table():
    """Neither waits for the other."""
    code = """
        import sys
        from importlib import import_module
        for module in sys.argv[1:]:
            for name in [name for name in sys.modules if name.startswith("snaketune")]:
                del sys.modules[name]
            declared = import_module(module).STAGE
            assert import_module("snaketune.stages.table").STAGES[declared.name] is declared, module
        """
    modules = [stage.module for stage in STAGES.values()]
    done = subprocess.run([sys.executable, "-c", dedent(code), *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_build_takes_what_is_declared(stage):
    declared = STAGES[stage]
    expected = {"spec", "work", *declared.inputs, *declared.files}
    if declared.launcher:
        expected |= {"operation", "tracked"}
    if declared.takes_operation:
        expected.add("operation")
    assert set(inspect.signature(import_module(declared.code).build).parameters) == expected
    # So that it counts in the code digest, as the package of the declaration does.
    assert declared.code.split(".")[:2] == declared.module.split(".")[:2]
    assert set(declared.transitive) | declared.digested_by.keys() <= declared.inputs.keys()


def test_the_table_has_every_declared_stage():
    declared = (path for path in PACKAGE.rglob("*.py") if b"\nSTAGE = Stage(" in path.read_bytes())
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in declared}
    assert sorted(MODULES) == sorted(modules)
    assert [stage.module for stage in STAGES.values()] == [f"snaketune.{module}" for module in MODULES]


# Rows of a corpus may be responses of a model, which is trained on another corpus; a reference may be a DPO run's model.
# A teacher is a trained model.
READ_BEFORE = {
    "read": {"corpus", "select"},
    "corpus": {"select"},
    "prompts": {"score", "judge", "rate"},
    "ref_logps": {"dpo"},
    "teacher": {"sft", "dpo"},
}


def test_a_stage_reads_results_of_stages_before_it_or_its_own():
    before: set[str] = set()
    for name, stage in STAGES.items():
        before.add(name)
        read = {made for source in stage.inputs.values() for made in source.stages}
        assert read - before == READ_BEFORE.get(name, set()), name


def test_a_cost_may_follow_from_the_spec():
    class Spec:
        kind, near_duplicates = "unpaired", None

    cost = STAGES["corpus"].cost
    assert cost(Spec) == Cost(mb_per_gb=5000, minutes_per_gb=30, disk_per_text=1)
    Spec.kind = "conversations"
    assert cost(Spec) == Cost(mb_per_gb=1000, minutes_per_gb=30, disk_per_text=1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rule_names_what_is_declared(stage):
    """Rules say their outputs and threads literally, and planning goes by the declaration."""
    rule = (ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8")
    declared = STAGES[stage]
    folder = f"results/{stage}/{declared.job_name}".rstrip("/")
    assert f'manifest="{folder}/manifest.json"' in rule
    assert f'run="{folder}/run.json"' in rule
    assert f'directory("{folder}/{declared.payload}")' in rule or stage == "report"
    assert f"python -m snaketune {stage} {{input.job:q}}" in rule
    assert f'    params:\n        spec=spec_of("{stage}"),\n' in rule
    # A training that is sent a signal leaves a checkpoint, and its shell waits for that.
    assert ("trap '' TERM; " in rule) == bool(declared.launcher)
    (threads,) = re.findall(r"^    threads: (.*)$", rule, re.MULTILINE)
    if threads != f'threads_of("{stage}")':
        assert int(threads) == getattr(declared.cost, "threads", 1)


def test_the_slurm_profiles_arrays_are_the_declared_ones():
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text(encoding="utf-8"))
    assert profile["slurm-array-jobs"].split(", ") == [name for name, stage in STAGES.items() if stage.array]
