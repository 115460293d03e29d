"""Rules of the report: facts for which each fires, facts for which it doesn't, and the config key that it names."""

from dataclasses import replace

import pytest

from snaketune.report.compare.scores import Measure
from snaketune.report.compare.variants import EarlyStop, TrainingWarning
from snaketune.report.data.preflight_findings import parse_findings
from snaketune.report.judge import rules
from snaketune.report.judge.all_findings import groups, steps
from snaketune.report.judge.facts import BestRun, CorpusFacts, EvaluatedPrompts, PackFacts, SweptKey, TrainingFacts
from snaketune.report.judge.slow_nodes import slow_nodes
from snaketune.report.judge.verdict import Difference, Verdict

RUN = TrainingFacts(
    label="dpo:a", key="dpo.a", epochs=3.0, loss=(2.0, 1.0), chosen=(-1.0, -1.05), held_out={"chat": (3.0, 1.2)}, mfu=0.4,
    gpu=True, waited_s=1.0, seconds=100.0, slowdown_percent=2.0,
)  # fmt: skip
PACK = PackFacts(
    name="chat-512", key="sft.a.packing", split="train", unit="conversations", length=512, tokens=1000, supervised=300
)
CORPUS = CorpusFacts(name="chat", read=1000, quarantined={"not_json": 2})
PROMPTS = EvaluatedPrompts(
    evaluation="main",
    corpus="chat",
    model="dpo:a",
    prompts=100,
    distinct=98,
    answers=100,
    truncated=3,
    max_new_tokens=64,
)
SWEPT = SweptKey(key="dpo.sweep", name="beta", values=(0.1, 0.2, 0.4), best=0.2, run="dpo:b")
COLLAPSE = TrainingWarning(kind="collapse", step=20, text="is collapsing", at_end="has collapsed")

# The rule, healthy facts, changes that make it fire, a part of its message, and the key that it names.
FIRES = [
    (rules.ended_early, RUN, {"stopped": EarlyStop(step=40, reason="kl 60")}, "step 40: kl 60", "dpo.a.training.learning_rate"),
    (rules.training_warning, RUN, {"warnings": (COLLAPSE,)}, "has collapsed", "dpo.a.loss"),
    (rules.loss_not_falling, RUN, {"loss": (2.0, 1.99)}, "did not fall: 2 → 1.99", "dpo.a.training.learning_rate"),
    (rules.loss_not_falling, RUN, {"loss": (2.0, 2.5)}, "rose: 2 → 2.5", "dpo.a.training.learning_rate"),
    (rules.loss_not_falling, RUN, {"loss": (-0.5, -0.4)}, "rose: -0.5 → -0.4", "dpo.a.training.learning_rate"),
    (rules.chosen_falling, RUN, {"chosen": (-1.0, -1.2)}, "-1 → -1.2 nats per token", "dpo.a.loss"),
    (rules.held_out_rising, RUN, {"held_out": {"chat": (1.0, 1.1)}}, "chat rose: 1 → 1.1", "dpo.a.training.epochs"),
    (rules.overfitted, RUN, {"loss": (2.0, 0.2)}, "training loss of the last steps 0.2", "dpo.a.training.epochs"),
    (rules.low_mfu, RUN, {"mfu": 0.05}, "MFU is 5%", "dpo.a.training.micro_batch_rows"),
    (rules.low_mfu, RUN, {"mfu": 0.05, "calibrated": True}, "MFU is 5%", "dpo.a.training.batch_rows"),
    (rules.low_mfu, RUN, {"mfu": 0.09, "gpu": False}, "20 to 40%", "dpo.a.training.micro_batch_rows"),
    (rules.waited_for_data, RUN, {"waited_s": 20.0}, "20% of its time", "dpo.a.operation.load_in_memory"),
    (rules.slow_micro_batch, RUN, {"slowdown_percent": 35.0}, "35% slower than the best", "dpo.a.training.micro_batch_rows"),
    (rules.lost_to_length, PACK, {"lost_to_length": (0.1, 0.26, 1024)}, "26% of the tokens don't fit", "sft.a.packing.length"),
    (rules.little_supervised, PACK, {"supervised": 9}, "0.9% of the tokens", "sft.a.packing.train_on"),
    (rules.pack_count_errors, PACK, {"count_errors": ("3 in, 2 out",)}, "3 in, 2 out", ""),
    (rules.corpus_count_errors, CORPUS, {"count_errors": ("3 in, 2 out",)}, "3 in, 2 out", ""),
    (rules.much_quarantined, CORPUS, {"quarantined": {"not_json": 9, "empty": 1}}, "(1%) are quarantined: 9 not json",
     "corpora.chat.repair"),
    (rules.repeated_prompts, PROMPTS, {"distinct": 80}, "20 of 100 held-out prompts of chat", "corpora.chat.near_duplicates"),
    (rules.truncated_answers, PROMPTS, {"truncated": 30}, "30% of the responses of dpo:a",
     "eval.main.generation.max_new_tokens"),
    (rules.best_of_many_runs, BestRun(run="dpo:b", candidates=3), {"candidates": 12}, "the best of 12 runs", "eval"),
    (rules.best_at_the_edge, SWEPT, {"best": 0.4}, "the highest beta that was tried", "dpo.sweep.grid"),
    (rules.best_at_the_edge, SWEPT, {"best": 0.1}, "the lowest beta that was tried", "dpo.sweep.grid"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sound", "changes", "text", "key"), FIRES)
def test_a_rule_fires_on_a_problem_and_not_on_healthy_facts(rule, sound, changes, text, key):
    assert rule(sound) is None
    finding = rule(replace(sound, **changes))
    assert text in finding.message
    assert finding.key == key


def test_every_rule_is_tested():
    tables = (
        rules.TRAINING_RULES,
        rules.PACK_RULES,
        rules.CORPUS_RULES,
        rules.PROMPT_RULES,
        rules.SWEEP_RULES,
        rules.BEST_RUN_RULES,
    )
    assert {rule for table in tables for rule in table} == {case[0] for case in FIRES}


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        # Missing values.
        (rules.loss_not_falling, {"loss": None}),
        (rules.chosen_falling, {"chosen": None}),
        (rules.low_mfu, {"mfu": None}),
        (rules.slow_micro_batch, {"slowdown_percent": None}),
        (rules.waited_for_data, {"waited_s": None}),
        (rules.waited_for_data, {"seconds": None, "waited_s": 50.0}),
        # Reported by another rule, or resolved by the end.
        (rules.loss_not_falling, {"loss": (2.0, 2.5), "stopped": EarlyStop(step=1, reason="")}),
        (rules.chosen_falling, {"chosen": (-1.0, -2.0), "warnings": (COLLAPSE,)}),
        (rules.training_warning, {"warnings": (replace(COLLAPSE, at_end=None),)}),
        (rules.overfitted, {"loss": (2.0, 0.2), "held_out": {"chat": (1.0, 1.2)}}),
        # A single epoch doesn't overfit; nor does a training that didn't learn.
        (rules.overfitted, {"loss": (2.0, 0.2), "epochs": 1.0}),
        (rules.held_out_rising, {"loss": (1.0, 2.0), "held_out": {"chat": (1.0, 2.0)}}),
        # Usual for a small model on a CPU.
        (rules.low_mfu, {"mfu": 0.12, "gpu": False}),
    ],
)
def test_a_rule_does_not_fire_without_meaningful_values(rule, changes):
    assert rule(replace(RUN, **changes)) is None


def test_little_supervised_ignores_held_out_rows():
    assert rules.little_supervised(replace(PACK, supervised=0, split="held_out")) is None


def difference(low: float, high: float, unit: str = "share") -> Difference:
    measure = Measure(
        path="conversations.chat.exact_match.share", on="chat", name="exact match", unit=unit, better=1, values={}, sizes={}
    )  # fmt: skip
    middle = (low + high) / 2
    return Difference(measure=measure, evaluation="main", before=0.5, after=0.5 + middle, rows=50, interval=(low, high))


def test_a_worse_measure_is_a_finding():
    verdict = Verdict(model="dpo:a-1", against="base:a", key="dpo.sweep", differences=[])
    finding = rules.worse_than_before(difference(-0.3, -0.1), verdict)
    assert "worse than base:a: exact match of chat −20 points (−30 to −10)" in finding.message
    assert finding.key == "dpo.sweep.training.learning_rate"
    assert rules.worse_than_before(difference(-0.1, 0.1), verdict) is None
    assert rules.worse_than_before(difference(0.1, 0.3), verdict) is None


def test_an_inconclusive_evaluation_is_too_small():
    verdict = Verdict(model="dpo:a", against="base:a", differences=[])
    finding = rules.too_few_rows(difference(-0.2, 0.2), verdict)
    assert "only differences above 20 points are significant" in finding.message
    assert (finding.action, finding.key) == (
        "hold out about 4 times as many rows to detect 10 points",
        "corpora.chat.held_out",
    )
    for one in (difference(-0.05, 0.05), difference(0.1, 0.5), difference(-0.2, 0.2, unit="nats")):
        assert rules.too_few_rows(one, verdict) is None


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
    runs = [replace(RUN, label=f"dpo:s-{n}", key="dpo.sweep", loss=(1.0, 1.0 + n), mfu=0.01) for n in range(5)]
    ended = replace(RUN, stopped=EarlyStop(step=1, reason="x"))
    finding = [*map(rules.loss_not_falling, runs), rules.ended_early(ended)]
    grouped = groups(finding)
    assert [(group.where[0], len(group.where), group.unnamed) for group in grouped] == [
        ("dpo:s-0", 5, 2),
        ("dpo:a", 1, 0),
    ]
    assert [(step.key, step.reasons) for step in steps(finding)] == [
        ("dpo.sweep.training.learning_rate", ["loss not falling"]),
        ("dpo.a.training.learning_rate", ["stopped early"]),
    ]
    count_errors = [rules.pack_count_errors(replace(PACK, count_errors=(text,))) for text in "ab"]
    verdict = Verdict(model="dpo:a", against="base:a", key="dpo.a", differences=[])
    one = difference(-0.3, -0.1)
    other = replace(one, measure=replace(one.measure, name="f1"))
    worse = [rules.worse_than_before(measured, verdict) for measured in (one, other)]
    # Different messages stay separate, though the step is the same.
    assert [len(groups(some)) for some in (count_errors, worse)] == [2, 2]
    assert [step.reasons for step in steps(worse)] == [["worse"]]
    assert steps([rules.pack_count_errors(replace(PACK, count_errors=("x",)))]) == []
