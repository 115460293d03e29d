"""Sums over pairs by source, of every optimizer step and all processes, from which metrics are computed."""

from collections.abc import Callable, Iterable, Sequence

import torch

# The sums by name, over one step or several.
Sums = dict[str, float]


def in_double(values: torch.Tensor) -> torch.Tensor:
    """The values in float64; in float32 on MPS, which lacks it."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def sums_by_source(columns_PK: torch.Tensor, source_P: torch.Tensor, sources: int) -> torch.Tensor:
    """Sums over the pairs of each source, [sources, K].

    >>> sums_by_source(torch.tensor([[1.0, 5.0], [1.0, 3.0], [1.0, 2.0]]), torch.tensor([0, 1, 0]), sources=2).tolist()
    [[2.0, 7.0], [1.0, 3.0]]
    """
    # A matrix product is deterministic on a GPU, unlike scattered additions.
    source_PS = source_P[:, None] == torch.arange(sources, device=source_P.device)
    return source_PS.to(columns_PK.dtype).T @ columns_PK


def add_steps(steps: Iterable[Sums]) -> Sums:
    every = list(steps)
    return {name: sum(step[name] for step in every) for name in every[0]}


def metrics_of(steps: Sequence[Sequence[Sums]], means: Callable[[Sums], dict[str, float]]) -> dict[str, float]:
    """Metrics over steps, which have sums for each source: of all pairs, and of each source if there are several.

    >>> metrics_of([[{"pairs": 2}, {"pairs": 1}], [{"pairs": 3}, {"pairs": 4}]], lambda sums: sums)
    {'pairs': 10, 'sources.0/pairs': 5, 'sources.1/pairs': 5}
    """
    metrics, of_sources = means(add_steps(sums for step in steps for sums in step)), list(zip(*steps, strict=True))
    for number, source_steps in enumerate(of_sources if len(of_sources) > 1 else ()):
        metrics |= {f"sources.{number}/{name}": value for name, value in means(add_steps(source_steps)).items()}
    return metrics


class MetricSums:
    """The sums of every step since the last `read`, on the device of this process, so that no step waits for the device.

    Args:
        names: of the sums.
    """

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.of_step: torch.Tensor | float = 0.0
        self.steps: list[torch.Tensor] = []

    def add(self, sums_SK: torch.Tensor) -> None:
        """Add the sums of a micro-batch, by source."""
        self.of_step = self.of_step + sums_SK

    def end_step(self) -> None:
        self.steps.append(self.of_step)
        self.of_step = 0.0

    def read(self, gather: Callable[[torch.Tensor], torch.Tensor] | None) -> list[list[Sums]]:
        """Return and clear the sums of the steps since the last call: per step and source, over all processes.

        Args:
            gather: maps float[1, n] of each process, which all call it, to float[processes, n]; None for a single process.
        """
        if not self.steps:
            return []
        sums, self.steps = torch.stack(self.steps), []
        if gather is not None:
            sums = gather(sums.reshape(1, -1)).sum(0).reshape(sums.shape)
        return [self.by_name(step) for step in sums.cpu()]

    def by_name(self, sums_SK: torch.Tensor) -> list[Sums]:
        """Sums by source, on the host."""
        return [dict(zip(self.names, row)) for row in sums_SK.tolist()]
