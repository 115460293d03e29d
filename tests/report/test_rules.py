"""Each rule of what is suspicious: numbers with which it speaks, numbers with which it is silent, and the key that it names."""

from dataclasses import replace

import pytest

from snaketune.report.compare.scores import Measure
from snaketune.report.compare.variants import EarlyStop, TrainingWarning
from snaketune.report.data.preflight_findings import told
from snaketune.report.judge import rules
from snaketune.report.judge.facts import BestRun, CorpusFacts, EvaluatedPrompts, PackFacts, SweptKey, TrainingFacts
from snaketune.report.judge.run_warnings import groups, steps
from snaketune.report.judge.slow_nodes import slow_nodes
from snaketune.report.judge.verdict import Difference, Verdict

RUN = TrainingFacts(
    label="dpo:a", key="dpo.a", epochs=3.0, loss=(2.0, 1.0), chosen=(-1.0, -1.05), held_out={"chat": (3.0, 1.2)}, mfu=0.4,
    gpu=True, waited=1.0, seconds=100.0, slower=2.0,
)  # fmt: skip
PACK = PackFacts(
    name="chat-512", key="sft.a.packing", split="train", unit="conversations", length=512, tokens=1000, supervised=300
)
CORPUS = CorpusFacts(name="chat", read=1000, quarantined={"not_json": 2})
ASKED = EvaluatedPrompts(
    evaluation="main", corpus="chat", model="dpo:a", prompts=100, different=98, answers=100, cut_off=3, most_tokens=64
)
SWEPT = SweptKey(key="dpo.sweep", name="beta", values=(0.1, 0.2, 0.4), best=0.2, run="dpo:b")
COLLAPSE = TrainingWarning(kind="collapse", step=20, text="is collapsing", at_end="has collapsed")

# The rule, what is otherwise than in a sound result, what it says of that, and the key that it names.
SPEAKS = [
    (rules.ended_early, RUN, {"stopped": EarlyStop(step=40, reason="kl 60")}, "step 40: kl 60", "dpo.a.training.learning_rate"),
    (rules.warned, RUN, {"warnings": (COLLAPSE,)}, "has collapsed", "dpo.a.loss"),
    (rules.loss_not_falling, RUN, {"loss": (2.0, 1.99)}, "did not fall: 2 → 1.99", "dpo.a.training.learning_rate"),
    (rules.loss_not_falling, RUN, {"loss": (2.0, 2.5)}, "rose: 2 → 2.5", "dpo.a.training.learning_rate"),
    (rules.loss_not_falling, RUN, {"loss": (-0.5, -0.4)}, "rose: -0.5 → -0.4", "dpo.a.training.learning_rate"),
    (rules.chosen_falling, RUN, {"chosen": (-1.0, -1.2)}, "-1 → -1.2 nats per token", "dpo.a.loss"),
    (rules.held_out_rising, RUN, {"held_out": {"chat": (1.0, 1.1)}}, "chat rose: 1 → 1.1", "dpo.a.training.epochs"),
    (rules.learned_by_heart, RUN, {"loss": (2.0, 0.2)}, "that of the last steps 0.2", "dpo.a.training.epochs"),
    (rules.slow_machine_use, RUN, {"mfu": 0.05}, "MFU is 5%", "dpo.a.training.micro_batch_rows"),
    (rules.slow_machine_use, RUN, {"mfu": 0.05, "measured": True}, "MFU is 5%", "dpo.a.training.batch_rows"),
    (rules.slow_machine_use, RUN, {"mfu": 0.09, "gpu": False}, "20 to 40%", "dpo.a.training.micro_batch_rows"),
    (rules.waited_for_data, RUN, {"waited": 20.0}, "20% of its time", "dpo.a.operation.load_in_memory"),
    (rules.slower_by_choice, RUN, {"slower": 35.0}, "35% slower than the best", "dpo.a.training.micro_batch_rows"),
    (rules.lost_to_length, PACK, {"lost": (0.1, 0.26, 1024)}, "26% of the tokens don't fit", "sft.a.packing.length"),
    (rules.little_supervised, PACK, {"supervised": 9}, "0.9% of the tokens", "sft.a.packing.train_on"),
    (rules.sums_of_pack, PACK, {"gaps": ("3 in, 2 out",)}, "3 in, 2 out", ""),
    (rules.sums_of_rows, CORPUS, {"gaps": ("3 in, 2 out",)}, "3 in, 2 out", ""),
    (rules.much_quarantined, CORPUS, {"quarantined": {"not_json": 9, "empty": 1}}, "(1%) are quarantined: 9 not json",
     "corpora.chat.repair"),
    (rules.repeated_prompts, ASKED, {"different": 80}, "20 of 100 held-out prompts of chat", "corpora.chat.near_duplicates"),
    (rules.cut_off, ASKED, {"cut_off": 30}, "30% of the answers of dpo:a", "eval.main.generation.max_new_tokens"),
    (rules.picked_of_many, BestRun(run="dpo:b", of=3), {"of": 12}, "the best of 12 runs", "eval"),
    (rules.best_at_the_edge, SWEPT, {"best": 0.4}, "the highest beta that was tried", "dpo.sweep.grid"),
    (rules.best_at_the_edge, SWEPT, {"best": 0.1}, "the lowest beta that was tried", "dpo.sweep.grid"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "sound", "otherwise", "said", "key"), SPEAKS)
def test_a_rule_speaks_of_what_is_wrong_and_not_of_what_is_sound(rule, sound, otherwise, said, key):
    assert rule(sound) is None
    found = rule(replace(sound, **otherwise))
    assert said in found.found
    assert found.key == key


def test_every_rule_is_tried():
    tables = (rules.OF_TRAININGS, rules.OF_PACKS, rules.OF_CORPORA, rules.OF_PROMPTS, rules.OF_SWEEPS, rules.OF_PICKED)
    assert {rule for table in tables for rule in table} == {case[0] for case in SPEAKS}


@pytest.mark.parametrize(
    ("rule", "otherwise"),
    [
        # Nothing is known.
        (rules.loss_not_falling, {"loss": None}),
        (rules.chosen_falling, {"chosen": None}),
        (rules.slow_machine_use, {"mfu": None}),
        (rules.slower_by_choice, {"slower": None}),
        (rules.waited_for_data, {"waited": None}),
        (rules.waited_for_data, {"seconds": None, "waited": 50.0}),
        # Told in another way already, or no longer so.
        (rules.loss_not_falling, {"loss": (2.0, 2.5), "stopped": EarlyStop(step=1, reason="")}),
        (rules.chosen_falling, {"chosen": (-1.0, -2.0), "warnings": (COLLAPSE,)}),
        (rules.warned, {"warnings": (replace(COLLAPSE, at_end=None),)}),
        (rules.learned_by_heart, {"loss": (2.0, 0.2), "held_out": {"chat": (1.0, 1.2)}}),
        # What one epoch can't do, and a training that didn't learn.
        (rules.learned_by_heart, {"loss": (2.0, 0.2), "epochs": 1.0}),
        (rules.held_out_rising, {"loss": (1.0, 2.0), "held_out": {"chat": (1.0, 2.0)}}),
        # A small model's share of a CPU.
        (rules.slow_machine_use, {"mfu": 0.12, "gpu": False}),
    ],
)
def test_a_rule_is_silent_where_its_numbers_mean_nothing(rule, otherwise):
    assert rule(replace(RUN, **otherwise)) is None


def test_of_held_out_rows_nothing_is_said_to_be_little_supervised():
    assert rules.little_supervised(replace(PACK, supervised=0, split="held_out")) is None


def difference(low: float, high: float, unit: str = "share") -> Difference:
    measure = Measure(
        path="conversations.chat.exact_match.share", on="chat", name="exact match", unit=unit, better=1, values={}, sizes={}
    )  # fmt: skip
    middle = (low + high) / 2
    return Difference(measure=measure, evaluation="main", before=0.5, after=0.5 + middle, rows=50, interval=(low, high))


def test_a_measure_that_got_worse_is_suspicious():
    verdict = Verdict(model="dpo:a-1", against="base:a", key="dpo.sweep", differences=[])
    found = rules.worse_than_before(difference(-0.3, -0.1), verdict)
    assert "worse than base:a: exact match of chat −20 points (−30 to −10)" in found.found
    assert found.key == "dpo.sweep.training.learning_rate"
    assert rules.worse_than_before(difference(-0.1, 0.1), verdict) is None
    assert rules.worse_than_before(difference(0.1, 0.3), verdict) is None


def test_an_evaluation_that_can_tell_nothing_is_too_small():
    verdict = Verdict(model="dpo:a", against="base:a", differences=[])
    found = rules.too_small_to_tell(difference(-0.2, 0.2), verdict)
    assert "only differences above 20 points are told from none" in found.found
    assert (found.do, found.key) == ("about 4 times as many held-out rows tell 10 points", "corpora.chat.held_out")
    for one in (difference(-0.05, 0.05), difference(0.1, 0.5), difference(-0.2, 0.2, unit="nats")):
        assert rules.too_small_to_tell(one, verdict) is None


def probed(host: str, device: str = "NVIDIA H200", processor: str = "", **figures: float) -> dict:
    return {"host": host, "device": device, "processor": processor, "probe": figures}


def test_a_run_on_a_slow_machine_is_told_with_the_figure_that_is_low():
    runs = [
        (f"sft:{n}", probed(f"node{n}", matmul_flops_per_second=7e14 + n * 1e12, disk_bytes_per_second=2e9))
        for n in range(3)
    ]
    slow = probed("node9", matmul_flops_per_second=6e14, disk_bytes_per_second=2e9)
    (found,) = slow_nodes([*runs, ("dpo:slow", slow)])
    assert found.where == "dpo:slow"
    assert found.found == (
        "this run was on a slow node: matrix products at 600 TFLOP/s, 14.4% below the median of 3 other hosts with "
        "NVIDIA H200, 701 TFLOP/s"
    )
    assert slow_nodes(runs) == []
    # A disk that was read once differs by a fifth from itself.
    other = probed("node9", matmul_flops_per_second=7e14, disk_bytes_per_second=1.6e9)
    assert slow_nodes([*runs, ("dpo:slow", other)]) == []
    (found,) = slow_nodes([*runs, ("dpo:slow", probed("node9", disk_bytes_per_second=0.5e9))])
    assert "reading the disk" in found.found


def test_a_machine_is_held_against_three_other_hosts_and_not_against_itself():
    fast, slow = {"copy_bytes_per_second": 4e12}, {"copy_bytes_per_second": 1e12}
    alone = [("sft:a", probed("one", **fast)), ("sft:b", probed("one", **fast)), ("sft:c", probed("one", **fast))]
    assert slow_nodes([*alone, ("dpo:d", probed("one", **slow))]) == []
    # However many runs are of one other host, and of two.
    assert slow_nodes([*alone, ("dpo:d", probed("two", **slow))]) == []
    assert slow_nodes([*alone, ("sft:e", probed("three", **fast)), ("dpo:d", probed("two", **slow))]) == []
    runs = [*alone, ("sft:e", probed("three", **fast)), ("sft:f", probed("four", **fast))]
    assert [one.where for one in slow_nodes([*runs, ("dpo:d", probed("two", **slow))])] == ["dpo:d"]
    # Each host counts once, however many runs it has: by runs, the median of the others would be that of a slow host.
    slow_runs = [(f"dpo:{n}", probed("two", **slow)) for n in range(9)]
    found = [one.where for one in slow_nodes([*runs, *slow_runs, ("dpo:d", probed("five", **slow))])]
    assert found == [*(label for label, _ in slow_runs), "dpo:d"]


def test_machines_of_other_kinds_are_not_held_against_each_other():
    fast, slow = {"copy_bytes_per_second": 4e12}, {"copy_bytes_per_second": 1e12}
    cards = [(f"sft:{n}", probed(f"node{n}", **fast)) for n in range(3)]
    assert slow_nodes([*cards, ("sft:b", probed("other", "NVIDIA H100", **slow))]) == []
    # CPUs by their processor; of one that isn't known, nothing can be said.
    cpus = [(f"sft:{n}", probed(f"node{n}", "cpu", "EPYC 9654", **fast)) for n in range(3)]
    for processor, slow_runs in (("EPYC 7742", []), ("", []), ("EPYC 9654", ["sft:b"])):
        found = slow_nodes([*cpus, ("sft:b", probed("other", "cpu", processor, **slow))])
        assert [one.where for one in found] == slow_runs
        assert all("with EPYC 9654" in one.found for one in found)
    unknown = [(f"sft:{n}", probed(f"node{n}", "cpu", **fast)) for n in range(3)]
    assert slow_nodes([*unknown, ("sft:b", probed("other", "cpu", **slow))]) == []
    # A figure, a probe or a host that isn't there, or is none.
    odd = [probed("other", copy_bytes_per_second="4"), {"probe": None, "device": "NVIDIA H200"}, probed("", **slow)]
    assert slow_nodes([*cards, *((f"dpo:{n}", one) for n, one in enumerate(odd))]) == []


def test_what_preflight_found_is_told_with_where_key_and_what_to_do():
    content = [
        {"severity": "stops", "where": "sft.a", "key": "sft.a.base", "found": "no \x1bweights", "do": "mend"},
        {"severity": "notes", "where": "sft.a", "key": "", "found": "small", "do": ""},
        {"severity": "unheard of", "where": "sft.a", "key": "", "found": "?", "do": ""},
    ]
    first, second = told(content)
    assert (first.where, first.key, first.found, first.do, first.severity) == (
        "sft.a", "sft.a.base", "no �weights", "mend", "warns",
    )  # fmt: skip
    assert second.severity == "notes"


def test_alike_suspicions_stand_together_and_a_step_is_told_once():
    runs = [replace(RUN, label=f"dpo:s-{n}", key="dpo.sweep", loss=(1.0, 1.0 + n), mfu=0.01) for n in range(5)]
    ended = replace(RUN, stopped=EarlyStop(step=1, reason="x"))
    found = [*map(rules.loss_not_falling, runs), rules.ended_early(ended)]
    together = groups(found)
    assert [(group.where[0], len(group.where), group.others) for group in together] == [
        ("dpo:s-0", 5, 2),
        ("dpo:a", 1, 0),
    ]
    assert [(step.key, step.because) for step in steps(found)] == [
        ("dpo.sweep.training.learning_rate", ["loss not falling"]),
        ("dpo.a.training.learning_rate", ["ended early"]),
    ]
    count_errors = [rules.sums_of_pack(replace(PACK, count_errors=(text,))) for text in "ab"]
    verdict = Verdict(model="dpo:a", against="base:a", key="dpo.a", differences=[])
    one = difference(-0.3, -0.1)
    other = replace(one, measure=replace(one.measure, name="f1"))
    worse = [rules.worse_than_before(measured, verdict) for measured in (one, other)]
    # What is said of each is told, though the step is the same.
    assert [len(groups(some)) for some in (count_errors, worse)] == [2, 2]
    assert [step.because for step in steps(worse)] == [["worse"]]
    assert steps([rules.sums_of_pack(replace(PACK, count_errors=("x",)))]) == []
