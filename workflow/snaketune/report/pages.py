"""Which pages the report has for a config: file name → (category, caption)."""

from collections.abc import Collection

from snaketune.report.compare.side_by_side import names_of
from snaketune.stages.graph import JobGraph


def pages_of(graph: JobGraph) -> dict[str, tuple[str, str]]:
    """Pages for what the graph holds; a config without DPO gets no DPO page.

    Returns:
        By file name below `results/report/pages`: the category in Snakemake's report, and the caption's file name.
    """
    return pages_for({stage for stage, _ in graph.jobs}, compared=bool(graph.config.report.compare))


def files_to_judge(graph: JobGraph) -> list[str]:
    """Files below `results/report/pages` that are no pages, and too large for Snakemake's report."""
    asked: dict[str, tuple[str, ...]] = {
        job.name.partition("/")[0]: job.spec.conversations for job in graph.stage("eval")
    }
    return [name for names in names_of(asked).values() for name in names]


def pages_for(stages: Collection[str], compared: bool = False) -> dict[str, tuple[str, str]]:
    """The same for the stages that results are there of. Args: compared: whether runs of another time are asked for.

    >>> list(pages_for({"corpus"}))
    ['index.html', 'data.csv', 'corpus.html', 'characters.svg']
    """
    pages = {"index.html": ("Overview", "overview"), "data.csv": ("Data", "data")}
    if "corpus" in stages:
        pages |= {"corpus.html": ("Data", "corpus"), "characters.svg": ("Data", "characters")}
    if "pack" in stages:
        # How long a document is in tokens is known once it is packed.
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
