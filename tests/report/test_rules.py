"""Rules of the report: facts for which each fires, facts for which it doesn't, and the config key that it names."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from snaketune.publishing.measures import Measure
from snaketune.publishing.results import Result
from snaketune.report.data.corpus_flow import CorpusFlow
from snaketune.report.data.packing_flow import SplitFlow
from snaketune.report.judge.data_rules import (
    corpus_findings,
    difference_findings,
    pack_findings,
    prompt_findings,
    sweep_findings,
)
from snaketune.report.judge.findings import ReportFinding, groups, steps
from snaketune.report.judge.training_rules import TrainingFacts, parse_findings, slow_nodes, training_findings
from snaketune.report.judge.verdict import Difference, Verdict
from snaketune.stages.specs import ReportedJob

HEALTHY = {
    "device": "NVIDIA H200", "mfu_median": 0.4, "waited_for_data_s": 1.0, "seconds": 100.0, "slower_than_best_percent": 2.0
}  # fmt: skip


def ran(name: str = "a", config_key: str = "", **run) -> Result:
    """A DPO run whose run.json differs from a healthy one in some entries."""
    job = ReportedJob(stage="dpo", name=name, config_key=config_key)
    return Result(job=job, artifact=SimpleNamespace(manifest={}), run=HEALTHY | run)


RUN = TrainingFacts(
    run=ran(), epochs=3.0, loss=(2.0, 1.0), chosen=(-1.0, -1.05), held_out={"chat": (3.0, 1.2)}
)  # fmt: skip
COUNTS = {"read": 100, "read_tokens": 1000, "tokens": 1000, "supervised_tokens": 300}
SPLIT = SplitFlow(split="train", counts=COUNTS, metadata={"lost_to_length": {"rows": 0, "tokens": 0, "enough": 1024}})
LOST = {"metadata": {"lost_to_length": {"rows": 10, "tokens": 260, "enough": 1024}}}
LITTLE = {"counts": COUNTS | {"supervised_tokens": 9}}


def corpus(**quarantined: int) -> CorpusFlow:
    counts = {"read": 1000, "quarantined": {"total": sum(quarantined.values()), **quarantined}}
    return CorpusFlow(result=SimpleNamespace(name="chat", counts=counts))


COLLAPSE = {"kind": "collapse", "step": 20, "text": "is collapsing", "at_end": {"text": "has collapsed"}}


def of_split(split: SplitFlow) -> list[ReportFinding]:
    pack = SimpleNamespace(name="chat-512", length=512, unit="conversations", splits=[split])
    return list(pack_findings(pack, "sft.a.packing"))


@dataclass(frozen=True)
class Prompts:
    """A hundred prompts: how many of them are distinct, and how many responses reach the limit of 64 tokens."""

    distinct: int = 98
    truncated: int = 3


def of_prompts(prompts: Prompts) -> list[ReportFinding]:
    responses = [
        {
            "corpus": "chat",
            "prompt": f"p{n % prompts.distinct}",
            "correct": True,
            "tokens": 64 if n < prompts.truncated else 9,
        }
        for n in range(100)
    ]
    evaluated = SimpleNamespace(spec={"generation": {"max_new_tokens": 64}})
    scored = SimpleNamespace(model="dpo:a", responses=responses, result=evaluated)
    return list(prompt_findings(SimpleNamespace(evaluations={"main": [scored]}), ["sft:a", "dpo:a"]))


# The rules, healthy facts, changes that make one fire, its kind, a part of its message, and the key that it names.
TRAINING, DATA = (training_findings, RUN), (of_split, SPLIT)
FIRES = [
    (*TRAINING, {"run": ran(stopped={"step": 40, "reason": "kl 60"})}, "stopped early", "step 40: kl 60",
     "dpo.a.training.learning_rate"),
    (*TRAINING, {"run": ran(warnings=[COLLAPSE])}, "training warning: collapse", "has collapsed", "dpo.a.loss"),
    (*TRAINING, {"loss": (2.0, 1.99)}, "loss not falling", "did not fall: 2 → 1.99", "dpo.a.training.learning_rate"),
    (*TRAINING, {"loss": (2.0, 2.5)}, "loss not falling", "rose: 2 → 2.5", "dpo.a.training.learning_rate"),
    (*TRAINING, {"loss": (-0.5, -0.4), "held_out": {}}, "loss not falling", "rose: -0.5 → -0.4",
     "dpo.a.training.learning_rate"),
    (*TRAINING, {"chosen": (-1.0, -1.2)}, "chosen falling", "-1 → -1.2 nats per token", "dpo.a.loss"),
    (*TRAINING, {"held_out": {"chat": (1.0, 1.1)}}, "held-out loss rising", "chat rose: 1 → 1.1", "dpo.a.training.epochs"),
    (*TRAINING, {"loss": (2.0, 0.2)}, "overfitting", "training loss of the last steps 0.2", "dpo.a.training.epochs"),
    (*TRAINING, {"run": ran(mfu_median=0.05)}, "low MFU", "MFU is 5%", "dpo.a.training.micro_batch_rows"),
    (*TRAINING, {"run": ran(mfu_median=0.05, calibration={"trials": []})}, "low MFU", "MFU is 5%", "dpo.a.training.batch_rows"),
    (*TRAINING, {"run": ran(mfu_median=0.04, device="cpu")}, "low MFU", "5 to 80%", "dpo.a.training.micro_batch_rows"),
    (*TRAINING, {"run": ran(waited_for_data_s=20.0)}, "waited for data", "20% of its time", "dpo.a.operation.load_in_memory"),
    (*TRAINING, {"run": ran(slower_than_best_percent=35.0)}, "slow micro-batch", "35% slower than the best",
     "dpo.a.training.micro_batch_rows"),
    (*DATA, LOST, "tokens lost", "26% of the tokens don't fit", "sft.a.packing.length"),
    (*DATA, LOST | {"split": "held_out"}, "tokens lost", "held out: 10% of the conversations", "sft.a.packing.length"),
    (*DATA, LITTLE, "little supervised", "train: only 0.9% of the tokens", "sft.a.packing.train_on"),
    (*DATA, LITTLE | {"split": "held_out"}, "little supervised", "held out: only 0.9%", "sft.a.packing.train_on"),
    (corpus_findings, corpus(not_json=2), vars(corpus(not_json=9, empty=1)), "quarantined",
     "(1%) are quarantined: 9 not json", "corpora.chat.repair"),
    (of_prompts, Prompts(), {"distinct": 80}, "repeated prompts", "20 of 100 held-out prompts of chat",
     "corpora.chat.near_duplicates"),
    (of_prompts, Prompts(), {"truncated": 30}, "truncated responses", "30% of the responses of dpo:a",
     "eval.main.generation.max_new_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "sound", "changes", "kind", "text", "key"), FIRES)
def test_a_rule_fires_on_a_problem_and_not_on_healthy_facts(rules, sound, changes, kind, text, key):
    assert list(rules(sound)) == []
    (finding,) = (one for one in rules(replace(sound, **changes)) if one.kind == kind)
    assert text in finding.message
    assert finding.key == key


def sweep(best: float, values: tuple[float, ...], others: int = 0) -> list[ReportFinding]:
    """The findings about runs with these betas, and `others` with the first of them."""
    betas = {f"dpo:{n}": value for n, value in enumerate((*values, *values[:1] * others))}
    label = next(label for label, value in betas.items() if value == best)
    run = SimpleNamespace(label=label, key="dpo.sweep")
    scores = {one: 0.8 if one == label else 0.4 for one in betas}
    variants = SimpleNamespace(
        best=label,
        labels=sorted(betas, key=label.__ne__),
        sorted_by=SimpleNamespace(values=scores),
        keys={"beta": {one: f"{b:g}" for one, b in betas.items()}},
    )
    return list(sweep_findings(SimpleNamespace(of=lambda stage: [run]), variants))


def test_the_best_run_at_the_edge_or_of_many_is_a_finding():
    assert sweep(0.2, (0.1, 0.2, 0.4)) == []
    for best, which, further in ((0.4, "highest", "upwards: beta 0.8"), (0.1, "lowest", "downwards: beta 0.05")):
        (finding,) = sweep(best, (0.1, 0.2, 0.4))
        assert f"the {which} beta that was tried" in finding.message and further in finding.action
        # The best run is ahead of the next one by half of its score.
        assert (finding.kind, finding.key, finding.gain) == ("edge of beta", "dpo.sweep.grid", 0.5)
    (finding,) = sweep(0.2, (0.1, 0.2, 0.4), others=9)
    assert "the best of 12 runs" in finding.message
    assert (finding.kind, finding.key) == ("best of many runs", "eval")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # Missing values.
        ("loss not falling", {"loss": None}),
        ("chosen falling", {"chosen": None}),
        ("low MFU", {"run": ran(mfu_median=None)}),
        ("slow micro-batch", {"run": ran(slower_than_best_percent=None)}),
        ("waited for data", {"run": ran(waited_for_data_s=None)}),
        ("waited for data", {"run": ran(seconds=None, waited_for_data_s=50.0)}),
        # Reported by another rule, or resolved by the end.
        ("loss not falling", {"loss": (2.0, 2.5), "run": ran(stopped={"step": 1, "reason": ""})}),
        ("chosen falling", {"chosen": (-1.0, -2.0), "run": ran(warnings=[COLLAPSE])}),
        ("training warning", {"run": ran(warnings=[COLLAPSE | {"at_end": None}])}),
        ("overfitting", {"loss": (2.0, 0.2), "held_out": {"chat": (1.0, 1.2)}}),
        # A single epoch doesn't overfit; nor does a training that didn't learn.
        ("overfitting", {"loss": (2.0, 0.2), "epochs": 1.0}),
        ("held-out loss rising", {"loss": (1.0, 2.0), "held_out": {"chat": (1.0, 2.0)}}),
        # Usual for a small model on a CPU.
        ("low MFU", {"run": ran(mfu_median=0.06, device="cpu")}),
    ],
)
def test_a_rule_does_not_fire_without_meaningful_values(kind, changes):
    assert not [one for one in training_findings(replace(RUN, **changes)) if one.kind.startswith(kind)]


def difference(low: float, high: float, unit: str = "share") -> Difference:
    measure = Measure(
        path="conversations.chat.exact_match.share", on="chat", name="exact match", unit=unit, better=1, values={}
    )  # fmt: skip
    middle = (low + high) / 2
    return Difference(measure=measure, evaluation="main", before=0.5, after=0.5 + middle, rows=50, interval=(low, high))


def test_a_worse_measure_is_a_finding():
    verdict = Verdict(model="dpo:a-1", against="base:a", key="dpo.sweep", differences=[])
    (finding,) = difference_findings(difference(-0.3, -0.1), verdict)
    assert "worse than base:a: exact match of chat −20 points (−30 to −10)" in finding.message
    assert finding.key == "dpo.sweep.training.learning_rate"
    assert list(difference_findings(difference(-0.1, 0.1), verdict)) == []
    assert list(difference_findings(difference(0.1, 0.3), verdict)) == []


def test_an_inconclusive_evaluation_is_too_small():
    verdict = Verdict(model="dpo:a", against="base:a", differences=[])
    (finding,) = difference_findings(difference(-0.2, 0.2), verdict)
    assert "only differences above 20 points are significant" in finding.message
    assert (finding.action, finding.key) == (
        "hold out about 4 times as many rows to detect 10 points",
        "corpora.chat.held_out",
    )
    for one in (difference(-0.05, 0.05), difference(0.1, 0.5), difference(-0.2, 0.2, unit="nats")):
        assert list(difference_findings(one, verdict)) == []


def probed(host: str, device: str = "NVIDIA H200", processor: str = "", **figures: float) -> dict:
    return {"host": host, "device": device, "processor": processor, "probe": figures}


def test_a_run_on_a_slow_host_is_reported_with_the_slow_figure():
    runs = [
        (f"sft:{n}", probed(f"node{n}", matmul_flops_per_second=7e14 + n * 1e12, disk_bytes_per_second=2e9))
        for n in range(3)
    ]
    slow = probed("node9", matmul_flops_per_second=6e14, disk_bytes_per_second=2e9)
    (finding,) = slow_nodes([*runs, ("dpo:slow", slow)])
    assert finding.where == "dpo:slow"
    assert finding.message == (
        "ran on a slow node: matrix multiplication at 600 TFLOP/s, 14.4% below the median of 3 other hosts with "
        "NVIDIA H200, 701 TFLOP/s"
    )
    assert slow_nodes(runs) == []
    # Single disk reads of one host vary by a fifth.
    other = probed("node9", matmul_flops_per_second=7e14, disk_bytes_per_second=1.6e9)
    assert slow_nodes([*runs, ("dpo:slow", other)]) == []
    (finding,) = slow_nodes([*runs, ("dpo:slow", probed("node9", disk_bytes_per_second=0.5e9))])
    assert "disk read" in finding.message


def test_a_host_is_compared_with_at_least_three_others_and_not_with_itself():
    fast, slow = {"copy_bytes_per_second": 4e12}, {"copy_bytes_per_second": 1e12}
    alone = [("sft:a", probed("one", **fast)), ("sft:b", probed("one", **fast)), ("sft:c", probed("one", **fast))]
    assert slow_nodes([*alone, ("dpo:d", probed("one", **slow))]) == []
    # One or two other hosts aren't enough, however many runs they have.
    assert slow_nodes([*alone, ("dpo:d", probed("two", **slow))]) == []
    assert slow_nodes([*alone, ("sft:e", probed("three", **fast)), ("dpo:d", probed("two", **slow))]) == []
    runs = [*alone, ("sft:e", probed("three", **fast)), ("sft:f", probed("four", **fast))]
    assert [one.where for one in slow_nodes([*runs, ("dpo:d", probed("two", **slow))])] == ["dpo:d"]
    # Each host counts once, however many runs it has: by runs, the median of the others would be that of a slow host.
    slow_runs = [(f"dpo:{n}", probed("two", **slow)) for n in range(9)]
    finding = [one.where for one in slow_nodes([*runs, *slow_runs, ("dpo:d", probed("five", **slow))])]
    assert finding == [*(label for label, _ in slow_runs), "dpo:d"]


def test_hosts_with_different_devices_are_not_compared():
    fast, slow = {"copy_bytes_per_second": 4e12}, {"copy_bytes_per_second": 1e12}
    cards = [(f"sft:{n}", probed(f"node{n}", **fast)) for n in range(3)]
    assert slow_nodes([*cards, ("sft:b", probed("other", "NVIDIA H100", **slow))]) == []
    # CPUs are compared by processor; an unknown processor isn't compared.
    cpus = [(f"sft:{n}", probed(f"node{n}", "cpu", "EPYC 9654", **fast)) for n in range(3)]
    for processor, slow_runs in (("EPYC 7742", []), ("", []), ("EPYC 9654", ["sft:b"])):
        finding = slow_nodes([*cpus, ("sft:b", probed("other", "cpu", processor, **slow))])
        assert [one.where for one in finding] == slow_runs
        assert all("with EPYC 9654" in one.message for one in finding)
    unknown = [(f"sft:{n}", probed(f"node{n}", "cpu", **fast)) for n in range(3)]
    assert slow_nodes([*unknown, ("sft:b", probed("other", "cpu", **slow))]) == []
    # A missing or invalid figure, probe or host.
    odd = [probed("other", copy_bytes_per_second="4"), {"probe": None, "device": "NVIDIA H200"}, probed("", **slow)]
    assert slow_nodes([*cards, *((f"dpo:{n}", one) for n, one in enumerate(odd))]) == []


def test_preflight_findings_have_location_key_and_action():
    content = [
        {"severity": "stops", "where": "sft.a", "key": "sft.a.base", "found": "no \x1bweights", "do": "mend"},
        {"severity": "notes", "where": "sft.a", "key": "", "found": "small", "do": ""},
        {"severity": "unheard of", "where": "sft.a", "key": "", "found": "?", "do": ""},
    ]
    first, second = parse_findings(content)
    assert (first.where, first.key, first.message, first.action, first.severity) == (
        "sft.a", "sft.a.base", "no �weights", "mend", "warns",
    )  # fmt: skip
    assert second.severity == "notes"


def test_equal_findings_are_grouped_and_steps_are_not_repeated():
    swept = [ran(name=f"s-{n}", config_key="dpo.sweep", mfu_median=0.01) for n in range(5)]
    runs = [replace(RUN, run=run, loss=(1.0, 1.0 + n)) for n, run in enumerate(swept)]
    ended = replace(RUN, run=ran(stopped={"step": 1, "reason": "x"}))
    # One rule's findings at a time.
    found = [one for run in (*runs, ended) for one in training_findings(run)]
    finding = [one for one in found if one.kind in ("loss not falling", "stopped early")]
    grouped = groups(finding)
    assert [(group.where[0], len(group.where), group.unnamed) for group in grouped] == [
        ("dpo:s-0", 5, 2),
        ("dpo:a", 1, 0),
    ]
    assert [(step.key, step.reasons) for step in steps(finding)] == [
        ("dpo.sweep.training.learning_rate", ["loss not falling"]),
        ("dpo.a.training.learning_rate", ["stopped early"]),
    ]
    verdict = Verdict(model="dpo:a", against="base:a", key="dpo.a", differences=[])
    one = difference(-0.3, -0.1)
    other = replace(one, measure=replace(one.measure, name="f1"))
    worse = [found for measured in (one, other) for found in difference_findings(measured, verdict)]
    # Different messages stay separate, though the step is the same.
    assert len(groups(worse)) == 2
    assert [step.reasons for step in steps(worse)] == [["worse"]]
    assert steps([ReportFinding(kind="x", where="a", message="nothing to do")]) == []
