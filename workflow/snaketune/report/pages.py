"""Which pages the report has for a plan: file name → (category, caption)."""

from snaketune.config.plan import Plan


def pages_of(plan: Plan) -> dict[str, tuple[str, str]]:
    """Pages for what the plan holds; a config without DPO gets no DPO page.

    Returns:
        By file name below `results/report/pages`: the category in Snakemake's report, and the caption's file name.
    """
    stages = {stage for stage, _ in plan.jobs}
    pages = {"index.html": ("Overview", "overview"), "data.csv": ("Data", "data"), "lengths.svg": ("Data", "lengths")}
    if "pack" in stages:
        pages["packing.svg"] = ("Data", "packing")
    if "sft" in stages:
        pages["sft.svg"] = ("Training", "sft")
    if "dpo" in stages:
        pages["dpo.svg"] = ("Training", "dpo")
    if "eval" in stages:
        pages |= {
            "evaluation.csv": ("Evaluation", "evaluation"),
            "evaluation.svg": ("Evaluation", "evaluation"),
            "evaluation.json": ("Evaluation", "evaluation"),
            "samples.html": ("Evaluation", "samples"),
        }
    return pages
