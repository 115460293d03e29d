"""Invented results on disk in the form that stages write, with all parts of the report."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from invented_data import LENGTH, DataResults, bad, hit

from snaketune.corpus.rows import SCHEMAS
from snaketune.evaluation.held_out import LOSSES, PAIRS
from snaketune.files import write_json
from snaketune.report.page_files import build
from snaketune.sampling.tables import PROMPT_SCHEMA, PROMPTS, RESPONSE_SCHEMA, RESPONSES
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReportedJob, ReportSpec
from snaketune.tables import write_table


class Results(DataResults):
    """Writes results of every stage, and builds their report."""

    def sft(self, name: str, pack: str, tokenizer: str, *, steps: int = 30, trl: bool = False) -> str:
        history = [
            {"step": n, "loss": 6 * math.exp(-n / steps) + 0.2 * self.random.random(), "epoch": 2 * n / steps}
            | ({} if trl else {"tokens_per_second": 20000 + 5000 * self.random.random()})
            for n in range(1, steps + 1)
        ]
        return self.add(
            "sft",
            name,
            spec={"training": {"epochs": 2.0}},
            counts={"rows": 12, "steps": steps, "tokens": 3000} | ({} if trl else {"tokens_per_epoch": 1500}),
            inputs={"pack": [pack], "tokenizer": [tokenizer], "base": []},
            run={"history": history, "device": "cpu"} | ({} if trl else {"tokens_per_second_median": 22000.0}),
            **({"trainer": "trl", "parameters": 33440} if trl else {"parameters": 33440, "kernel": "sdpa"}),
        )

    def dpo(
        self,
        name: str,
        model: str,
        pack: str,
        *,
        steps: int = 20,
        spec: dict[str, Any] | None = None,
        logged: dict[str, float] | None = None,
        **about: Any,
    ) -> str:
        """Write a DPO run. `spec` and `about` replace entries of spec and manifest; `logged` adds metrics to every step."""
        history = [
            {
                "step": n,
                "epoch": n / steps,
                "loss": 0.69 - 0.3 * n / steps,
                "accuracy": min(1.0, 0.5 + n / steps),
                "margin": n / steps,
                "chosen_reward": 0.2 * n / steps,
                "rejected_reward": -0.8 * n / steps,
                "tokens_per_second": 9000.0,
            }
            | (logged or {})
            for n in range(1, steps + 1)
        ]
        return self.add(
            "dpo",
            name,
            spec={"training": {"epochs": 1.0}, "loss": "sigmoid", "beta": 0.1} | (spec or {}),
            counts={"rows": 5, "pairs": 9, "steps": steps, "tokens": 1800, "tokens_per_epoch": 1800},
            inputs={"model": [model], "pack": [pack], "ref_logps": []},
            parameters=33440,
            trainable_parameters=1200,
            run={"history": history, "device": "NVIDIA H200", "tokens_per_second_median": 9000.0, "processes": 2},
            **about,
        )

    def pairs(
        self,
        name: str,
        margins: dict[str, float],
        *,
        corpus: str = "pairs",
        reference: dict[str, float] | None = None,
        tokens: int = 10,
        sources: int = 1,
    ) -> None:
        """Write the held-out pairs of an evaluation's model.

        Args:
            margins: by pair id, chosen less rejected in nats per token; the rejected one has -2 per token.
            reference: the same of the reference, for the pairs that it knows.
            sources: how many they are from, in turn.
        """
        rows = []
        for number, (pair, margin) in enumerate(margins.items()):
            known = {} if reference is None or pair not in reference else reference
            rows.append(
                {
                    "corpus": corpus,
                    "id": pair,
                    "source": number % sources,
                    "chosen_logp": tokens * (margin - 2),
                    "rejected_logp": -2.0 * tokens,
                    "chosen_tokens": tokens,
                    "rejected_tokens": tokens,
                    "reference_chosen_logp": tokens * (known[pair] - 2) if known else None,
                    "reference_rejected_logp": -2.0 * tokens if known else None,
                }
            )
        write_table(self.payload("eval", name, "pairs.arrow"), pa.Table.from_pylist(rows, schema=PAIRS))

    def losses(self, name: str, losses: dict[int, float], shortest: int, corpus: str = "chat") -> None:
        """Write the losses (nats) of held-out documents by number; each has one token more than the previous one."""
        rows = [
            {"corpus": corpus, "document": number, "loss_nats": loss, "tokens": shortest + number}
            for number, loss in losses.items()
        ]
        write_table(self.payload("eval", name, "losses.arrow"), pa.Table.from_pylist(rows, schema=LOSSES))

    def texts(self, name: str, pairs: dict[str, tuple[str, str, str]], **counts: Any) -> str:
        """Write a corpus of preferences with held-out rows. `pairs` has prompt, chosen and rejected by id."""
        rows = [
            {"id": pair, "prompt": _turn("user", prompt), "chosen": _turn("assistant", chosen)}
            | {"rejected": _turn("assistant", rejected)}
            for pair, (prompt, chosen, rejected) in pairs.items()
        ]
        table = pa.Table.from_pylist(rows, schema=SCHEMAS["preferences"])
        write_table(self.payload("corpus", name, "held_out-00000.arrow"), table)
        return self.corpus(name, kind="preferences", **counts)

    def evaluate(
        self,
        name: str,
        *,
        right: float = 0.5,
        corpora: tuple[str, ...] = ("chat",),
        preferences: tuple[str, ...] = ("pairs",),
        reference: bool = False,
        tasks: dict[str, Any] | None = None,
        text: str = "Sure!\nAnswer: {answer}",
        task_names: tuple[str, ...] = ("counting", "weekday"),
        samples: int = 3,
        packs: tuple[str, ...] = (),
        engine: str = "transformers",
        teachers: dict[str, Any] | None = None,
        **preferred: Any,
    ) -> str:
        """Write an evaluation. `preferred` replaces scores of the preferences."""
        rows, conversations = [], {}
        for corpus in corpora:
            by_task = {}
            for task in task_names:
                correct = round(6 * right)
                by_task[task] = {"prompts": 6, "correct": correct, "share": round(correct / 6, 4)}
                rows += [_response(corpus, task, n, n < correct, text) for n in range(6)]
            share = sum(entry["correct"] for entry in by_task.values()) / (6 * len(by_task)) if by_task else None
            conversations[corpus] = {
                "held_out_loss": round(2 - right, 5) if by_task else None,
                "perplexity": round(math.exp(2 - right), 4) if by_task else None,
                "supervised_tokens": 600 if by_task else 0,
                "exact_match": {
                    "prompts": 6 * len(by_task),
                    "correct": sum(entry["correct"] for entry in by_task.values()),
                    "share": share,
                    "mean_response_tokens": 12.5 if by_task else None,
                    "by_task": by_task,
                },
            }
        known = {"reward_accuracy": 0.9, "reward_margin_nats": 1.5, "pairs_with_reference": 20}
        known |= {"chosen_reward_nats": -0.5, "rejected_reward_nats": -2.0}
        unknown = dict.fromkeys(known) | {"pairs_with_reference": 0}
        scores = {
            "parameters": 33440,
            "conversations": conversations,
            "preferences": {
                corpus: {"pairs": 20, "logp_accuracy": right, "logp_accuracy_per_token": right, "logp_margin_nats": 3.0}
                | {"chosen_logp_nats": -20.0, "rejected_logp_nats": -23.0}
                | (known if reference else unknown)
                | preferred
                for corpus in preferences
            },
        }
        scores |= {name: entry for name, entry in (("tasks", tasks), ("teachers", teachers)) if entry}
        write_json(self.payload("eval", name, "scores.json"), scores)
        lines = [json.dumps(row) + "\n" for row in rows]
        self.payload("eval", name, "responses.jsonl").write_text("".join(lines), encoding="utf-8")
        for file, schema in (("pairs.arrow", PAIRS), ("losses.arrow", LOSSES)):
            if not (path := self.payload("eval", name, file)).exists():
                write_table(path, schema.empty_table())
        spec = {"samples": samples, "conversations": list(corpora)}
        inputs = {"packs": list(packs)}
        generation = {"engine": {"name": engine, "version": "1.0"}}
        about = {"counts": {"prompts": len(rows)}, "inputs": inputs, "generation": generation}
        return self.add("eval", name, spec=spec, run={"device": "cpu"}, **about)

    def sample(self, name: str, model: str, *, responses: int = 3, truncated: int = 2, same: bool = False) -> str:
        """Write a sample of 8 prompts. Args: truncated: of their responses; same: whether those to a prompt are equal."""
        prompts = [
            {
                "id": f"{n:032x}", "turn": 1, "corpus": "chat", "messages": [{"role": "user", "content": f"Question {n}?"}],
                "answer": "7", "reference": "Answer: 7", "tokens": [1, 2, n], "digest": f"{n:032x}",
            }
            for n in range(8)
        ]  # fmt: skip
        rows = [
            {
                "id": prompt["id"], "turn": 1, "prompt": prompt["digest"], "index": index,
                "text": f"Answer: {0 if same else index}", "content": f"Answer: {0 if same else index}",
                "tokens": [*range(4 + index)], "ended": "length" if n * responses + index < truncated else "stop",
                "logp": -1.5, "answer": "7", "reference": "Answer: 7",
            }
            for n, prompt in enumerate(prompts)
            for index in range(responses)
        ]  # fmt: skip
        for file, table, schema in ((PROMPTS, prompts, PROMPT_SCHEMA), (RESPONSES, rows, RESPONSE_SCHEMA)):
            write_table(self.payload("sample", name, file), pa.Table.from_pylist(table, schema=schema))
        counts = {"prompts": 8, "responses": len(rows), "tokens": sum(len(row["tokens"]) for row in rows)}
        counts |= {"unread_tool_calls": 0, "without_logp": 0}
        spec = {"responses": responses, "decoding": {"max_new_tokens": 8}, "base": None}
        about = {"engine": {"name": "transformers", "version": "5.23.0", "dtype": "float32"}}
        return self.add("sample", name, spec=spec, counts=counts, inputs={"model": [model]}, **about)

    def score(self, name: str, sample: str, mean: float = 0.5) -> str:
        spec = {"answer": {"pattern": "(.*)"}, "python": False, "weights": []}
        counts = {"responses": 24, "scored": 20, "without": {"the row has no answer": 4}}
        return self.add("score", name, spec=spec, counts=counts, inputs={"samples": [sample]}, mean=mean)

    def select(
        self, name: str, score: str, *, chosen: float = 9.0, rejected: float = 8.0, sample: str | None = None
    ) -> str:
        """Write pairs of scored responses. Args: chosen, rejected: their mean lengths in tokens."""
        counts = {"prompts": 8, "rows": 5, "prompts_without": {"equal scores": 3}, "left_out": {"truncated": 2}}
        solved = {"low": 0.0, "high": 1.0, "prompts": [2, 0, 0, 0, 0, 5, 0, 0, 0, 1]}
        about = {"mean_tokens": {"chosen": chosen, "rejected": rejected}, "solved": solved}
        return self.add(
            "select",
            name,
            spec={"kind": "preferences", "at_least": None},
            counts=counts,
            inputs={"scores": [score], "samples": [sample] if sample else []},
            **about,
        )

    def race(
        self,
        grid: str,
        rung: float,
        scores: dict[str, float],
        paused: dict[str, float],
        stopped: dict[str, int] | None = None,
    ) -> str:
        """Write one rung of a race of DPO runs. Args: scores: of those that still run, the best first."""
        best, name = next(iter(scores)), f"dpo-{grid}@{rung}"
        table = [
            {
                "run": f"dpo/{run}", "mean": score, "difference": [0.0, 0.0] if run == best else [-0.4, -0.1],
                "replaced_by": 0, "paused": run in paused,
            }
            for run, score in scores.items()
        ]  # fmt: skip
        decisions = {"rows": 40, "best": f"dpo/{best}", "table": table}
        decisions["stopped"] = {f"dpo/{run}": step for run, step in (stopped or {}).items()}
        decisions["paused"] = {f"dpo/{run}": share for run, share in paused.items()}
        write_json(self.payload("race", name, "race.json"), decisions)
        return self.add("race", name, spec={"metric": "reward_margin_nats", "rung": rung})

    def everything(self) -> None:
        """Write a sweep: three corpora, packed and raw, rows of one and two lengths; three SFT and two DPO runs; two evals."""
        chat = self.corpus(
            "chat",
            quarantined={"not_json": 2, "empty_turn": 1},
            dropped={"duplicate": 4, "near_duplicate": 5, "contaminated": 2},
            extra=3,
            joined=6,
            repeated=7,
            notes={"same_prompt": 3, "repaired_drop_trailing_user": 2},
            cleaned={"normalization": 9, "mask_personal_data": 4, "email": 5},
            near_duplicates={"groups": 2, "largest": 4},
            contamination={"ngram": 13, "hits": {"pairs": 2, "tasks/choice.jsonl": 0}},
            records={
                "quarantine.jsonl": [bad("not_json", 3), bad("not_json", 9), bad("empty_turn", 12)],
                "duplicates.jsonl": [{"rows": n, "ids": ["a1", "b2"], "excerpt": f"group {n}"} for n in (3, 4)],
                "contamination.jsonl": [hit(5, "pairs", "6a"), hit(8, "pairs", "6a")],
            },
        )
        other, pairs = self.corpus("other"), self.corpus("pairs", kind="preferences")
        tokenizer = self.tokenizer()
        self.tokenizer("adopted", adopt="org/model")
        slow = {"parts": 3, "ways": (("fast", ""), ("reference", "the template trims"))}
        packed = self.pack("chat-demo-128-aa", chat, tokenizer, long=3, cut=2, tokenized=slow)
        raw = self.raw_pack("other-demo-128-bb", other, tokenizer)
        preference = self.pack(
            "pairs-demo-128-cc", pairs, tokenizer, kind="preference", shared=50, lengths=(64, LENGTH)
        )
        small = self.sft("small", packed, tokenizer)
        self.sft("long", packed, tokenizer, steps=5000)
        self.sft("raw", raw, tokenizer, trl=True)
        counts = {"pairs": {"train": 60, "held_out": 20}, "tokens": 700}
        self.add("ref_logps", "small-pairs", counts=counts, run={"tokens_per_second": 800.0})
        self.dpo("soft", small, preference)
        self.dpo("hard", small, preference, steps=1, spec={"beta": 0.5})
        ids = [f"p{n:02}" for n in range(20)]
        before = dict(zip(ids, self.random.normal(-0.1, 0.5, 20).tolist()))
        for model, right in (("base-small", 0.0), ("sft-small", 0.5), ("dpo-soft", 0.8), ("dpo-hard", 0.7)):
            tasks = {"demo_choice": {"acc": right, "perplexity": 3.2}}
            moved = {pair: margin + right * 0.6 for pair, margin in before.items()} if "dpo" in model else before
            self.pairs(f"main/{model}", moved, reference=before if "dpo" in model else None)
            self.evaluate(f"main/{model}", right=right, reference=model.startswith("dpo"), tasks=tasks)
        self.evaluate("second/sft-raw", corpora=("chat", "other"), preferences=())
        self.select("own", self.score("checked", self.sample("tries", small)))
        self.race("sweep", 0.1, {"soft": 0.5, "hard": 0.4}, paused={})
        self.race("sweep", 0.5, {"soft": 1.5, "hard": 0.6}, paused={"hard": 0.5})

    def named(self, backwards: bool = False) -> tuple[ReportedJob, ...]:
        """The jobs that have results."""
        there = (job for job in self.jobs.values() if self._manifest(job).is_file())
        return tuple(sorted(there, key=lambda job: (job.stage, job.name), reverse=backwards))

    def files(self, backwards: bool = False) -> dict[str, list[Path]]:
        """Manifests and run.json files of these jobs."""
        manifests = [self._manifest(job) for job in self.named(backwards)]
        return {"manifests": manifests, "runs": sorted(self.folder.glob("results/**/run.json"), reverse=backwards)}

    def _manifest(self, job: ReportedJob) -> Path:
        return self.folder / "results" / job.stage / job.name / "manifest.json"

    def report(
        self,
        *,
        backwards: bool = False,
        compared: Sequence[Path] = (),
        compared_runs: Sequence[Path] = (),
        compared_evals: Sequence[Path] = (),
        **spec: Any,
    ) -> tuple[Outcome, Path]:
        """Build the report of all results, given in order or `backwards`. Return its outcome and the folder of its pages."""
        self.built += 1
        work = WorkFolder(self.folder / f"work-{self.built}")
        work.start()
        others = {"compared": compared, "compared_runs": compared_runs, "compared_evals": compared_evals}
        outcome = build(ReportSpec(jobs=self.named(backwards), **spec), work, **self.files(backwards), **others)
        return outcome, work.payload


def _turn(role: str, content: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, "supervised": True}]


def _response(corpus: str, task: str, number: int, correct: bool, text: str) -> dict[str, Any]:
    return {
        "id": f"{corpus}-{task}-{number}",
        "corpus": corpus,
        "task": task,
        "prompt": f"[user] Question {number}?",
        "response": text.format(answer="7" if correct else "8"),
        "tokens": 5,
        "answer": "7",
        "found": "7" if correct else "8",
        "correct": correct,
    }
