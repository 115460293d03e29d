"""Distillation: the divergence on a teacher's most likely tokens, in any head, and its gradients."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from snaketune.engine.distillation import (
    LEAST,
    SCHEMA,
    Distillation,
    TeacherRows,
    divergence,
    most_likely,
    outcomes,
)
from snaketune.tables import read_table, write_table

LOSSES = ("forward_kl", "reverse_kl", "jsd")


def plain(teacher_CV, student_CV, temperature, name):
    """The divergence of whole distributions, by torch's own functions."""
    log_p, log_q = (torch.log_softmax(logits / temperature, -1) for logits in (teacher_CV, student_CV))

    def kl(of, other):
        return torch.nn.functional.kl_div(other, of, log_target=True, reduction="none").sum(-1)

    mean = ((log_p.exp() + log_q.exp()) / 2).log()
    return {
        "forward_kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "jsd": lambda: (kl(log_p, mean) + kl(log_q, mean)) / 2,
    }[name]()


def logits(seed: int, positions: int = 64, vocabulary: int = 300) -> torch.Tensor:
    return 3 * torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed))


def known(teacher_CV: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's outcomes without the rounding to 16 bits."""
    logps_CV = torch.log_softmax(teacher_CV / temperature, -1)
    top_Ck, ids_Ck = logps_CV.topk(k)
    rest_C1 = logps_CV.scatter(1, ids_Ck, -math.inf).logsumexp(1, keepdim=True).clamp(min=LEAST)
    return ids_Ck, torch.cat([top_Ck, rest_C1], 1)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_with_all_tokens_values_and_gradients_are_those_of_the_whole_distributions(name, temperature):
    teacher_CV = logits(0)
    ours_CV, theirs_CV = (logits(1).requires_grad_() for _ in range(2))
    ids_Ck, logps_CO = known(teacher_CV, teacher_CV.shape[1], temperature)
    ours_C = divergence(*outcomes(ours_CV, ids_Ck, logps_CO, temperature), name)
    theirs_C = plain(teacher_CV, theirs_CV, temperature, name)
    torch.testing.assert_close(ours_C, theirs_C, rtol=1e-5, atol=1e-5)
    ours_C.sum().backward()
    theirs_C.sum().backward()
    torch.testing.assert_close(ours_CV.grad, theirs_CV.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_fewer_tokens_give_a_lower_bound_that_rises_with_k(name):
    teacher_CV, student_CV = logits(0), logits(1)
    values = [
        divergence(*outcomes(student_CV, *known(teacher_CV, k, 1.0), 1.0), name).mean().item() for k in (1, 8, 64, 299)
    ]
    assert values == sorted(values) and values[0] < 0.8 * values[-1]
    assert values[-1] == pytest.approx(plain(teacher_CV, student_CV, 1.0, name).mean().item(), rel=1e-3)


def test_what_is_stored_is_rounded_to_16_bits_and_leaves_out_tokens_without_a_text():
    teacher_CV = logits(0)
    ids_Ck, logps_CO = most_likely(8, 1.0, vocabulary=200)(teacher_CV, 0)
    assert ids_Ck.dtype == torch.int32 and logps_CO.dtype == torch.float16 and ids_Ck.max() < 200
    whole_CV = teacher_CV.log_softmax(-1)
    expected_Ck = whole_CV[:, :200].topk(8).values
    torch.testing.assert_close(logps_CO[:, :-1].float(), expected_Ck, rtol=2**-11, atol=0)
    # The others' share is exact even where it is small.
    rest = 1 - whole_CV.gather(1, ids_Ck.long()).exp().sum(1)
    torch.testing.assert_close(logps_CO[:, -1].float().exp(), rest, rtol=5e-3, atol=1e-6)
    # Rounding changes a divergence by less than a thousandth.
    exact, stored = known(teacher_CV[:, :200], 8, 1.0), most_likely(8, 1.0, 200)(teacher_CV[:, :200], 0)
    for name in LOSSES:
        values = [
            divergence(*outcomes(logits(1, vocabulary=200), ids.long(), logps.float(), 1.0), name).mean()
            for ids, logps in (exact, stored)
        ]
        assert values[0] == pytest.approx(values[1].item(), rel=1e-3)


def test_certain_teachers_and_students_have_finite_losses_and_gradients():
    certain_CV = torch.full((2, 50), -1e4)
    certain_CV[:, 3] = 1e4
    for teacher_CV, student in ((certain_CV, torch.zeros(2, 50)), (torch.zeros(2, 50), certain_CV)):
        student_CV = student.clone().requires_grad_()
        ids_Ck, logps_CO = most_likely(4, 1.0, 50)(teacher_CV, 0)
        for name in LOSSES:
            value = divergence(*outcomes(student_CV, ids_Ck.long(), logps_CO.float(), 1.0), name).sum()
            (gradient,) = torch.autograd.grad(value, student_CV)
            assert torch.isfinite(value) and torch.isfinite(gradient).all(), name


def test_rows_are_read_as_they_were_written(tmp_path):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 50, (n, 3)).astype(np.int32) for n in (4, 0, 7)]
    logps = [rng.normal(size=(n, 4)).astype(np.float16) for n in (4, 0, 7)]
    columns = [[block.ravel() for block in blocks] for blocks in (ids, logps)]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    write_table(tmp_path / "train.arrow", pa.table(arrays, schema=SCHEMA), rows_per_batch=2)
    rows = TeacherRows(read_table(tmp_path / "train.arrow").to_batches(), 3)
    assert len(rows) == 3 and rows.blank()["teacher_logps"].shape == (0, 4)
    for number in range(3):
        row = rows.of_row(number)
        np.testing.assert_array_equal(row["teacher_ids"], ids[number])
        np.testing.assert_array_equal(row["teacher_logps"], logps[number])


def test_the_loss_is_mixed_by_weight_and_scaled_by_the_squared_temperature(monkeypatch):
    from snaketune.engine import distillation

    student_UV, targets_N, rows_N = logits(1, 5), torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([0, 1, 1, 2, 3, 4])
    ids_Uk, logps_UO = most_likely(8, 2.0, 300)(logits(0, 5), 0)
    batch = {"teacher_ids": ids_Uk, "teacher_logps": logps_UO, "source_rows": rows_N, "targets": targets_N}
    nll_N = torch.nn.functional.cross_entropy(student_UV[rows_N], targets_N, reduction="none")
    monkeypatch.setattr(distillation, "packed_values", lambda model, batch, of: (nll_N, of(student_UV, 0)))
    losses_N = Distillation(weight=0.25, temperature=2.0, loss="forward_kl").token_losses(None, batch)
    kl_U = divergence(*outcomes(student_UV, ids_Uk.long(), logps_UO.float(), 2.0), "forward_kl")
    torch.testing.assert_close(losses_N, 0.75 * nll_N + 0.25 * 4 * kl_U[rows_N])
