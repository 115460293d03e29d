"""The chain under test: every stage once, on a few dozen rows, in a folder with its own copy of the workflow.

A copy of a finished chain becomes what there was at an earlier moment: `keep_only` takes the results of later stages away,
published and cached ones, so that a fault of one stage doesn't compute again what comes before it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from benchmarks.results import ROOT
from benchmarks.torture.processes import everything_in, kill, kill_chain
from tests.workflow.conftest import MICRO, Project

CODE = ("Snakefile", "workflow", "profiles", "envs")
# Python runs the first one in every process whose path begins with the package's folder.
INJECTED = {"meddling.py": "sitecustomize.py", "processes.py": "torture_processes.py"}
CORES = 2
# A stage, and where its results lie; in the order in which they are made.
STAGES = (
    "corpus", "tokenizer", "tokenize", "plan", "write", "pack", "sft", "ref_pass", "ref_logps", "dpo", "eval", "card",
    "report",
)  # fmt: skip
# Trainings on the CPU, also where a cluster's job sees GPUs: a result is of one kind of device.
OPERATION = {"checkpoint_steps": 2, "log_steps": 1, "gpus": 0}
EVALUATION = MICRO["eval"]["both"] | {"models": ["dpo:run"], "generation": {"max_new_tokens": 4}}
# That of the tests, with more checkpoints, a reference pass in parts, and one evaluation.
CONFIG = MICRO | {
    "sft": {"run": MICRO["sft"]["run"] | {"operation": OPERATION}},
    "dpo": {"run": MICRO["dpo"]["run"] | {"operation": OPERATION, "reference_pass": {"parts": 2}}},
    "eval": {"last": {key: value for key, value in EVALUATION.items() if key != "exact_match"}},
}


@dataclass(frozen=True, kw_only=True)
class Said:
    """The result of a command: exit status (None after a timeout) and output."""

    status: int | None
    text: str

    @property
    def last_words(self) -> str:
        return " / ".join([line for line in self.text.splitlines() if line.strip()][-4:])[-600:]


@dataclass(frozen=True)
class Chain:
    """A folder in which the workflow runs.

    Attributes:
        extra: environment variables of all that is started.
        events, orders: what its processes log, and the faults that they inject; see meddling.py.
    """

    folder: Path
    extra: dict[str, str] = field(default_factory=dict)
    results = property(lambda self: self.folder / "results")
    events = property(lambda self: self.folder / "events.jsonl")
    orders = property(lambda self: self.folder / "orders.json")

    def write(self) -> "Chain":
        """Write code, data and config, without results."""
        Project(self.folder).write_data()
        for name in CODE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self.folder)
        for name, copied in INJECTED.items():
            shutil.copy(Path(__file__).with_name(name), self.folder / "workflow" / copied)
        config = self.folder / "config/config.yaml"
        config.parent.mkdir()
        config.write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
        return self

    def copy_to(self, folder: Path) -> "Chain":
        """Copy the folder, including hard links between published and cached results."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(self.folder), str(folder)], check=True)
        copied = Chain(folder)
        for left in (copied.events, copied.orders):
            left.unlink(missing_ok=True)
        shutil.rmtree(folder / ".snakemake", ignore_errors=True)
        return copied

    def keep_only(self, stages: Iterable[str]) -> None:
        for stage in set(STAGES) - set(stages):
            for made in (stage, f".work/{stage}", f"logs/{stage}"):
                shutil.rmtree(self.results / made, ignore_errors=True)

    def order(self, **orders: Any) -> None:
        """Inject these faults into processes that start from now on; none without arguments."""
        self.orders.write_text(json.dumps(orders), encoding="utf-8")

    def start(self, *arguments: str, log: str = "first.log", before: str = "") -> subprocess.Popen:
        """Start `snakemake`, the leader of a process group of its own.

        Args:
            log: file for what it prints.
            before: shell command for the process that becomes it.
        """
        command = [sys.executable, "-m", "snakemake", "--cores", str(CORES), *arguments]
        if before:
            command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "workflow"),
            "TORTURE_CHAIN": str(self.folder),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        with (self.folder / log).open("ab") as said:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=said, stderr=said, env=variables | self.extra, start_new_session=True
            )

    def wait(self, running: subprocess.Popen, seconds: float, log: str = "first.log") -> Said:
        """Wait until it has ended; after the time limit, kill it and all processes that it started."""
        try:
            status = running.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            kill(everything_in(self.folder))
            running.wait()
        return Said(status=status, text=self.read(log))

    def kill(self, running: subprocess.Popen) -> None:
        kill_chain(self.folder)
        running.wait()

    def snakemake(self, *arguments: str, seconds: float, log: str = "again.log") -> Said:
        (self.folder / log).unlink(missing_ok=True)
        return self.wait(self.start(*arguments, log=log), seconds, log)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def manifests(self) -> dict[str, dict[str, Any]]:
        paths = {str(path.relative_to(self.results)): path for path in sorted(self.results.glob("*/**/manifest.json"))}
        return {
            name: json.loads(path.read_text(encoding="utf-8"))
            for name, path in paths.items()
            if name.split("/")[0] in STAGES
        }

    def remove(self) -> None:
        kill(everything_in(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
