"""The models of evaluations, with their scores and responses."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from snaketune.publishing.results import Result, read_json, read_lines
from snaketune.tables import read_table


def model_named(job: str) -> str:
    """The model of an evaluation's job.

    >>> model_named("all/sft-my-model")
    'sft:my-model'
    """
    kind, _, name = job.partition("/")[2].partition("-")
    return f"{kind}:{name}"


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """One model in one evaluation, with its scores and responses."""

    result: Result
    scores: dict[str, Any]
    responses: list[dict[str, Any]]

    @property
    def evaluation(self) -> str:
        return self.result.name.partition("/")[0]

    @property
    def model(self) -> str:
        """`base:NAME`, `sft:NAME`, `dpo:NAME` or `reward:NAME`."""
        return model_named(self.result.name)

    @property
    def rewards(self) -> bool:
        """Whether it is a reward model, which has scores of pairs alone."""
        return bool(self.result.spec.get("rewards"))

    @property
    def engine(self) -> str:
        """The engine that generated the responses, with its version; empty without responses."""
        return engine_name((self.result.manifest.get("generation") or {}).get("engine", {}))

    @cached_property
    def pairs(self) -> pa.Table:
        """Log-probabilities of the held-out pairs (columns: `evaluation.held_out.PAIRS`)."""
        return read_table(self.result.artifact.file("pairs.arrow"))

    @cached_property
    def losses(self) -> dict[str, dict[tuple[str, int], tuple[float, int]]]:
        """Summed loss and tokens of each held-out document: corpus → (pack digest, document) → (nats, tokens)."""
        manifest, table = self.result.manifest, read_table(self.result.artifact.file("losses.arrow"))
        packs = dict(zip(manifest["spec"].get("conversations", ()), manifest["inputs"].get("packs", ())))
        losses: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
        for row in table.to_pylist():
            document = packs.get(row["corpus"], ""), row["document"]
            losses.setdefault(row["corpus"], {})[document] = row["loss_nats"], row["tokens"]
        return losses


def scored_of(result: Result) -> ScoredModel:
    """Read the scores and responses of an evaluation. Raises SnaketuneError if they can't be read."""
    file = result.artifact.file
    responses = [] if result.spec.get("rewards") else read_lines(file("responses.jsonl"))
    return ScoredModel(result=result, scores=read_json(file("scores.json")), responses=responses)


def engine_name(about: dict[str, Any]) -> str:
    """An engine as a manifest describes it, in a few words.

    >>> engine_name({"name": "vllm", "version": "0.32.0", "device": "cuda", "dtype": "bfloat16"})
    'vllm 0.32.0 bfloat16'
    """
    return " ".join(str(about[key]) for key in ("name", "version", "model", "dtype") if about.get(key))
