"""The declarations of stages, their table, and the jobs that they refuse."""

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from snaketune.errors import SnaketuneError
from snaketune.stages.declaration import Cost, exactly_one
from snaketune.stages.job import Job
from snaketune.stages.specs import ConvertSpec
from snaketune.stages.table import MODULES, STAGES, table_of

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
    assert set(inspect.signature(import_module(declared.module).build).parameters) == expected
    assert set(declared.transitive) | declared.digested_by.keys() <= declared.inputs.keys()


def test_the_table_has_every_declared_stage():
    declared = (path for path in PACKAGE.rglob("*.py") if b"\nSTAGE = Stage(" in path.read_bytes())
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in declared}
    assert sorted(MODULES) == sorted(modules)
    assert [stage.module for stage in STAGES.values()] == [f"snaketune.{module}" for module in MODULES]


def test_an_input_of_a_stage_that_isnt_before_it_in_the_table_is_refused():
    toy = replace(STAGES["convert"], inputs={"model": exactly_one("sfft")})
    with pytest.raises(
        SnaketuneError, match=r"publishing\.convert: STAGE\.inputs\['model'\]: .* 'sfft' .*; did you mean 'sft'"
    ):
        table_of((replace(STAGES["sft"], inputs={}), toy))
    with pytest.raises(SnaketuneError, match="there is no stage 'dpo' before it"):
        table_of((replace(toy, inputs={"model": exactly_one("dpo")}), STAGES["dpo"]))


def job(stage: str, **artifacts: tuple[Job, ...]) -> Job:
    # The spec isn't checked here.
    return Job(stage=stage, name="mine", spec=ConvertSpec(type="f16"), artifacts=artifacts)


def test_a_job_refuses_results_of_another_stage_and_roles_that_it_has_not():
    assert job("convert", model=(job("dpo"),)).artifacts["model"][0].key == "dpo/mine"
    with pytest.raises(
        SnaketuneError,
        match=r"convert/mine: pack/mine can't be its model; .* takes results of sft or dpo or merge as model",
    ):
        job("convert", model=(job("pack"),))
    with pytest.raises(
        SnaketuneError, match=r"convert/mine: the stage convert has no input 'modl'; did you mean 'model'"
    ):
        job("convert", modl=(job("sft"),))
    with pytest.raises(SnaketuneError, match="convert/mine: the stage convert takes exactly one model, got 2"):
        job("convert", model=(job("sft"), job("dpo")))
    # One that reads manifests reads them of any stage.
    job("card", results=(job("pack"), job("sft")))


def test_a_cost_may_follow_from_the_spec():
    class Spec:
        kind, near_duplicates = "unpaired", None

    cost = STAGES["corpus"].cost
    assert cost(Spec) == Cost(mb_per_gb=5000, minutes_per_gb=30)
    Spec.kind = "conversations"
    assert cost(Spec) == Cost(mb_per_gb=1000, minutes_per_gb=30)


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
