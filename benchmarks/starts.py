"""What a training does before its second step, in CPU seconds: `python -m benchmarks.starts results/.jobs/dpo/demo.json`; and
without a job, what it costs until a training's process has imported all its code, as a fork and as a new process.

The worker process of a finished training is run once more, in this process and in a temporary work folder, up to its second
step. A line counts without the lines that it calls. CPU time is that of all threads and of child processes (compilers), so that
other work on the machine hardly counts.
"""

import sys

from snaketune.stages.host import forks

if __name__ == "__main__" and sys.argv[1:] == ["import"]:
    forks.run_as_fork(["benchmarks.starts", "import"], waits=True)

# isort: split
import argparse
import importlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any

# Functions by module, with what they do.
WATCHED = {
    "snaketune.artifacts.manifest": {"Artifact.files": "digests of the inputs' files"},
    "snaketune.training.loop.pipeline": {"refuse_unfit_machine": "machine, memory and time compared with the needs"},
    "snaketune.models.device_speed": {"measured_peak": "speed of matrix products", "probe": "speed of memory and disk"},
    "snaketune.models.load_model": {"load_base": "model", "load_pretrained": "model"},
    "snaketune.models.adapters": {"add_lora": "adapters"},
    "snaketune.models.selftest": {"self_test": "self-test"},
    "snaketune.training.loop.trainer": {"BaseTrainer.__init__": "trainer"},
    "snaketune.training.preference.dpo_trainer": {"DpoTrainer.check_start": "policy = reference on a row"},
}
REST = "the rest: rows, optimizer, curves, first batches"


class EndOfStart(BaseException):
    """The second step is about to begin."""


def cpu_seconds() -> float:
    children = getrusage(RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Clock:
    """CPU seconds by line; `what` is the line that runs now."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.what, self.since = "interpreter, package, command line", 0.0

    def switch(self, what: str) -> str:
        """Count for `what` from now on; return what was counted for before."""
        now, before = cpu_seconds(), self.what
        self.seconds[before] += now - self.since
        self.what, self.since = what, now
        return before

    def watch(self, function: Callable, what: str) -> Callable:
        @wraps(function)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            before = self.switch(what)
            try:
                return function(*arguments, **keywords)
            finally:
                self.switch(before)

        return watched

    def watch_all(self) -> None:
        """Watch the functions of WATCHED, wherever a module of the package has imported them."""
        modules = [module for name, module in sys.modules.items() if name.startswith("snaketune.")]
        for name, functions in WATCHED.items():
            for path, what in functions.items():
                holder: Any = importlib.import_module(name)
                *owner, attribute = path.split(".")
                for part in owner:
                    holder = getattr(holder, part)
                function = getattr(holder, attribute)
                watched = self.watch(function, what)
                setattr(holder, attribute, watched)
                for module in [] if owner else modules:
                    if getattr(module, attribute, None) is function:
                        setattr(module, attribute, watched)


def worker_job(job: Any) -> dict[str, Any]:
    """Return a job as the launcher gives it to its workers."""
    from snaketune.stages.job import result_at
    from snaketune.stages.table import STAGES

    paths = {role: job.inputs.get(role, ()) for role in STAGES[job.stage].inputs}
    return {
        "stage": job.stage,
        "spec": job.spec,
        "operation": job.operation,
        "tracking": {"tensorboard": False},
        "artifacts": {role: [[path, result_at(Path(path)).content] for path in some] for role, some in paths.items()},
        "files": {role: list(job.inputs.get(role, ())) for role in STAGES[job.stage].files},
    }


def measure(job_file: Path, folder: Path) -> Clock:
    from snaketune.stages.cache.code_digest import shaping_modules
    from snaketune.stages.cache.libraries import importing
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.job_files import read_job_file
    from snaketune.stages.table import STAGES
    from snaketune.training.launch import worker

    clock = Clock()
    clock.switch("imports of torch, transformers and peft")
    with importing():
        for library in ("torch", "transformers", "transformers.trainer", "peft"):
            importlib.import_module(library)
        job = worker_job(read_job_file(job_file))
        clock.switch("imports of the stage")
        for module in sorted(shaping_modules(STAGES[job["stage"]].module)):
            importlib.import_module(module)
    work = WorkFolder(folder)
    work.start()
    clock.watch_all()
    clock.switch(REST)
    from snaketune.training.loop.packed_trainer import PackedTrainer

    step, compiled = PackedTrainer.training_step, PackedTrainer.compile
    begun = []

    def first_step(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        if trainer.state.global_step:
            raise EndOfStart
        begun.append(trainer)
        return clock.watch(partial(step, trainer), "first step, with compilers")(*arguments, **keywords)

    PackedTrainer.training_step = first_step
    PackedTrainer.compile = clock.watch(compiled, "compile: layers marked")
    try:
        worker.build_stage(job | {"work": str(work.folder), "out": str(folder / "out")})
    except EndOfStart:
        clock.switch("")
    return clock


def import_training() -> None:
    """Import what an SFT imports, and print this process's CPU seconds."""
    from snaketune.stages.cache.code_digest import shaping_modules
    from snaketune.stages.cache.libraries import importing

    with importing():
        for module in sorted(shaping_modules("snaketune.training.sft")):
            importlib.import_module(module)
    print(cpu_seconds(), flush=True)


def measure_starts(rounds: int = 5) -> None:
    """Print the median CPU seconds of a training's process until it has imported its code, and in all if it then ends."""
    with tempfile.TemporaryDirectory() as folder:
        forks.fork_jobs("", [], Path(folder, "log"))
        # What the server was started with.
        same = dict(os.environ)
        print("| | ready | with its client, to its end |\n|---|---|---|")
        for how, variables in (("fork", {}), ("new process", {forks.VARIABLE: "none"})):
            ready, ended = [], []
            for _ in range(rounds):
                before = getrusage(RUSAGE_CHILDREN)
                command = [sys.executable, "-m", "benchmarks.starts", "import"]
                done = subprocess.run(command, env=same | variables, check=True, capture_output=True, text=True)
                after = getrusage(RUSAGE_CHILDREN)
                ready.append(float(done.stdout.splitlines()[-1]))
                child = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                ended.append(child + ready[-1] * (how == "fork"))
            print(f"| {how} | {median(ready):.2f} | {median(ended):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, nargs="?")
    job = parser.parse_args().job
    if job is None:
        measure_starts()
    elif job == Path("import"):
        # What `measure_starts` starts.
        import_training()
    else:
        measure_job(job)


def measure_job(job: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = measure(job, Path(folder, "work"))
    print("| CPU seconds | |\n|---|---|")
    for what, seconds in clock.seconds.items():
        print(f"| {what} | {seconds:.2f} |")
    print(f"| together | {sum(clock.seconds.values()):.2f} |")


if __name__ == "__main__":
    main()
