"""What a sample's table holds, for its page: lengths, how responses end, how much they differ, and some of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.publishing.results import Result
from snaketune.publishing.scored_models import engine_name
from snaketune.report.data.results import ResultSet
from snaketune.sampling.tables import PROMPTS, RESPONSES
from snaketune.tables import read_table
from snaketune.text import clip, percent, whole

PROMPTS_SHOWN, RESPONSES_SHOWN = 6, 4


@dataclass(frozen=True, kw_only=True)
class SampledTable:
    """One sample."""

    name: str
    model: str
    result: Result

    @property
    def spec(self) -> dict[str, Any]:
        return self.result.spec

    @property
    def engine(self) -> str:
        return engine_name(self.result.manifest["engine"])

    @cached_property
    def table(self) -> pa.Table:
        columns = ["id", "turn", "prompt", "index", "text", "reasoning", "tool_calls", "tokens", "ended", "logp"]
        return read_table(self.result.artifact.file(RESPONSES)).select(columns)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64[n], in tokens."""
        return pc.list_value_length(self.table["tokens"]).to_numpy().astype(np.int64)

    @cached_property
    def truncated(self) -> float:
        return pc.mean(pc.equal(self.table["ended"], "length")).as_py() or 0.0

    @cached_property
    def distinct(self) -> list[int]:
        """For each prompt, the number of its distinct responses."""
        texts: dict[str, set[str]] = {}
        for prompt, text in zip(self.table["prompt"].to_pylist(), self.table["text"].to_pylist()):
            texts.setdefault(prompt, set()).add(text)
        return [len(of_prompt) for of_prompt in texts.values()]

    @property
    def facts(self) -> list[tuple[str, str]]:
        counts = self.result.manifest["counts"]
        logps, tokens = self.table["logp"].drop_null(), int(self.lengths.sum())
        per_token = pc.sum(logps).as_py() / tokens if len(logps) == len(self.table) and tokens else None
        empty = pc.sum(pc.equal(self.table["text"], "")).as_py() or 0
        parts = [
            ("prompts", whole(counts["prompts"])),
            ("responses", whole(counts["responses"])),
            ("tokens", whole(counts["tokens"])),
            ("tokens per response, median", whole(float(np.median(self.lengths)))),
            ("truncated at the limit", percent(self.truncated)),
            ("distinct responses per prompt", f"{np.mean(self.distinct):.3g} of {self.spec['responses']}"),
            ("log-probability per token", "–" if per_token is None else f"{per_token:.3f} nats"),
        ]
        more = {"empty": empty, "tool calls that can't be read": counts["unread_tool_calls"]}
        more["with reasoning"] = len(self.table) - self.table["reasoning"].null_count
        more["with tool calls"] = len(self.table) - self.table["tool_calls"].null_count
        return parts + [(label, whole(count)) for label, count in more.items() if count]

    @property
    def distinct_counts(self) -> np.ndarray:
        """int64[responses + 1]: the number of prompts by their number of distinct responses."""
        return np.bincount(self.distinct, minlength=self.spec["responses"] + 1)

    def samples(self) -> list[dict[str, Any]]:
        """The first prompts by id, with their first responses."""
        prompts = read_table(self.result.artifact.file(PROMPTS)).slice(0, PROMPTS_SHOWN).to_pylist()
        return [
            {
                "corpus": prompt["corpus"],
                "prompt": clip("\n".join(f"[{turn['role']}] {turn['content']}" for turn in prompt["messages"])),
                "expected": None if prompt["answer"] is None else clip(prompt["answer"], 200),
                "responses": [
                    {"text": clip(row["text"]), "tokens": len(row["tokens"]), "ended": row["ended"]}
                    for row in self._of_prompt(prompt["id"], prompt["turn"])
                ],
            }
            for prompt in prompts
        ]

    def _of_prompt(self, id: str, turn: int) -> list[dict[str, Any]]:
        chosen = pc.and_(pc.equal(self.table["id"], id), pc.equal(self.table["turn"], turn))
        return self.table.filter(chosen).slice(0, RESPONSES_SHOWN).to_pylist()


def sampled_tables(results: ResultSet) -> list[SampledTable]:
    return [
        SampledTable(name=result.name, model=_model(results, result), result=result) for result in results.of("sample")
    ]


def _model(results: ResultSet, result: Result) -> str:
    made_from = results.made_from(result, "model")
    return made_from[0].label if made_from else (result.spec["base"] or {}).get("path", "initial weights")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows that were selected from scored responses."""

    result: Result

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def solved(self) -> dict[str, Any]:
        """The lowest and highest score, and the number of prompts by the mean score of their responses, in bins between."""
        return self.result.manifest["solved"]

    @property
    def mean_tokens(self) -> dict[str, float]:
        """Of what was selected (`chosen`, `rejected`; `response`; `good`, `bad`)."""
        return self.result.manifest["mean_tokens"]

    @property
    def facts(self) -> list[tuple[str, str]]:
        counts, kind = self.result.manifest["counts"], self.result.spec["kind"]
        made = {"preferences": "pairs", "conversations": "conversations", "unpaired": "labelled responses"}[kind]
        facts = [("prompts", whole(counts["prompts"])), (made, whole(counts["rows"]))]
        facts += [(f"prompts without: {reason}", whole(n)) for reason, n in counts["prompts_without"].items()]
        facts += [(f"responses left out: {reason}", whole(n)) for reason, n in counts["left_out"].items()]
        return facts + [(f"tokens of {what}, mean", f"{mean:.3g}") for what, mean in self.mean_tokens.items()]


def selections(results: ResultSet) -> list[Selection]:
    return [Selection(result=result) for result in results.of("select")]


def score_rows(results: ResultSet) -> list[tuple[str, str, str, str, str]]:
    """For each score: name, sample, what it is made by, mean, and how many responses have one."""
    rows = []
    for result in (*results.of("score"), *results.of("judge"), *results.of("rate")):
        spec, counts = result.spec, result.manifest["counts"]
        if result.stage == "judge":
            how = f"judge {spec['server_model'] or result.manifest['judge']['name']}"
        elif result.stage == "rate":
            trained = results.first(result, "model")
            how = f"reward {trained.name if trained else spec['base']['path']}"
        else:
            how = "answer" if spec["answer"] else "python" if spec["python"] else "sum"
        (sample,) = results.made_from(result, "samples") or (None,)
        scored = f"{whole(counts['scored'])} of {whole(counts['responses'])}"
        rows.append((result.name, sample.name if sample else "", how, f"{result.manifest['mean']:.4g}", scored))
    return rows
