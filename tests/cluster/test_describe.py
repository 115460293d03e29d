"""A cluster's file from what SLURM says, recorded from SLURM 22.05 and put in the place of its programs."""

from pathlib import Path

import pytest
import yaml

from snaketune.cluster.site import read_site, write_description
from snaketune.errors import SnaketuneError

PARTITIONS = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED MaxTime=01:00:00 \
MaxCPUsPerNode=UNLIMITED Nodes=cpu1 State=UP TotalCPUs=4 TotalNodes=1 DefMemPerNode=UNLIMITED MaxMemPerNode=6000
PartitionName=gpu AllowGroups=ALL AllowAccounts=me,you MaxNodes=2 MaxTime=2-00:00:00 MaxCPUsPerNode=UNLIMITED \
Nodes=gpu[1-3] State=UP TotalCPUs=24 TotalNodes=3 MaxMemPerNode=UNLIMITED
PartitionName=theirs AllowAccounts=you MaxTime=UNLIMITED State=UP TotalNodes=1
PartitionName=old AllowAccounts=ALL MaxTime=UNLIMITED State=DOWN TotalNodes=1
"""
NODES = "cpu|4|8000|(null)\ngpu|8|32000|gpu:a100:2(S:0-1)\ngpu|8+|64000+|gpu:a100:4\n"
CONFIG = "AccountingStorageType   = {storage}\nSelectType              = select/{select}\nMinJobAge = {age} sec\n"


@pytest.fixture
def slurm(slurm, tmp_path):
    """A function that lets SLURM's commands describe a cluster, and returns the path for the file about it."""

    def say(storage="accounting_storage/slurmdbd", select="cons_tres", account="me", age=300, limits="|"):
        texts = {"partition": PARTITIONS, "config": CONFIG.format(storage=storage, select=select, age=age)}
        for name, text in texts.items():
            (slurm.folder / name).write_text(text, encoding="utf-8")
        shown = " ".join(f"*{name}*) cat {slurm.folder}/{name};;" for name in texts)
        slurm.answer("scontrol", f'case "$*" in {shown} esac')
        slurm.say("sinfo", NODES)
        slurm.answer(
            "sacctmgr",
            f'case "$*" in *MaxSubmit*) echo "{limits}";; '
            f'*assoc*) echo "me|normal,long"; echo "us|normal";; *) echo {account};; esac',
        )
        return tmp_path / "cluster.yaml"

    return say


def test_partitions_accounts_and_gpus_are_read_from_slurm(slurm):
    path = slurm()
    output = write_description(path)
    assert "partitions cpu, gpu; jobs are watched by squeue" in output
    assert "this user has accounts: me, us; QOS: long, normal; partitions:" in output
    assert "excluded: theirs (not for account me), old (its state is DOWN)" in output
    site = read_site(path)
    assert (site.account, site.status_command, site.gpus_by, site.gpus_per_node) == ("me", "squeue", "gpus", {"gpu": 4})
    cpu, gpu = site.partitions["cpu"], site.partitions["gpu"]
    assert (cpu.max_runtime, cpu.max_mem_mb, cpu.max_threads, cpu.max_gpu) == (60, 6000, 4, 0)
    assert (gpu.max_runtime, gpu.max_mem_mb, gpu.max_threads, gpu.max_nodes, gpu.max_gpu) == (2880, 64000, 8, 2, 8)
    assert gpu.available_gpu_models == ("a100",)


@pytest.mark.parametrize(("limits", "most"), [("|", None), ("200|", 200), ("200|50", 50), ("|50", 50)])
def test_the_most_jobs_are_those_that_the_association_may_have_in_the_queue(slurm, limits, most):
    path = slurm(limits=limits)
    write_description(path)
    assert read_site(path).max_jobs == most


def test_without_accounting_squeue_watches_and_without_tres_gpus_are_gres(slurm):
    path = slurm(storage="(null)", select="cons_res", account="")
    assert "no default account" in write_description(path)
    site = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (site["status_command"], site["gpus_by"]) == ("squeue", "gres")
    assert "account" not in site
    # Without accounting no partition is closed to an account.
    assert "theirs" in site["partitions"]


@pytest.mark.parametrize(
    "storage, age, command",
    [("slurmdbd", 300, "squeue"), ("slurmdbd", 60, "sacct"), ("none", 60, "squeue"), ("none", 300, "squeue")],
)
def test_jobs_are_watched_in_the_queue_unless_it_forgets_them_and_there_are_accounts(slurm, storage, age, command):
    path = slurm(storage=f"accounting_storage/{storage}", age=age)
    assert f"jobs are watched by {command}" in write_description(path)


def test_an_existing_file_is_never_overwritten(slurm):
    path = slurm()
    path.write_text("account: mine\n", encoding="utf-8")
    with pytest.raises(SnaketuneError, match="exists, and may hold your edits"):
        write_description(path)
    assert path.read_text(encoding="utf-8") == "account: mine\n"


def test_a_missing_slurm_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SnaketuneError, match="SLURM doesn't answer here"):
        write_description(Path(tmp_path / "cluster.yaml"))
