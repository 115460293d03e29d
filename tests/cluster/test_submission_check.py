"""What SLURM would refuse, in its words, and the wait for its controller."""

import time
from types import SimpleNamespace

import pytest

from snaketune.cluster import submission_check
from snaketune.cluster.slurm import valid_names
from snaketune.cluster.submission_check import refusal, sbatch_options, wait_for_controller

OPTIONS = sbatch_options(4, {"mem_mb": 3700, "runtime": 90, "qos": "fast"}, "cpu")


@pytest.mark.parametrize(
    ("said", "states", "refused"),
    [
        ("allocation failure: Invalid qos specification", "idle", True),
        ("sbatch: error: invalid partition specified: cpu", "", True),
        ("allocation failure: Requested node configuration is not available", "idle\nmixed", True),
        # The job waits until they are back.
        ("allocation failure: Requested node configuration is not available", "idle\ndrained*", False),
        ("allocation failure: Unable to contact slurm controller (connect failure)", "", False),
    ],
)
def test_a_job_that_slurm_refuses_now_and_later_is_refused_in_its_words(slurm, said, states, refused):
    slurm.answer("sbatch", f"echo '{said}' >&2; exit 1")
    slurm.answer("sinfo", f"echo '{states}'")
    assert refusal(OPTIONS) == (said.removeprefix("sbatch: error: ") if refused else "")


def test_a_job_that_would_wait_forever_is_refused_though_slurm_accepts_it(slurm):
    slurm.answer("sbatch", 'echo "$@" > ' + str(slurm.folder / "asked"))
    slurm.answer("sinfo", "echo 1:00:00")
    assert refusal(OPTIONS) == "partition cpu allows 60 minutes"
    slurm.answer("sinfo", "echo infinite")
    assert refusal(OPTIONS) == ""
    asked = (slurm.folder / "asked").read_text(encoding="utf-8").split()
    assert asked == [
        *["--test-only", "--qos=fast", "--partition=cpu", "--time=90", "--mem=3700", "--cpus-per-task=4", "--wrap=true"]
    ]


def test_valid_names_are_those_of_the_user(slurm):
    slurm.answer("sacctmgr", "echo 'lab|normal,long'; echo 'other|normal'")
    slurm.answer("sinfo", "echo cpu; echo gpu")
    assert valid_names() == "accounts: lab, other; QOS: long, normal; partitions: cpu, gpu"


def test_a_controller_that_is_away_is_waited_for_and_logged(slurm, monkeypatch):
    slept, logged = [], []
    slurm.answer("scontrol", "exit 1")

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            slurm.answer("scontrol", "echo 'Slurmctld(primary) at here is UP'")

    monkeypatch.setattr(submission_check, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(submission_check, "_answered_at", float("-inf"))
    wait_for_controller(logged.append)
    assert len(slept) == 3
    assert [line.split(" (")[0] for line in logged] == [
        "SLURM's controller doesn't answer",
        "SLURM's controller answers again, after 0 s",
    ]
    # It isn't queried for every job.
    slurm.answer("scontrol", "exit 1")
    wait_for_controller(logged.append)
    assert len(logged) == 2
