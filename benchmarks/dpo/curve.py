"""The losses of the first steps on both sides: the same pairs in each step, the same weights, float32."""

from typing import Any

from benchmarks.dpo.material import Material, make_reference
from benchmarks.dpo.speed import MODULE, write_arguments
from benchmarks.processes import measured, one_core


def curve(material: Material, name: str, steps: int) -> dict[str, Any]:
    """Return the largest difference of losses over the first steps; TRL gets the same pairs in each step."""
    make_reference(material, name)
    with one_core():
        # Enough epochs for one step more than is run.
        arguments = write_arguments(material, {"run": name, "steps": steps, "epochs": steps + 1, "log_steps": 1})
        ours = measured(MODULE, "snaketune", material.folder, arguments)
        order = ours["order"][:steps]
        arguments = write_arguments(
            material, {"run": name, "order": order, "batch_size": 1, "reference_batch_size": 8, "exactly": True}
        )
        theirs = measured(MODULE, "trl", material.folder, arguments)
    if not len(ours["losses"]) == len(theirs["losses"]) == steps:
        raise SystemExit(f"{len(ours['losses'])} and {len(theirs['losses'])} steps, expected {steps}")
    differences = [abs(one - other) for one, other in zip(ours["losses"], theirs["losses"], strict=True)]
    return {
        "curve_max_abs_diff_vs_trl": max(differences),
        "data": name,
        "pairs_by_step": [len(step) for step in order],
        "losses": {"snaketune": ours["losses"], "trl": theirs["losses"]},
    }
