"""Checks for learning rates and batch sizes that are probably mistakes."""

from typing import Any

from snaketune.config.optimizers import OPTIMIZERS
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun

# Highest and lowest plausible learning rates of Adam-like optimizers, by kind of rows and of model. A model from scratch needs
# more than a pretrained one; preference losses move weights further than next-token prediction. Published recipes are well
# within: full SFT 1e-6 to 1e-4, LoRA 1e-5 to 5e-4, DPO 1e-7 to 5e-6 full and up to 5e-5 with adapters.
HIGHEST = {
    ("sft", "scratch"): 3e-2,
    ("sft", "full"): 3e-4,
    ("sft", "lora"): 3e-3,
    ("preference", "scratch"): 3e-3,
    ("preference", "full"): 5e-5,
    ("preference", "lora"): 1e-3,
}
LOWEST = 1e-8
FEWEST_STEPS = 10


def check_hyperparameters(run: PreflightRun, pretrained: bool, pack: dict[str, Any]) -> list[Finding]:
    """Return findings on optimization settings far from those that such runs usually have.

    Args:
        pretrained: whether the family starts from pretrained weights.
        pack: manifest of its rows.
    """
    training, findings = run.run.training, []
    how = "lora" if run.run.lora else "full" if pretrained else "scratch"
    highest = HIGHEST["sft" if run.kind == "sft" else "preference", how]
    if OPTIMIZERS[training.optimizer].betas and not LOWEST <= training.learning_rate <= highest:
        what = {"lora": "adapters", "full": "all weights of a pretrained model", "scratch": "a model from scratch"}[how]
        of = "conversations or text" if run.kind == "sft" else "preferences"
        findings.append(
            Finding(
                key=f"{run.key}.training.learning_rate",
                problem=f"{training.learning_rate:g}, while {what} usually train on {of} with {LOWEST:g} to {highest:g}",
                do="check the exponent; ignore this if it is intended",
                certain=False,
            )
        )
    rows = pack.get("packing_metadata", {}).get("rows") or pack["counts"]["train"].get("kept", 0)
    steps = training.epochs * rows / training.batch_rows
    if rows and steps < FEWEST_STEPS:
        findings.append(
            Finding(
                key=f"{run.key}.training.batch_rows",
                problem=f"{training.batch_rows} rows a step make {max(1, round(steps))} steps of {rows:,} rows, too few to "
                "train with",
                do="lower batch_rows, or raise epochs",
                certain=False,
            )
        )
    return findings
