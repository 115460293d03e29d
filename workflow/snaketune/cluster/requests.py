"""What each job asks of the scheduler: what its work needs, within the cluster's partitions; more where it ran out before."""

from collections.abc import Iterable
from pathlib import Path

from snaketune.cluster.asks import Ask, within
from snaketune.cluster.ends import last_end, raised
from snaketune.cluster.estimates import Estimates
from snaketune.cluster.site import Site
from snaketune.stages.jobs import Job
from snaketune.stages.table import STAGES

# Where they are short, the jobs of these stages are one job of the cluster; what gathers data is done where Snakemake runs.
DATA_STAGES = ("corpus", "tokenizer", "tokenize", "plan", "write")
MODEL_STAGES = ("sft", "ref_pass", "ref_logps", "dpo", "eval")


class Requests:
    """Of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job], site: Site | None = None):
        """Args: site: the cluster that they are sent to; None where that isn't known, or they aren't sent anywhere."""
        self.estimates, self.site = Estimates(jobs), site
        self._asks: dict[tuple[str, int], Ask] = {}

    def ask(self, job: Job, attempt: int = 1) -> Ask:
        """Raises SnaketuneError if the job can never start there."""
        known = job.manifest, attempt
        if known not in self._asks:
            found = self.estimates.of(job)
            if self.site:
                found = within(raised(found, last_end(Path(job.folder))), self.site, job.key)
            self._asks[known] = found
        return self._asks[known]

    def names(self, stage: str) -> tuple[str, ...]:
        """Of all resources that a job of the stage may ask for."""
        sent = ("slurm_account", "qos") if self.site else ()
        if not STAGES[stage].gpu:
            return ("mem_mb", "runtime", "gpu", *sent)
        sent = (*sent, "gpu_model", "constraint", "gres") if self.site else ()
        return ("mem_mb", "runtime", "gpu", "nodes", "mpi", "tasks", "tasks_per_gpu", *sent)

    def group(self, stage: str) -> str | None:
        """The group whose jobs are one job of the cluster; None for a job of its own."""
        if stage in DATA_STAGES and self.estimates.little_text:
            return "data"
        return "models" if stage in MODEL_STAGES and self.estimates.little_computing else None

    def resources(self, job: Job, attempt: int = 1) -> dict[str, int | str]:
        """By the names that executors know; what a job doesn't ask for isn't there."""
        ask = self.ask(job, attempt)
        found: dict[str, int | str | None] = {"mem_mb": ask.mem_mb, "runtime": ask.runtime, "gpu": ask.gpus * ask.nodes}
        if ask.gpus:
            found["nodes"] = ask.nodes
        if ask.nodes > 1:
            # One task for each node, and the job itself calls srun.
            found |= {"nodes": ask.nodes, "mpi": "srun", "tasks": ask.nodes, "tasks_per_gpu": 0}
        if self.site:
            found |= {"slurm_account": self.site.account, "qos": self.site.qos}
            if ask.gpus:
                found |= {"gpu_model": self.site.gpu_model, "constraint": self.site.constraint}
                if self.site.gpus_by == "gres":
                    model = f"{self.site.gpu_model}:" if self.site.gpu_model else ""
                    found |= {"gpu": 0, "gpu_model": None, "gres": f"gpu:{model}{ask.gpus}"}
        return {name: value for name, value in found.items() if value is not None}
