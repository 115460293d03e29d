"""The ending of a failed attempt, the request of the next one, reasons of pending jobs, and the time limit of a job."""

from datetime import datetime
from pathlib import Path

import pytest

from snaketune.cluster.job_endings import (
    ending_of,
    job_end_time,
    last_numbers,
    note_job_number,
    raise_after,
    requeue_job,
    unfinished,
)
from snaketune.cluster.pending_jobs import LostJobs, waiting_jobs
from snaketune.cluster.site import ResourceRequest

JOB = "JobId=17 JobName=x JobState={state} Reason=None TimeLimit={limit} TRES=cpu=4,mem={memory},node=1,billing=4 {rest}\n"
ASK = ResourceRequest(threads=1, mem_mb=1500, runtime=10)
FOLDER = Path("results/sft/run")


@pytest.fixture
def slurm(slurm, tmp_path, monkeypatch):
    """SLURM's commands, for a job of it in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return slurm


def fail():
    with pytest.raises(RuntimeError), note_job_number(FOLDER):
        raise RuntimeError


def last_ending():
    return ending_of(last_numbers(FOLDER)[-1])


@pytest.mark.parametrize(
    ("state", "changed"),
    [
        ("OUT_OF_MEMORY", {"mem_mb": 8192}),
        ("TIMEOUT", {"runtime": 180}),
        ("FAILED", {}),
        ("CANCELLED", {}),
        ("NODE_FAIL", {}),
        ("PREEMPTED", {}),
    ],
)
def test_only_the_resource_that_ran_out_is_raised(slurm, state, changed):
    fail()
    slurm.say("scontrol", JOB.format(state=state, limit="01:30:00", memory="4G", rest=""))
    assert raise_after(ASK, last_ending()) == ResourceRequest(**(vars(ASK) | changed))


def test_a_memory_limit_enforced_by_slurm_is_read_from_the_log(slurm):
    fail()
    log = slurm.folder / "17.log"
    log.write_text(
        "slurmstepd-cpu1: error: StepId=17.0 exceeded memory limit (2996 > 2097), being killed\n", encoding="utf-8"
    )
    job = JOB.format(state="FAILED", limit="01:30:00", memory="4G", rest=f"StdOut={log}")
    slurm.say("scontrol", job)
    assert raise_after(ASK, last_ending()).mem_mb == 8192
    log.write_text("a corpus about memory limits\n", encoding="utf-8")
    assert raise_after(ASK, last_ending()) == ASK


def test_accounting_is_queried_for_a_job_that_slurm_has_forgotten(slurm):
    fail()
    slurm.fail("scontrol")
    slurm.say("sacct", "17|OUT_OF_MEMORY|2000M|00:20:00\n")
    assert raise_after(ASK, last_ending()).mem_mb == 4000


def test_a_task_of_an_array_has_its_own_ending(slurm):
    """Its number is also that of the array, for which SLURM lists all tasks."""
    fail()
    other = JOB.replace("JobId=17", "JobId=18").format(state="OUT_OF_MEMORY", limit="01:30:00", memory="4G", rest="")
    own = JOB.format(state="FAILED", limit="01:30:00", memory="4G", rest="")
    slurm.say("scontrol", own + other)
    assert raise_after(ASK, last_ending()) == ASK
    slurm.fail("scontrol")
    lines = "18|OUT_OF_MEMORY|2000M|00:20:00\n17|TIMEOUT|2000M|00:20:00\n"
    slurm.say("sacct", lines)
    assert raise_after(ASK, last_ending()) == ResourceRequest(threads=1, mem_mb=1500, runtime=40)


def test_of_several_nodes_each_had_its_share(slurm):
    fail()
    job = JOB.replace("node=1", "node=2").format(state="OUT_OF_MEMORY", limit="01:30:00", memory="4G", rest="")
    slurm.say("scontrol", job)
    assert raise_after(ASK, last_ending()).mem_mb == 4096


def test_a_finished_or_unknown_job_raises_nothing(slurm):
    with note_job_number(FOLDER):
        pass
    assert last_numbers(FOLDER) == []
    fail()
    slurm.fail("scontrol", "sacct")
    assert raise_after(ASK, last_ending()) == ASK


def test_what_did_not_finish_is_listed_with_the_end_of_its_job_and_its_log(slurm):
    fail()
    slurm.say("scontrol", JOB.format(state="OUT_OF_MEMORY", limit="01:30:00", memory="4G", rest=""))
    with note_job_number(FOLDER.with_name("finished")):
        pass
    assert list(unfinished([FOLDER, FOLDER.with_name("finished"), FOLDER.with_name("never")])) == [
        "sft/run: SLURM job 17 is OUT_OF_MEMORY; its log: results/logs/sft/run.log"
    ]


def test_without_slurm_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    fail()
    assert not list(tmp_path.iterdir())


def test_those_that_wait_for_more_than_a_minute_say_why_and_what_to_edit():
    listed = (
        "7|gpu|PartitionTimeLimit|2026-11-22T10:00:00|rule_sft_wildcards_run|/here\n"
        "8|gpu|Priority|2026-11-22T10:04:30|rule_eval|/here\n"
        "9|gpu|Resources|2026-11-22T10:00:00|rule_eval|/elsewhere\n"
        "10_[1-3]|cpu|SomethingNew|2026-11-22T10:01:00|rule_tokenize|/here\n"
        "garbage\n"
    )
    waiting = list(waiting_jobs(listed, "/here", datetime(2026, 11, 22, 10, 5)))
    assert [number for number, _, _ in waiting] == ["7", "10_[1-3]"]
    assert waiting[0][2].startswith(
        "job 7 (sft run) has waited for 5 min: it requests more time than partition gpu allows"
    )
    assert "max_runtime in the cluster's file (PartitionTimeLimit)" in waiting[0][2]
    assert waiting[1][2].endswith("SLURM's reason is SomethingNew")


def test_the_end_of_a_job_is_its_variables_or_squeues(slurm, monkeypatch):
    slurm.say("squeue", "2026-11-22T10:05:00\n")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert job_end_time() == datetime(2026, 11, 22, 10, 5).timestamp()
    slurm.say("squeue", "N/A\n")
    assert job_end_time() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    assert job_end_time() == 1.7e9
    # It has been given more time since it began.
    slurm.say("squeue", "2026-11-22T10:05:00\n")
    assert job_end_time() == datetime(2026, 11, 22, 10, 5).timestamp()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert job_end_time() is None


def test_only_a_job_that_was_sent_by_the_profile_is_queued_again(slurm, monkeypatch):
    """In one of the user's own Snakemake runs, and would find its lock when it begins again."""
    slurm.say("scontrol", "")
    monkeypatch.delenv("SNAKEMAKE_SLURM_PARTITIONS", raising=False)
    assert not requeue_job()
    monkeypatch.setenv("SNAKEMAKE_SLURM_PARTITIONS", "profiles/slurm/cluster.yaml")
    assert requeue_job()
    slurm.fail("scontrol")
    assert not requeue_job()


def test_lost_jobs_are_reported_once():
    gone = LostJobs()
    ours, done, others = "RUNNING|/here\n", "COMPLETED|/here\nFAILED|/here\n", "RUNNING|/elsewhere\n"
    # Before anything was sent, while SLURM doesn't answer, and while something is there, nothing is wrong.
    looks = [others, None, ours, None, *[others] * 3, ours + done, *[done] * 4, None, others, others]
    assert [gone.check(listed, "/here") for listed in looks] == [*[False] * 13, True, False]
