"""What SLURM would refuse, in its words, and what is waited for."""

import io
import os
import queue
import subprocess

import pytest

from snaketune.cluster import sbatch
from snaketune.cluster.sbatch import why_to_wait
from snaketune.cluster.slurm import valid_names
from snaketune.cluster.submission_check import refusal, sbatch_options

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


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "listed", "why"),
    [
        ("AssocMaxSubmitJobLimit", "me|lab|normal\nme|lab|normal", "2 of me (account lab, QOS normal)"),
        ("QOSMaxSubmitJobPerUserLimit", "me|lab|fast", "1 of me (account lab, QOS fast)"),
        (
            "AssocGrpSubmitJobsLimit",
            "a|lab|x\na|lab|x\nb|lab|x",
            "2 of a (account lab, QOS x), 1 of b (account lab, QOS x)",
        ),
        ("QOSGrpSubmitJobsLimit", "", "none that this user may see"),
        ("MaxSubmitJobsPerAccount", "a|lab|x", "1 of a (account lab, QOS x)"),
        ("error: Slurm temporarily unable to accept job, sleeping and retrying", "", "temporarily unable"),
        ("Unable to contact slurm controller (connect failure)", "", "Unable to contact"),
        # The limit is lower than what was sent.
        ("AssocMaxSubmitJobLimit", "", ""),
        # Limits of a single job, and refusals that aren't known.
        ("AssocMaxWallDurationPerJobLimit", "me|lab|normal", ""),
        ("QOSMaxCpuPerUserLimit", "me|lab|normal", ""),
        ("", "me|lab|normal", ""),
        ("Batch job submission failed: Invalid job array specification", "me|lab|normal", ""),
        # The job may be in the queue.
        ("Socket timed out on send/recv operation", "me|lab|normal", ""),
    ],
)
def test_only_known_refusals_that_pass_are_waited_for(slurm, said, listed, why):
    slurm.say("squeue", listed)
    answer = why_to_wait(f"sbatch: error: {said}\nsbatch: error: {POLICY}")
    assert why in answer
    assert bool(answer) == bool(why)


def test_the_executors_sbatch_waits_for_a_place_and_says_so(slurm, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])
    slurm.say("squeue", "me|lab|normal")
    # The third try succeeds.
    count = slurm.folder / "tries"
    slurm.answer(
        "sbatch",
        f"echo >> {count}; test $(wc -l < {count}) -ge 3 || {{ echo AssocMaxSubmitJobLimit >&2; exit 1; }}; "
        f'echo "$@" > {slurm.folder}/asked; cat > {slurm.folder}/script; echo "$PATH" > {slurm.folder}/path; echo 17',
    )
    before, logged = os.environ["PATH"], queue.Queue()
    sbatch.install(logged.put, seconds=0.01)
    submit = {"shell": True, "input": "the script", "capture_output": True, "text": True}
    done = subprocess.run("sbatch --parsable --comment 'a b'", **submit)
    assert (done.returncode, done.stdout) == (0, "17\n")
    assert logged.get(timeout=60).startswith(
        "SLURM takes no more jobs at present (AssocMaxSubmitJobLimit; jobs in the queue"
    )
    assert logged.empty()
    read = {name: (slurm.folder / name).read_text(encoding="utf-8").strip() for name in ("asked", "script", "path")}
    # Jobs inherit the environment without it.
    assert read == {"asked": "--parsable --comment a b", "script": "the script", "path": before}
    slurm.answer("sbatch", "echo 'invalid partition specified: cpu' >&2; exit 3")
    refused = subprocess.run("sbatch", **submit)
    assert (refused.returncode, refused.stderr) == (3, "invalid partition specified: cpu\n")


def test_the_executors_sbatch_ends_with_the_executor(slurm, tmp_path, monkeypatch):
    """Nothing would watch its job."""
    slurm.say("squeue", "me|lab|normal")
    slurm.answer("sbatch", "echo AssocMaxSubmitJobLimit >&2; exit 1")
    os.mkfifo(tmp_path / sbatch.LOG)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert sbatch.main(str(tmp_path), "0.01") == 1


def test_valid_names_are_those_of_the_user(slurm):
    slurm.answer("sacctmgr", "echo 'lab|normal,long'; echo 'other|normal'")
    slurm.answer("sinfo", "echo cpu; echo gpu")
    assert valid_names() == "accounts: lab, other; QOS: long, normal; partitions: cpu, gpu"
