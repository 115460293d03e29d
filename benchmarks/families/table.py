"""The table of families as Markdown."""

from benchmarks.families.examine import ROUNDING, Outcome

from snaketune.models.packing_support import ALTERNATIVES

HEAD = """# Models

This table shows which causal language models of transformers can be trained on packed rows. A tiny random model of each
family was tested with the package's own functions, in float32 on a CPU, with torch {torch} and transformers {transformers}, by

    make families

- `right`: losses and gradients of packed rows equal those of each sequence run alone (within {rounding:.0e} of the largest).
- `refused`: the run stops before training, with the reason given here ({instead}). Evaluation runs a refused model one sequence
  at a time.
- The fourth column tests a training step, reading a checkpoint into another model, reading a model folder, and resizing the
  vocabulary.

{counts}

| family | packed sft | dpo, shared prompts | step, checkpoint, folder | reason |
|---|---|---|---|---|
"""


def as_markdown(outcomes: list[Outcome], versions: dict[str, str]) -> str:
    """Return the page as Markdown."""
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
    tail = "\nNot examined, because no tiny model could be made from the default config:\n\n" if missing else ""
    return head + "\n".join(lines) + "\n" + tail + "\n".join(missing) + ("\n" if missing else "")


def _line(found: Outcome) -> str:
    cells = (found.family, found.sft, found.dpo, found.trained, _short(found.reason))
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _short(reason: str) -> str:
    """Shorten a message by what all rows have in common."""
    for repeated in (f". {ALTERNATIVES}", "not made: "):
        reason = reason.replace(repeated, "")
    return reason.split(" doesn't support packed rows: ")[-1]
