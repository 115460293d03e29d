"""What a job asks a scheduler for, and what the cluster's partitions leave of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from snaketune.cluster.site import Partition, Site
from snaketune.errors import SnaketuneError


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """What one job asks for.

    Attributes:
        threads, mem_mb: of each node.
        runtime: minutes.
        gpus: of each node.
    """

    threads: int
    mem_mb: int
    runtime: int
    gpus: int = 0
    nodes: int = 1


def fit_to_partitions(ask: ResourceRequest, site: Site, key: str) -> ResourceRequest:
    """The ask, no larger than the partition allows that gives most of it.

    What is estimated (time, memory, threads) is cut: a training that takes longer goes on in a next job. What is asked for in
    the config (GPUs, nodes) isn't.

    Args:
        key: the job, as errors name it.
    Raises:
        SnaketuneError: there is no partition where it could ever start.

    >>> gpu = Partition(max_runtime=2880, max_gpu=2)
    >>> site = Site(partitions={"cpu": Partition(max_runtime=60, max_mem_mb=8000), "gpu": gpu})
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=90), site, "corpus/chat")
    Ask(threads=8, mem_mb=8000, runtime=60, gpus=0, nodes=1)
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=9000, gpus=1), site, "sft/chat")
    Ask(threads=8, mem_mb=16000, runtime=2880, gpus=1, nodes=1)
    """
    refused: list[str] = []
    fitting: list[Partition] = []
    for name, partition in site.partitions.items():
        reasons = list(_refusals(ask, name, partition, site))
        if reasons:
            refused.append(f"partition {name} {' and '.join(reasons)}")
        else:
            fitting.append(partition)
    if not fitting:
        asked = [f"{ask.gpus} GPUs on each of {ask.nodes} nodes" if ask.gpus else f"{ask.nodes} nodes"]
        asked += [f"of model {site.gpu_model}"] if ask.gpus and site.gpu_model else []
        raise SnaketuneError(
            f"{key} can never start: it asks for {' '.join(asked)}, but {'; '.join(refused)}; lower operation.gpus or "
            "operation.nodes, or name another partition in the cluster's file"
        )
    # Those with GPUs are for those who need them, wherever there are others.
    suited = [one for one in fitting if bool(one.max_gpu) == bool(ask.gpus)] or fitting
    return max((_cut(ask, one) for one in suited), key=lambda cut: (cut.runtime, cut.mem_mb, cut.threads))


def _refusals(ask: ResourceRequest, name: str, partition: Partition, site: Site) -> Iterator[str]:
    if partition.max_nodes and ask.nodes > partition.max_nodes:
        yield f"gives {partition.max_nodes} nodes"
    if not ask.gpus:
        return
    most = site.gpus_per_node.get(name, partition.max_gpu)
    if ask.gpus > most:
        yield f"has {most} GPUs on a node" if most else "has no GPUs"
    elif ask.gpus * ask.nodes > partition.max_gpu:
        yield f"gives {partition.max_gpu} GPUs"
    models = partition.available_gpu_models
    if most and site.gpu_model and models and site.gpu_model not in models:
        yield f"has GPUs of model {', '.join(models)}"


def _cut(ask: ResourceRequest, partition: Partition) -> ResourceRequest:
    return replace(
        ask,
        threads=min(ask.threads, partition.max_threads or ask.threads),
        mem_mb=min(ask.mem_mb, partition.max_mem_mb or ask.mem_mb),
        runtime=min(ask.runtime, partition.max_runtime or ask.runtime),
    )
