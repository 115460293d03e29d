"""The files of the report for a config: file name → (category, caption)."""

from collections.abc import Collection

from snaketune.stages.graph import JobGraph

# Stages that must have results, and for each file of the report its category in Snakemake's report and its caption.
PAGES: tuple[tuple[set[str], dict[str, tuple[str, str]]], ...] = (
    (set(), {"index.html": ("Overview", "overview")}),
    ({"corpus"}, {"corpus.html": ("Data", "corpus")}),
    ({"pack"}, {"packing.html": ("Data", "rows")}),
    ({"dpo"}, {"variants.csv": ("Variants", "variants")}),
    (
        {"eval"},
        {
            "evaluation.csv": ("Evaluation", "evaluation"),
            "samples.html": ("Evaluation", "samples"),
            "answers.csv": ("Evaluation", "samples"),
        },
    ),
    ({"dpo", "eval"}, {"preferences.html": ("Evaluation", "preferences")}),
)


def pages_of(graph: JobGraph) -> dict[str, tuple[str, str]]:
    """The pages for the stages of the graph; a config without DPO has no DPO page.

    Returns:
        For each file name below `results/report/pages`, the category in Snakemake's report and the name of the caption file.
    """
    return pages_for({job.stage for job in graph.job("report", "").artifacts["results"]})


def pages_for(stages: Collection[str]) -> dict[str, tuple[str, str]]:
    """The pages for stages that have results.

    >>> list(pages_for({"corpus"}))
    ['index.html', 'corpus.html']
    """
    return {name: about for needed, group in PAGES if needed <= {*stages} for name, about in group.items()}
