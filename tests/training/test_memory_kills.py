"""A training that the kernel killed for memory goes on with a smaller batch plan; one that was killed otherwise doesn't."""

import os
import re
import signal

import pytest

from snaketune.cluster.job_endings import JobEnding
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import SftSpec
from snaketune.training.autotune import batch_plan
from snaketune.training.launch import memory_kills, oom_retry, processes
from tests.stages.demo_jobs import job_of

GROUP = "/sys/fs/cgroup/job (17, boot b)"
KILLED, NOT_KILLED, UNKNOWN = [{GROUP: 3}, {GROUP: 4}], [{GROUP: 3}, {GROUP: 3}], [{}, {}]
# As after a restart of the machine, or in another container.
OTHER = [{GROUP: 3}, {"/sys/fs/cgroup/job (17, boot c)": 9}]
SPEC = SftSpec.model_construct(training=Learning(learning_rate=1, batch_rows=8))


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run an attempt whose process ends by a script, and return its error. Args: counts: before and after it."""
    work = WorkFolder(tmp_path)
    work.start()

    def run(script: str, counts: list[dict[str, int]], **operation) -> str:
        remaining = iter(counts)
        monkeypatch.setattr(memory_kills, "oom_kills", lambda: next(remaining))
        monkeypatch.setattr(processes, "command", lambda *_: ["sh", "-c", f"cd {work.state}; {script}"])
        with pytest.raises(SnaketuneError) as raised:
            oom_retry.launch(job_of("sft", tmp_path, SPEC, operation=Execution(**operation)), work)
        return str(raised.value)

    run.work = work
    return run


def rows_of(work: WorkFolder) -> int:
    return batch_plan.choose_plan(Execution(micro_batch_rows=4), 8, 1, work.state).micro_batch_rows


IN_STEPS = "touch in_steps; kill -9 $$"


@pytest.mark.parametrize(
    ("script", "counts", "said", "rows"),
    [
        (
            IN_STEPS,
            KILLED,
            "in a step .* of 4 rows .*job rose from 3 to 4.* next attempt .* of 2 rows and the same 8",
            2,
        ),
        ("kill -9 $$", KILLED, "before the first step .* give the job more memory", 4),
        (IN_STEPS, NOT_KILLED, r"\(killed by signal 9\); not by the kernel for memory .* `scancel`", 4),
        (IN_STEPS, UNKNOWN, "probably it ran out of memory .* otherwise it was `kill -9`, `scancel`", 4),
        (IN_STEPS, OTHER, "not by the kernel", 4),
        ("touch in_steps; kill -11 $$", KILLED, "killed by signal 11", 4),
        ("touch in_steps; exit 1", KILLED, "exit status 1", 4),
    ],
)
def test_only_a_kill_by_the_kernel_for_memory_makes_the_plan_smaller(attempt, script, counts, said, rows):
    error = attempt(script, counts, micro_batch_rows=4)
    assert re.search(said, error), error
    assert rows_of(attempt.work) == rows


def test_of_several_processes_it_is_the_one_that_recorded_nothing(attempt):
    """torchrun ends with status 1; what the others record is that they lost a peer."""
    lost = 'mkdir failed; echo \'{"rank": 1, "echo": true, "time": 0}\' > failed/1.json; touch in_steps; exit 1'
    several = {"micro_batch_rows": 4, "gpus": 2, "launch": "ddp"}
    assert "if it is -9, not by the kernel for memory" in attempt(lost, NOT_KILLED, **several)
    assert "of 4 rows (oom_kill of /sys/fs/cgroup/job rose from 3 to 4). The next attempt" in attempt(
        lost, KILLED, **several
    )


def test_without_a_smaller_plan_the_error_names_other_remedies(attempt):
    smallest = {"micro_batch_rows": 1, "gradient_checkpointing": True}
    assert "no smaller batch plan; give the job more memory, or lower" in attempt(IN_STEPS, KILLED, **smallest)


@pytest.mark.parametrize(("offloading", "said"), [(False, "of the host, where smaller"), (True, "next attempt")])
def test_on_a_gpu_a_smaller_plan_needs_less_of_the_host_only_with_offloading(attempt, monkeypatch, offloading, said):
    monkeypatch.setattr(batch_plan, "visible_gpus", lambda: ("0",))
    operation = {"micro_batch_rows": 4, "activation_offloading": offloading}
    assert said in attempt(IN_STEPS, KILLED, **operation)


def kill_job(state, counts: dict[str, int], monkeypatch) -> None:
    """Kill a launcher while its processes run."""
    monkeypatch.setattr(memory_kills, "oom_kills", lambda: counts)
    if not (child := os.fork()):
        with memory_kills.record_launch(state):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("counts", "ending", "rows", "said"),
    [
        (
            KILLED,
            "FAILED",
            2,
            "with micro-batches of 4 rows (oom_kill of /sys/fs/cgroup/job rose from 3 to 4). The next",
        ),
        (NOT_KILLED, "OUT_OF_MEMORY", 2, "with micro-batches of 4 rows (SLURM job 17 is OUT_OF_MEMORY). The next"),
        # A kill -9, or a node that crashed and counts anew.
        (NOT_KILLED, "RUNNING", 4, "killed (if for memory, lower training.micro_batch_rows); this one has"),
        (OTHER, "NODE_FAIL", 4, "killed (if for memory"),
        (UNKNOWN, None, 4, "killed (if for memory"),
    ],
)
def test_a_job_killed_as_a_whole_is_noticed_by_the_next_attempt(
    attempt, monkeypatch, capsys, counts, ending, rows, said
):
    before, after = counts
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(
        memory_kills, "ending_of", lambda number: ending and JobEnding(state=ending, mem_mb=1, runtime=1)
    )
    kill_job(attempt.work.state, before, monkeypatch)
    (attempt.work.state / batch_plan.IN_STEPS).touch()
    attempt("exit 1", [after] * 3, micro_batch_rows=4)
    assert said in capsys.readouterr().out
    assert rows_of(attempt.work) == rows
    # Noticed once.
    attempt("exit 1", [after] * 3, micro_batch_rows=4)
    assert "was killed" not in capsys.readouterr().out
    assert rows_of(attempt.work) == rows
