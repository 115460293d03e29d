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
from benchmarks.torture.processes import end_of, everything_in, kill

ROOT = Path(__file__).parents[2]
CODE = ("Snakefile", "workflow", "profiles", "envs")
ROWS = {"chat": 120, "preferences": 60}
CORES = 2
# A stage, and where its results lie; in the order in which they are made.
STAGES = (
    "corpus", "tokenizer", "tokenize", "plan", "write", "pack", "sft", "ref_pass", "ref_logps", "dpo", "eval", "card",
    "report",
)  # fmt: skip
PACKING = {"length": 256}
TRAINING = {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2}
# On the CPU, also where a cluster's job sees GPUs: a result is of one kind of device.
OPERATION = {"checkpoint_steps": 2, "log_steps": 1, "gpus": 0}
CONFIG: dict[str, Any] = {
    "corpora": {
        "chat": {"kind": "conversations", "sources": [{"files": ["data/chat.jsonl"]}], "held_out": 0.2},
        "pairs": {"kind": "preferences", "sources": [{"files": ["data/preferences.jsonl"]}], "held_out": 0.2},
    },
    "tokenizers": {
        "small": {"train": {"corpora": ["chat", "pairs"], "vocab_size": 400}, "chat_template": "data/chatml.jinja"}
    },
    "sft": {
        "run": {
            "base": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2},
            "corpus": "chat",
            "tokenizer": "small",
            "packing": PACKING,
            "training": TRAINING | {"learning_rate": 0.002},
            "operation": OPERATION,
        }
    },
    "dpo": {
        "run": {
            "from": "run",
            "corpus": "pairs",
            "packing": PACKING,
            "training": TRAINING | {"learning_rate": 0.001},
            "operation": OPERATION,
            "reference_pass": {"parts": 2},
        }
    },
    "eval": {
        "last": {
            "models": ["dpo:run"],
            "conversations": ["chat"],
            "preferences": ["pairs"],
            "packing": PACKING,
            "generation": {"max_new_tokens": 4},
            "samples": 2,
        }
    },
}


@dataclass(frozen=True, kw_only=True)
class Said:
    """The result of a command: exit status (None after a timeout) and output."""

    status: int | None
    text: str


@dataclass(frozen=True)
class Chain:
    """A folder in which the workflow runs.

    Attributes:
        extra: environment variables of all that is started.
    """

    folder: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def events(self) -> Path:
        """Return the path of the event log that its processes write; see meddling.py."""
        return self.folder / "events.jsonl"

    @property
    def orders(self) -> Path:
        """Return the path of the faults to inject into its processes; see meddling.py."""
        return self.folder / "orders.json"

    def write(self) -> "Chain":
        """Write code, data and config, without results."""
        self.folder.mkdir(parents=True)
        for name in CODE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.folder)
        # Python runs it first in every process whose path begins with the package's folder.
        shutil.copy(Path(__file__).with_name("meddling.py"), self.folder / "workflow/sitecustomize.py")
        shutil.copy(Path(__file__).with_name("processes.py"), self.folder / "workflow/torture_processes.py")
        (self.folder / "data").mkdir()
        for name, rows in ROWS.items():
            with (ROOT / f"resources/demo/{name}.jsonl").open(encoding="utf-8") as file:
                lines = [next(file) for _ in range(rows)]
            (self.folder / f"data/{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        shutil.copy(ROOT / "resources/chat_templates/chatml.jinja", self.folder / "data")
        (self.folder / "config").mkdir()
        (self.folder / "config/config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
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
        """Remove the results of other stages."""
        for stage in set(STAGES) - set(stages):
            for made in (self.results / stage, self.results / ".work" / stage, self.results / "logs" / stage):
                shutil.rmtree(made, ignore_errors=True)

    def order(self, **orders: Any) -> None:
        """Inject these faults into processes that start from now on; none without arguments."""
        self.orders.write_text(json.dumps(orders), encoding="utf-8")

    def environment(self) -> dict[str, str]:
        variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "workflow"),
            "TORTURE_CHAIN": str(self.folder),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables | self.extra

    def start(self, *arguments: str, log: str = "first.log", before: str = "") -> subprocess.Popen:
        """Start `snakemake`, the leader of a process group of its own.

        Args:
            log: file for what it prints.
            before: shell command for the process that becomes it.
        """
        command = [sys.executable, "-m", "snakemake", "--cores", str(CORES), *arguments]
        if before:
            command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
        with (self.folder / log).open("ab") as said:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=said, stderr=said, env=self.environment(), start_new_session=True
            )

    def wait(self, running: subprocess.Popen, seconds: float, log: str = "first.log") -> Said:
        """Wait until it and all processes that it started have ended; kill those that remain after the time limit."""
        status = end_of(running, seconds)
        if status is None:
            kill(everything_in(self.folder))
            running.wait()
        return Said(status=status, text=self.read(log))

    def snakemake(self, *arguments: str, seconds: float, log: str = "again.log", before: str = "") -> Said:
        """Run `snakemake` until it ends."""
        (self.folder / log).unlink(missing_ok=True)
        return self.wait(self.start(*arguments, log=log, before=before), seconds, log)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Return all published manifests by their path."""
        found = {}
        for path in sorted(self.results.glob("*/**/manifest.json")):
            point = path.relative_to(self.results)
            if point.parts[0] in STAGES:
                found[str(point)] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def remove(self) -> None:
        """Remove the folder and kill its remaining processes."""
        kill(everything_in(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
