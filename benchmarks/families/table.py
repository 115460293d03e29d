"""The table of families as Markdown."""

from benchmarks.families.examine import ROUNDING, Outcome

from snaketune.models.packing_support import ALTERNATIVES

HEAD = """# Models

Which causal language models of transformers can be trained on packed rows: tiny random models of each family through the
package's own functions, float32 on the CPU. Made with torch {torch} and transformers {transformers} by

    make families

`right`: losses and gradients of packed rows equal those of every sequence run alone (within {rounding:.0e} of the largest).
`refused`: the run stops before anything is trained, with the reason given here ({instead}).
Evaluation runs a refused model one sequence at a time. The last column is a step of training, a checkpoint read back into
another model, a model folder read back, and a vocabulary that grows.

{counts}

| family | packed sft | dpo, shared prompts | step, checkpoint, folder | reason |
|---|---|---|---|---|
"""


def as_markdown(outcomes: list[Outcome], versions: dict[str, str]) -> str:
    """The whole page."""
    made = [found for found in outcomes if found.sft]
    both = sum(found.sft == found.dpo == "right" for found in made)
    sft_only = sum(found.sft == "right" and found.dpo != "right" for found in made)
    counts = (
        f"{len(outcomes)} families: {both} right in both, {sft_only} right in sft alone, "
        f"{sum(found.sft == 'refused' for found in made)} refused, {len(outcomes) - len(made)} not examined."
    )
    head = HEAD.format(**versions, rounding=ROUNDING, instead=ALTERNATIVES, counts=counts)
    lines = [_line(found) for found in sorted(made, key=lambda found: found.family)]
    missing = [f"- {found.family}: {_short(found.reason)}" for found in outcomes if not found.sft]
    tail = "\nNot examined, since no tiny model could be made of the default config:\n\n" if missing else ""
    return head + "\n".join(lines) + "\n" + tail + "\n".join(missing) + ("\n" if missing else "")


def _line(found: Outcome) -> str:
    cells = (found.family, found.sft, found.dpo, found.trained, _short(found.reason))
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _short(reason: str) -> str:
    """Without what every row would say again."""
    for repeated in (f". {ALTERNATIVES}", "not made: "):
        reason = reason.replace(repeated, "")
    return reason.split(" doesn't support packed rows: ")[-1]
