"""What a teacher's k most likely tokens and 16-bit log-probabilities lose of the divergence from a student: on held-out rows,
after `snakemake --configfile config/recipes/distill.yaml`.

    PYTHONPATH=workflow:. python -m benchmarks.teacher results/sft/large/model results/sft/taught-all/model results/pack/NAME
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

from snaketune.engine.distillation import divergence, most_likely, outcomes
from snaketune.engine.model.batches import collate
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.model.forward import packed_values
from snaketune.engine.model.selftest import self_test
from snaketune.packing.reader import open_rows
from snaketune.stages.job import result_at

KS = (1, 2, 4, 8, 16, 32, 64, 128)


@torch.no_grad()
def main(teacher: str, student: str, pack: str) -> None:
    rows = open_rows(result_at(Path(pack) / "manifest.json"), "held_out")
    logits = []
    for path in (teacher, student):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        compute = self_test(model, [rows], resolve_compute("float32"), training=False).compute
        batches = (collate([rows[number]], compute.kernel) for number in range(len(rows)))
        values = [packed_values(model, batch, lambda logits_CV, begin: (logits_CV,))[1][0] for batch in batches]
        logits.append(torch.cat(values))
    teacher_NV, student_NV = logits
    log_p, log_q = teacher_NV.log_softmax(-1), student_NV.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))

    def kl(of: torch.Tensor, other: torch.Tensor) -> float:
        return kl_div(other, of, log_target=True, reduction="none").sum(-1).mean().item()

    full = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jsd": (kl(log_p, log_m) + kl(log_q, log_m)) / 2,
    }
    print(f"{len(teacher_NV)} tokens, vocabulary {teacher_NV.shape[1]}; nats per token")
    print(
        "| k | bytes per token | " + " | ".join(full) + " | changed by 16 bits |\n|---|---|" + "---|" * (len(full) + 1)
    )
    for k in KS:
        ids, rounded = most_likely(k, 1.0, teacher_NV.shape[1])(teacher_NV, 0)
        top = log_p.gather(1, ids.long())
        rest = log_p.scatter(1, ids.long(), float("-inf")).logsumexp(1, keepdim=True)
        exact = torch.cat([top, rest], 1)
        found, change = [], 0.0
        for name, whole in full.items():
            value, stored = (
                divergence(*outcomes(student_NV, ids.long(), logps, 1.0), name).mean().item()
                for logps in (exact, rounded.float())
            )
            found.append(f"{value:.5f} ({value / whole:.1%})")
            change = max(change, abs(stored - value) / whole)
        print(f"| {k} | {6 * k + 2} | " + " | ".join(found) + f" | {change:.1e} |")
    print("| V | | " + " | ".join(f"{value:.5f}" for value in full.values()) + " | |")


if __name__ == "__main__":
    main(*sys.argv[1:])
