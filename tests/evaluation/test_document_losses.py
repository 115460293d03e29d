"""Losses of single documents: sums by document, and coverage of intervals."""

import random

import torch

from snaketune.evaluation.held_out import LOSSES, by_document, loss_table
from snaketune.evaluation.score_intervals import per_token, per_token_interval
from snaketune.report.judge.verdict import paired_per_token

LOSS_N = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


def test_documents_have_the_same_numbers_for_any_batch_size():
    # The second of five documents has no supervised tokens.
    whole = by_document(LOSS_N, torch.tensor([0, 0, 2, 3, 4]), 5)
    halves = by_document(LOSS_N[:2], torch.tensor([0, 0]), 2), by_document(LOSS_N[2:], torch.tensor([0, 1, 2]), 3)
    assert tuple(one + other for one, other in zip(*halves)) == whole
    table = loss_table("chat", *whole)
    assert table.to_pylist() == [
        {"corpus": "chat", "document": number, "loss_nats": loss, "tokens": tokens}
        for number, loss, tokens in ((0, 3.0, 2), (2, 4.0, 1), (3, 8.0, 1), (4, 16.0, 1))
    ]
    assert table.schema == loss_table("empty", [], []).schema == LOSSES and not len(loss_table("empty", [], []))


def drawn(draw: random.Random, documents: int, gain: float) -> tuple[dict, dict]:
    """Losses of two models on documents of random lengths and difficulties; the second is better by `gain` per token."""
    before, after = {}, {}
    for number in range(documents):
        tokens = draw.randint(5, 200)
        hard, better = draw.gauss(2, 0.5), draw.gauss(gain, 0.1)
        before["rows", number] = hard * tokens, tokens
        after["rows", number] = (hard - better) * tokens, tokens
    return before, after


def test_the_interval_of_a_difference_has_its_coverage_and_is_narrower_than_that_of_a_loss():
    draw, held, narrower = random.Random(0), 0, 0
    for _ in range(1000):
        before, after = drawn(draw, 30, 0.05)
        low, high = paired_per_token(before, after)
        held += low <= -0.05 <= high
        own = per_token_interval(*zip(*before.values()))
        narrower += high - low < own[1] - own[0]
    assert 0.92 <= held / 1000 <= 0.97
    assert narrower > 990


def test_different_documents_give_no_difference():
    before, after = drawn(random.Random(0), 30, 0.05)
    assert paired_per_token(before, {("others", number): value for (_, number), value in after.items()}) is None
    longer = {position: (loss, tokens + 1) for position, (loss, tokens) in after.items()}
    assert paired_per_token(before, longer) is None
    few = {position: before[position] for position in list(before)[:4]}
    assert paired_per_token(few, after) is None and per_token(*zip(*few.values()))[1] is None
    # A model's difference from itself is 0, and so is the width of its interval.
    assert paired_per_token(before, before) == (0.0, 0.0)
