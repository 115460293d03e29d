"""The files of the report for a config: file name → (category, caption)."""

from collections.abc import Collection

from snaketune.report.compare.side_by_side import side_by_side_files
from snaketune.stages.graph import JobGraph


def pages_of(graph: JobGraph) -> dict[str, tuple[str, str]]:
    """The pages for the stages of the graph; a config without DPO has no DPO page.

    Returns:
        For each file name below `results/report/pages`, the category in Snakemake's report and the name of the caption file.
    """
    return pages_for({stage for stage, _ in graph.jobs}, compared=bool(graph.config.report.compare))


def judging_files(graph: JobGraph) -> list[str]:
    """The CSV files of all responses below `results/report/pages`, which are too large for Snakemake's report."""
    corpora: dict[str, tuple[str, ...]] = {
        job.name.partition("/")[0]: job.spec.conversations for job in graph.stage("eval")
    }
    return [name for names in side_by_side_files(corpora).values() for name in names]


def pages_for(stages: Collection[str], compared: bool = False) -> dict[str, tuple[str, str]]:
    """The pages for stages that have results.

    Args:
        compared: Whether `report.compare` names earlier runs.

    >>> list(pages_for({"corpus"}))
    ['index.html', 'data.csv', 'corpus.html', 'characters.svg']
    """
    pages = {"index.html": ("Overview", "overview"), "data.csv": ("Data", "data")}
    if "corpus" in stages:
        pages |= {"corpus.html": ("Data", "corpus"), "characters.svg": ("Data", "characters")}
    if "pack" in stages:
        # The length of a document in tokens is known only after packing.
        pages |= {
            "packing.html": ("Data", "rows"),
            "lengths.svg": ("Data", "lengths"),
            "packing.svg": ("Data", "packing"),
            "supervised.svg": ("Data", "supervised"),
        }
    if "sft" in stages:
        pages["sft.svg"] = ("Training", "sft")
    if "dpo" in stages:
        pages |= {
            "dpo.svg": ("Training", "dpo"),
            "variants.svg": ("Variants", "variants"),
            "variants.csv": ("Variants", "variants"),
        }
    if "eval" in stages:
        pages |= {
            "evaluation.csv": ("Evaluation", "evaluation"),
            "evaluation.svg": ("Evaluation", "evaluation"),
            "evaluation.json": ("Evaluation", "evaluation"),
            "samples.html": ("Evaluation", "samples"),
        }
    if "dpo" in stages and "eval" in stages:
        pages |= {
            "preferences.html": ("Evaluation", "preferences"),
            "preferences.svg": ("Evaluation", "distributions"),
        }
    if compared:
        pages |= {"compare.html": ("Comparison", "compare"), "compare.svg": ("Comparison", "compare")}
    return pages
