"""The cluster's file: its keys, and the errors for an invalid one."""

import pytest

from snaketune.cluster.site import Partition, ResourceRequest, Site, fit_to_partitions, read_site, site_file
from snaketune.errors import SnaketuneError

FILE = """
account: me
gpus_per_node: {gpu: 4}
partitions:
  cpu: {max_runtime: "1-00:00:00", max_mem_mb: 64000, max_threads: 16, max_cpus_per_task: 16}
  gpu: {max_runtime: 2880, max_gpu: 8, max_nodes: 2, available_gpu_models: [a100]}
"""
TRAINING = ResourceRequest(threads=8, mem_mb=32000, runtime=600, gpus=1)


def test_it_is_the_one_that_the_executor_reads(tmp_path, monkeypatch):
    plugin = pytest.importorskip("snakemake_executor_plugin_slurm.partitions")
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    monkeypatch.setenv("SNAKEMAKE_SLURM_PARTITIONS", str(path))
    site = read_site(site_file())
    theirs = {one.name: one.limits for one in plugin.read_partition_file(path)}
    assert site.partitions.keys() == theirs.keys()
    for name, limits in theirs.items():
        assert site.partitions[name].max_runtime == limits.max_runtime
        assert site.partitions[name].max_gpu == limits.max_gpu


def test_what_the_executors_own_command_writes_is_read(slurm, tmp_path, monkeypatch, capsys):
    plugin = pytest.importorskip("snakemake_executor_plugin_slurm.cli")
    slurm.say(
        "scontrol",
        "PartitionName=cpu\n   MaxNodes=UNLIMITED MaxTime=UNLIMITED\n   State=UP TotalCPUs=4 TotalNodes=1\n\n"
        "PartitionName=gpu\n   MaxNodes=2 MaxTime=2-00:00:00\n   TotalCPUs=24 TotalNodes=3\n   TRES=cpu=24,gres/gpu=6\n",
    )
    path = tmp_path / "cluster.yaml"
    monkeypatch.setattr("sys.argv", ["generate-slurm-partition-config", "-o", str(path)])
    plugin.main()
    cpu, gpu = read_site(path).partitions.values()
    assert (cpu.max_runtime, cpu.max_nodes, cpu.max_threads, cpu.max_gpu) == (None, None, 4, 0)
    assert (gpu.max_runtime, gpu.max_nodes, gpu.max_threads, gpu.max_gpu) == (2880, 2, 8, 6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("partitons: {}", "partitons: unknown key; did you mean 'partitions'"),
        ("partitions: {}", "partitions: found {}"),
        ("partitions: {cpu: {max_mem_mb: much}}", "partitions.cpu.max_mem_mb: found 'much'"),
        ("partitions: {cpu: {max_runtime: a day}}", "partitions.cpu.max_runtime: found 'a day'"),
        ("- cpu", "cluster.yaml is invalid"),
        ("partitions: [", "can't be read as YAML"),
        ("partitions: !!python/object/apply:os.getcwd []", "can't be read as YAML"),
    ],
)
def test_an_invalid_file_is_refused_by_key(tmp_path, text, expected):
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SnaketuneError) as error:
        read_site(path)
    assert expected in str(error.value)
    assert "cluster.yaml" in str(error.value)


def test_the_error_for_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(SnaketuneError, match="make slurm-profile"):
        read_site(tmp_path / "cluster.yaml")


def test_nowhere_is_no_site(monkeypatch):
    monkeypatch.delenv("SNAKEMAKE_SLURM_PARTITIONS", raising=False)
    assert site_file() is None


@pytest.mark.parametrize(
    ("changed", "partitions", "expected"),
    [
        (
            {"gpus": 4},
            {"gpu": {"max_gpu": 4}},
            r"sft/x can never start: it requests 4 GPUs.*partition gpu has 2 GPUs on a node",
        ),
        ({"gpus": 2, "nodes": 4}, {"gpu": {"max_gpu": 4}}, "partition gpu allows 4 GPUs; lower operation.gpus"),
        ({"gpus": 0, "nodes": 3}, {"cpu": {"max_nodes": 2}}, "partition cpu allows 2 nodes"),
        ({}, {"cpu": {}}, "partition cpu has no GPUs"),
        (
            {},
            {"gpu": {"max_gpu": 4, "available_gpu_models": ["v100"]}},
            "of model a100, but partition gpu has GPUs of model v100",
        ),
    ],
)
def test_what_can_never_start_is_refused_with_every_partitions_reason(changed, partitions, expected):
    site = Site(gpu_model="a100", gpus_per_node={"gpu": 2}, partitions=partitions)
    with pytest.raises(SnaketuneError, match=expected):
        fit_to_partitions(ResourceRequest(**(vars(TRAINING) | changed)), site, "sft/x")


def test_time_is_cut_to_the_partition_that_gives_most_of_it():
    short, long = Partition(max_runtime=60, max_mem_mb=500_000), Partition(max_runtime=480, max_mem_mb=16_000)
    site = Site(partitions={"short": short, "long": long})
    result = fit_to_partitions(ResourceRequest(threads=1, mem_mb=1000, runtime=9999), site, "corpus/x")
    assert (result.runtime, result.mem_mb) == (480, 1000)
    # A short one that needs much memory goes where there is much of it.
    assert fit_to_partitions(ResourceRequest(threads=1, mem_mb=100_000, runtime=30), site, "corpus/x").mem_mb == 100_000
