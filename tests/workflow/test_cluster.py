"""Sent to a cluster, seen by dry runs: what jobs ask for, what is sent as one, and what is refused before it is sent."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml

from snaketune.cluster.resources import ResourceRequests
from snaketune.cluster.site import Site
from snaketune.config.load import load
from snaketune.engine.threads import MIN_WIDTH_FOR_THREADS
from snaketune.stages.graph import JobGraph
from snaketune.stages.specs import canonical

from .command_line import snakemake
from .conftest import ROOT, rules_in

SITE = {
    "account": "me",
    "qos": "normal",
    "constraint": "a100",
    "gpus_per_node": {"gpu": 2},
    "partitions": {
        "cpu": {"max_runtime": 60, "max_mem_mb": 8000, "max_threads": 4},
        "gpu": {"max_runtime": 120, "max_mem_mb": 8000, "max_threads": 16, "max_nodes": 2, "max_gpu": 4},
    },
}
RULE = re.compile(r"^ *(?:local)?rule (\w+):$", re.MULTILINE)


class Cluster:
    """A project whose jobs would be sent to a cluster."""

    def __init__(self, project, slurm, monkeypatch):
        self.project, self.slurm = project, slurm
        self.profile = project.folder / "profiles/slurm"
        shutil.copytree(ROOT / "profiles/slurm", self.profile, ignore=shutil.ignore_patterns("cluster.yaml"))
        monkeypatch.delenv("SNAKEMAKE_SLURM_PARTITIONS", raising=False)

    def plan(self, *arguments, site=SITE, check=True):
        (self.profile / "cluster.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")
        return self.look(*arguments, check=check)

    def look(self, *arguments, check=True):
        # The resources of this machine are no limit there.
        planning = [*self.project.arguments()[:-4], "-n", "--profile", "profiles/slurm", *arguments]
        status, said = snakemake(planning, self.project.folder, apart=self.project.code != ROOT)
        assert not (check and status), said
        return said

    def requested(self, *arguments, site=SITE):
        """Return by rule the resources of its last job, as strings."""
        result = {}
        _, *parts = RULE.split(self.plan(*arguments, site=site))
        for rule, body in zip(parts[::2], parts[1::2]):
            output = dict(re.findall(r"^ +(resources|threads): (.*)$", body, re.MULTILINE))
            pairs = (pair.split("=", 1) for pair in output["resources"].split(", "))
            result[rule] = dict(pairs) | {"threads": output.get("threads", "1")}
        return result


def several_gpus(cluster, **operation):
    run = cluster.project.config["sft"]["run"]
    run["operation"] = operation
    run["training"] |= {"batch_rows": 24, "micro_batch_rows": 1}


@pytest.fixture
def cluster(fresh, slurm, monkeypatch):
    return Cluster(fresh, slurm, monkeypatch)


def test_jobs_request_what_they_need_within_the_partitions(cluster):
    several_gpus(cluster, gpus=2)
    cluster.project.config["sft"]["run"]["base"]["hidden_size"] = MIN_WIDTH_FOR_THREADS
    requested = cluster.requested()
    # The corpora have a few kilobytes.
    assert int(requested["corpus"]["mem_mb"]) < 2000
    assert int(requested["corpus"]["runtime"]) < 10
    sft = requested["sft"]
    assert (sft["gpu"], sft["nodes"], sft["threads"], sft["mem_mb"]) == ("2", "1", "16", "6800")
    assert (sft["slurm_account"], sft["qos"], sft["constraint"]) == ("me", "normal", "a100")
    assert "constraint" not in requested["corpus"]
    # In a smaller partition they request all that it allows.
    small = SITE | {"partitions": {"one": {"max_gpu": 2, "max_threads": 4, "max_mem_mb": 2000, "max_runtime": 5}}}
    sft = cluster.requested(site=small)["sft"]
    assert (sft["threads"], sft["mem_mb"], sft["runtime"]) == ("4", "2000", "5")


def test_nothing_on_the_command_line_takes_the_clusters_values_away(cluster):
    given = ["--default-resources", "disk_mb=1000", "--set-resources", "sft:runtime=33", "--set-threads", "sft=2"]
    sft = cluster.requested(*given)["sft"]
    assert (sft["runtime"], sft["threads"]) == ("33", "2")
    assert (sft["slurm_account"], sft["constraint"], sft["gres"]) == ("me", "a100", "gpu:1")


def test_gpus_are_gres_where_the_cluster_knows_only_that(cluster):
    sft = cluster.requested(site=SITE | {"gpus_by": "gres", "gpu_model": "v100"})["sft"]
    assert (sft["gres"], sft["gpu"]) == ("gpu:v100:1", "0")
    assert "gpu_model" not in sft


def test_an_earlier_run_sets_the_estimate(cluster, monkeypatch):
    with monkeypatch.context() as patch:
        patch.chdir(cluster.project.folder)
        spec = json.loads(canonical(JobGraph(*load(cluster.project.config)).job("sft", "run").spec))
    for facts, output, runtime, mem_mb in (
        ({"seconds": 1200, "peak_memory_mb": 1000}, spec, "35", "2000"),
        # Measured with another spec, the memory may be too low.
        ({"seconds": 1200, "peak_memory_mb": 1000}, spec | {"base": None}, "35", "3600"),
        ({"seconds": 1200, "peak_memory_mb": 4000}, spec | {"base": None}, "35", "6500"),
        ({"seconds": 1200, "tokens_per_second_median": 1.0}, spec, "120", "3600"),
    ):
        folder = cluster.project.folder / "results/sft/run"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
        (folder / "manifest.json").write_text(json.dumps({"spec": output}), encoding="utf-8")
        sft = cluster.requested()["sft"]
        assert (sft["runtime"], sft["mem_mb"]) == (runtime, mem_mb)


@pytest.fixture
def requests(cluster, monkeypatch):
    """Return the requests of the project's jobs and, of one of them, what it requests."""
    monkeypatch.chdir(cluster.project.folder)

    def request(stage, name, mem_mb=64_000):
        limits = {name: limits | {"max_mem_mb": mem_mb} for name, limits in SITE["partitions"].items()}
        graph = JobGraph(*load(cluster.project.config))
        made = ResourceRequests(graph.jobs.values(), Site(**SITE | {"partitions": limits}))
        return made, made.request(graph.job(stage, name))

    return request


def test_an_attempt_of_a_part_of_a_group_raises_what_it_ran_out_of(cluster, requests):
    config = cluster.project.config
    config["sft"]["other"] = config["sft"]["run"] | {"training": config["sft"]["run"]["training"] | {"seed": 1}}
    made, before = requests("sft", "run")
    _, other = requests("sft", "other")
    assert {"results/sft/run/manifest.json", "results/sft/other/manifest.json"} < {*made.groups["models"].requests}
    note = cluster.project.folder / "results/.work/.slurm/sft/run"
    note.parent.mkdir(parents=True)
    note.write_text("17\n", encoding="utf-8")
    job = "JobId=17 JobState={} TRES=mem={}M,node=1 TimeLimit={}"
    cluster.slurm.answer("scontrol", f"echo {job.format('OUT_OF_MEMORY', before.mem_mb, '00:30:00')}")
    assert requests("sft", "run")[1] == replace(before, mem_mb=2 * before.mem_mb)
    assert requests("sft", "other")[1] == other
    # The group requests no more than the partition has.
    assert [requests("sft", name, mem_mb=6000)[1].mem_mb for name in ("run", "other")] == [6000, 3000]
    cluster.slurm.answer("scontrol", f"echo {job.format('TIMEOUT', before.mem_mb, '00:30:00')}")
    assert requests("sft", "run")[1] == replace(before, runtime=60)
    # What an attempt raised is kept after another one ran out of something else.
    note.write_text("16\n17\n", encoding="utf-8")
    ended = {
        16: job.format("OUT_OF_MEMORY", before.mem_mb, "00:30:00").replace("17", "16"),
        17: job.format("TIMEOUT", 7200, "00:30:00"),
    }
    cluster.slurm.answer("scontrol", f'case "$*" in *16) echo {ended[16]};; *) echo {ended[17]};; esac')
    assert requests("sft", "run")[1] == replace(before, mem_mb=2 * before.mem_mb, runtime=60)


def test_a_sweep_is_few_jobs_also_when_its_variants_depend_on_nothing_that_runs(cluster, requests):
    """With `group-components` Snakemake sends all of them as one, so each may be part of the group."""
    config = cluster.project.config
    config["dpo"]["run"]["grid"] = {"beta": [round(0.1 * step, 1) for step in range(1, 13)]}
    made, first = requests("sft", "run")
    group = made.groups["models"]
    assert len(group.requests) == 1 + 1 + 12 + 13
    total = group.total()
    # One after the other.
    assert (total.threads, total.mem_mb) == (first.threads, first.mem_mb)
    assert total.runtime == sum(one.runtime for one in group.requests.values()) <= 60
    # Whether or not they are in a group; so small a model computes with one.
    assert {made.threads(job) for job in made.jobs if job.stage in ("sft", "dpo", "eval")} == {1}


def test_a_large_sweep_is_several_groups_of_an_hour(cluster):
    cluster.project.config["dpo"]["run"]["grid"] = {"beta": [round(0.01 * step, 2) for step in range(1, 61)]}
    # A profile of someone else, which says nothing of groups.
    planned = cluster.plan()
    groups = groups_of(planned)
    assert {"models", "models2", "models3"} < groups and len(groups) < 6
    assert f"As {len(groups) + 1} SLURM jobs: data, models, " in planned
    minutes = minutes_of_groups(planned)
    assert all(5 < minutes[name] <= 60 for name in groups - {"data"}), minutes


def test_a_part_of_a_group_has_the_time_that_it_needs(cluster):
    """A target, and --until, run a part of the stale jobs."""
    whole = minutes_of_groups(cluster.plan())["models"]
    alone = minutes_of_groups(cluster.plan("results/eval/both/sft-run/manifest.json"))["models"]
    until = minutes_of_groups(cluster.plan("--until", "sft"))["models"]
    assert whole > alone > until >= 5


def minutes_of_groups(planned):
    """The minutes that Snakemake requests for each group whose jobs run one after the other; jobs of groups are indented."""
    parts = re.split(r"Group job (\w+)", planned)
    return {
        name: sum(map(int, re.findall(r"^ {8}resources: .*?runtime=(\d+)", body, re.MULTILINE)))
        for name, body in zip(parts[1::2], parts[2::2])
    }


def test_no_group_waits_for_a_job_that_waits_for_the_group(cluster, requests):
    """A long training between short ones divides their group."""
    config = cluster.project.config
    for name, base, gpus in (("long", "sft:run", 2), ("last", "sft:long", 1)):
        run = config["sft"]["run"]
        config["sft"][name] = run | {"use_base": base, "operation": {"gpus": gpus}}
        del config["sft"][name]["base"]
    config["eval"]["both"]["models"] += ["sft:long", "sft:last"]
    made, _ = requests("sft", "run")
    groups = {job.key: made.group(job) for job in made.jobs}
    assert [groups[f"sft/{name}"] for name in ("run", "long", "last")] == ["models", None, "models2"]
    assert [groups[f"eval/both/sft-{name}"] for name in ("run", "long", "last")] == ["models", "models2", "models2"]
    assert groups["dpo/run"] == "models"


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (
            {"gpus": 4},
            "sft/run can never start: it requests 4 GPUs on each of 1 nodes, but partition cpu has no GPUs; partition gpu has",
        ),
        ({"gpus": 2, "nodes": 3}, "partition gpu allows 2 nodes"),
    ],
)
def test_what_can_never_start_is_refused_in_the_dry_run(cluster, operation, expected):
    several_gpus(cluster, **operation)
    assert expected in cluster.plan(check=False)
    assert "lower operation.gpus or operation.nodes" in cluster.plan(check=False)


def test_what_slurm_would_refuse_is_refused_in_the_dry_run(cluster):
    slurm = cluster.slurm
    slurm.answer("sinfo", "echo gpu")
    slurm.answer("sbatch", "echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    planned = cluster.plan(check=False)
    assert "SLURM would refuse data (sbatch --account=me --qos=normal --partition=cpu" in planned
    assert "Invalid qos specification; correct profiles/slurm/cluster.yaml" in planned
    assert "accounts: me; QOS: fast; partitions: gpu" in planned
    # A full queue is no error of the file.
    slurm.answer("sbatch", "echo AssocMaxSubmitJobLimit >&2; echo 'allocation failure: Job violates' >&2; exit 1")
    slurm.answer("squeue", "echo 'me|lab|normal'")
    planned = cluster.plan()
    assert (
        planned.count("AssocMaxSubmitJobLimit; jobs in the queue: 1 of me (account lab, QOS normal)); a run waits") == 1
    )
    # In the middle of a run the executor would wait forever, whether or not SLURM enforces accounts.
    slurm.answer("sbatch", "exit 0")
    planned = cluster.plan(site=SITE | {"account": "other"}, check=False)
    assert "Available accounts: me; correct `account` in profiles/slurm/cluster.yaml" in planned
    # Nothing is refused because SLURM doesn't answer.
    slurm.answer("scontrol", "exit 1")
    assert cluster.plan().count("SLURM's controller doesn't answer") == 1


def test_a_group_runs_all_of_its_jobs_where_old_results_exist(project, monkeypatch):
    """In a SLURM job, where another result of one of its rules is current."""
    monkeypatch.chdir(project.folder)
    jobs = JobGraph(*load(project.config))
    tokenize, plan = (
        next(job for job in jobs.stage(stage) if job.name.startswith("chat")) for stage in ("tokenize", "plan")
    )
    name, part = tokenize.name.split("/")
    targets = [
        "corpus:name=chat",
        "tokenizer:name=small",
        f"tokenize:name={name},part={part}",
        f"plan:name={plan.name}",
    ]
    said = project.snakemake(
        *("-n", "--mode", "remote", "--force", "--nolock", "--target-jobs", *targets),
        *("--allowed-rules", "corpus", "tokenizer", "tokenize", "plan", "--local-groupid", "group"),
    )
    assert rules_in(said) == {"corpus", "tokenizer", "tokenize", "plan"}


def groups_of(planned):
    return set(re.findall(r"Group job (\w+)", planned))


def test_short_jobs_are_sent_as_one_and_long_ones_alone(cluster):
    assert groups_of(cluster.plan()) == {"data", "models"}
    # Jobs that together take longer than the partition allows are sent as several.
    short = {**SITE["partitions"]["gpu"], "max_runtime": 6}
    planned = cluster.plan(site=SITE | {"partitions": SITE["partitions"] | {"gpu": short}})
    assert groups_of(planned) == {"data", "models", "models2", "models3"}
    cluster.project.config["corpora"]["chat"]["sources"][0]["files"] = ["data/big.jsonl"]
    big = cluster.project.folder / "data/big.jsonl"
    with big.open("wb") as file:
        file.truncate(600_000_000)
    planned = cluster.plan()
    assert "data" not in groups_of(planned)
    # Its parts are an array, where one job speaks for all.
    requested = cluster.requested()
    assert requested["tokenize"] == requested["tokenize"] | {"mem_mb": "1400"}


def test_without_the_clusters_file_the_profile_names_the_command_that_makes_it(cluster):
    listed = cluster.look(check=False)
    assert "profiles/slurm/cluster.yaml" in listed
    assert "make slurm-profile" in listed
