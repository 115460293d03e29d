"""The resources that a job requests from a scheduler, and the limits of a cluster's partitions on them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from snaketune.cluster.site import Partition, Site
from snaketune.errors import SnaketuneError


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """The resources that one job requests.

    Attributes:
        threads, mem_mb: per node.
        runtime: in minutes.
        gpus: per node.
    """

    threads: int
    mem_mb: int
    runtime: int
    gpus: int = 0
    nodes: int = 1


def fit_to_partitions(request: ResourceRequest, site: Site, key: str) -> ResourceRequest:
    """Return the request, cut to the limits of the partition that allows the most of it.

    Estimates (time, memory, threads) are cut: a training that takes longer resumes in a next job. What the config sets (GPUs,
    nodes) isn't.

    Args:
        key: the job's name for errors.
    Raises:
        SnaketuneError: the job could never start in any partition.

    >>> gpu = Partition(max_runtime=2880, max_gpu=2)
    >>> site = Site(partitions={"cpu": Partition(max_runtime=60, max_mem_mb=8000), "gpu": gpu})
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=90), site, "corpus/chat")
    ResourceRequest(threads=8, mem_mb=8000, runtime=60, gpus=0, nodes=1)
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=9000, gpus=1), site, "sft/chat")
    ResourceRequest(threads=8, mem_mb=16000, runtime=2880, gpus=1, nodes=1)
    """
    refused: list[str] = []
    fitting: list[Partition] = []
    for name, partition in site.partitions.items():
        reasons = list(_refusals(request, name, partition, site))
        if reasons:
            refused.append(f"partition {name} {' and '.join(reasons)}")
        else:
            fitting.append(partition)
    if not fitting:
        requested = [
            f"{request.gpus} GPUs on each of {request.nodes} nodes" if request.gpus else f"{request.nodes} nodes"
        ]
        requested += [f"of model {site.gpu_model}"] if request.gpus and site.gpu_model else []
        raise SnaketuneError(
            f"{key} can never start: it requests {' '.join(requested)}, but {'; '.join(refused)}; lower operation.gpus or "
            "operation.nodes, or add another partition to the cluster's file (profiles/slurm/cluster.yaml)"
        )
    # Partitions with GPUs are for jobs that need them, if there are others.
    suited = [one for one in fitting if bool(one.max_gpu) == bool(request.gpus)] or fitting
    return max((_cut(request, one) for one in suited), key=lambda cut: (cut.runtime, cut.mem_mb, cut.threads))


def _refusals(request: ResourceRequest, name: str, partition: Partition, site: Site) -> Iterator[str]:
    if partition.max_nodes and request.nodes > partition.max_nodes:
        yield f"allows {partition.max_nodes} nodes"
    if not request.gpus:
        return
    most = site.gpus_per_node.get(name, partition.max_gpu)
    if request.gpus > most:
        yield f"has {most} GPUs on a node" if most else "has no GPUs"
    elif request.gpus * request.nodes > partition.max_gpu:
        yield f"allows {partition.max_gpu} GPUs"
    models = partition.available_gpu_models
    if most and site.gpu_model and models and site.gpu_model not in models:
        yield f"has GPUs of model {', '.join(models)}"


def _cut(request: ResourceRequest, partition: Partition) -> ResourceRequest:
    return replace(
        request,
        threads=min(request.threads, partition.max_threads or request.threads),
        mem_mb=min(request.mem_mb, partition.max_mem_mb or request.mem_mb),
        runtime=min(request.runtime, partition.max_runtime or request.runtime),
    )
