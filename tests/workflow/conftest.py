"""A micro project: the demo's rows by the dozen, a model of some ten thousand parameters, the real workflow."""

import copy
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.slurm_commands import SlurmCommands

from .command_line import snakemake

ROOT = Path(__file__).parents[2]
ROWS = {"chat": 120, "preferences": 60}
# A umask that lets a group write.
TEAM = 0o002

# Invented.
SECRETS = {
    "HF_TOKEN": "hf_SecretSecretSecretSecretSecretSecr",
    "WANDB_API_KEY": "5ec7e75ec7e75ec7e75ec7e75ec7e75ec7e75ec7",
    "MLFLOW_TRACKING_PASSWORD": "secret-of-mlflow",
    "AWS_ACCESS_KEY_ID": "AKIASECRETSECRETSECR",
    "AWS_SECRET_ACCESS_KEY": "secret/of/aws/secret/of/aws",
    "OPENAI_API_KEY": "sk-secret-secret-secret-secret",
    "HTTPS_PROXY": "http://me:secret-of-proxy@127.0.0.1:9",
}

MICRO: dict[str, Any] = {
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
            "packing": {"length": 256},
            "training": {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.002},
            "operation": {"checkpoint_steps": 10, "log_steps": 1},
        }
    },
    "dpo": {
        "run": {
            "from": "run",
            "corpus": "pairs",
            "packing": {"length": 256},
            "training": {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.001},
        }
    },
    "eval": {
        "both": {
            "models": ["sft:run", "dpo:run"],
            "conversations": ["chat"],
            "preferences": ["pairs"],
            "packing": {"length": 256},
            "generation": {"max_new_tokens": 6},
            "exact_match": {"answer_pattern": "Answer: (.*)", "limit": 6},
            "samples": 2,
        }
    },
}


class Project:
    """A folder with data and a config, in which the workflow runs."""

    def __init__(self, folder: Path, config: dict[str, Any] | None = None, code: Path = ROOT):
        self.folder = folder
        self.config = copy.deepcopy(config or MICRO)
        self.code = code
        # The other cores are those of other tests.
        self.cores = 1
        self.umask = -1

    def write_data(self) -> "Project":
        (self.folder / "data").mkdir(parents=True)
        for name, rows in ROWS.items():
            with (ROOT / f"resources/demo/{name}.jsonl").open(encoding="utf-8") as file:
                lines = [next(file) for _ in range(rows)]
            (self.folder / f"data/{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        shutil.copy(ROOT / "resources/chat_templates/chatml.jinja", self.folder / "data")
        # As in the config, and another list.
        (self.folder / "data/sources.yaml").write_text("- {files: [data/chat.jsonl]}\n", encoding="utf-8")
        (self.folder / "data/weighed.yaml").write_text("- {files: [data/chat.jsonl], weight: 2}\n", encoding="utf-8")
        return self

    def copy_to(self, folder: Path) -> "Project":
        """Move the whole project, with results and Snakemake's records, as a user would."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder, self.config, self.code)

    def write_config(self) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")

    def arguments(self, *arguments: str) -> list[str]:
        self.write_config()
        return [
            *("--snakefile", str(self.code / "Snakefile"), *arguments),
            *("--configfile", "config.yaml", "--cores", str(self.cores), "--resources", "gpu=1"),
        ]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *self.arguments(*arguments)]

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        """Run Snakemake and return all it printed."""
        status, said = snakemake(self.arguments(*arguments), self.folder, self.umask, apart=self.code != ROOT)
        if check and status:
            raise AssertionError(said[-6000:])
        return said

    def stale(self, *arguments: str) -> set[str]:
        """The rules that a dry run would run."""
        return rules_in(self.snakemake("--dry-run", *arguments))

    def made(self) -> list[Path]:
        """The files that runs made."""
        return [path for path in (self.folder / "results").rglob("*") if path.is_file()]

    def read(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")


def copy_code(folder: Path) -> None:
    """The files of a clone that run, to edit, with their times, so that what Python compiled of them is valid there too."""
    folder.mkdir(exist_ok=True)
    shutil.copy2(ROOT / "Snakefile", folder)
    for name in ("workflow", "profiles", "envs", "resources"):
        shutil.copytree(ROOT / name, folder / name)


def rules_in(said: str) -> set[str]:
    """The rules in the table that Snakemake prints before it runs them."""
    table = re.search(r"Job stats:\njob +count\n[- ]+\n((?:\S+ +\d+\n)+)", said)
    rules = {line.split()[0] for line in table[1].splitlines()} if table else set()
    return rules - {"total", "all"}


def wrong_modes(folder: Path, umask: int) -> dict[str, str]:
    """The modes below a folder, by name, that the umask doesn't leave; weights and tables of results are read-only."""
    wrong = {}
    for path in (path for path in folder.rglob("*") if not path.is_symlink()):
        parts = path.relative_to(folder).parts
        linked = path.suffix in (".arrow", ".safetensors") and not {"state", ".rows"} & {*parts}
        rights = 0o777 if path.is_dir() else 0o444 if linked else 0o666
        if (mode := path.stat().st_mode & 0o7777) != rights & ~umask:
            wrong[str(path)] = oct(mode)
    return wrong


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills once for all processes of this test run; the others wait for it."""
    # Under pytest-xdist each process has a folder of its own in one that they share.
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            done.touch()
    return folder


def _run_with_secrets(folder: Path) -> None:
    """Run the micro project in an environment with secrets; tests/security checks where they end up."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in SECRETS.items():
            environment.setenv(name, value)
        project = Project(folder).write_data()
        project.umask = TEAM
        (folder.parent / "micro.log").write_text(project.snakemake(), encoding="utf-8")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """The micro project after one complete run. Tests copy it and don't change it."""
    project = Project(made_once(tmp_path_factory, "micro", _run_with_secrets))
    project.umask = TEAM
    return project


@pytest.fixture
def project(finished, tmp_path) -> Project:
    """A copy of the finished project to do things to."""
    return finished.copy_to(tmp_path / "project")


@pytest.fixture
def fresh(tmp_path) -> Project:
    """The micro project before any run."""
    return Project(tmp_path / "project").write_data()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, which accept every job."""
    slurm = SlurmCommands(tmp_path, monkeypatch)
    # The executor refuses to be imported where there is sinfo without squeue.
    for program in ("sbatch", "scontrol", "sinfo", "squeue"):
        slurm.say(program, "")
    slurm.answer("sacctmgr", 'case "$*" in *account%256*) echo me;; *) echo "me|fast";; esac')
    return slurm


@pytest.fixture
def own_code(finished, tmp_path) -> Project:
    """A finished project with a copy of the code, to edit."""
    copy_code(tmp_path / "code")
    project = finished.copy_to(tmp_path / "project")
    project.code = tmp_path / "code"
    return project
