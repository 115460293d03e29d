"""The files of the report for a config: file name → (category, caption)."""

from collections.abc import Collection, Iterable, Mapping

from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job

# For human evaluation, of each corpus of an evaluation.
JUDGING = ("side_by_side", "blind", "key")
# Stages that must have results, and for each file of the report its category in Snakemake's report and its caption.
PAGES: tuple[tuple[set[str], dict[str, tuple[str, str]]], ...] = (
    (set(), {"index.html": ("Overview", "overview"), "data.csv": ("Data", "data")}),
    ({"corpus"}, {"corpus.html": ("Data", "corpus")}),
    ({"pack"}, {"packing.html": ("Data", "rows")}),
    ({"dpo"}, {"variants.csv": ("Variants", "variants")}),
    (
        {"eval"},
        {
            "evaluation.csv": ("Evaluation", "evaluation"),
            "evaluation.json": ("Evaluation", "evaluation"),
            "samples.html": ("Evaluation", "samples"),
        },
    ),
    ({"sample"}, {"sampling.html": ("Sampling", "sampling")}),
    ({"dpo", "eval"}, {"preferences.html": ("Evaluation", "preferences")}),
)


def pages_of(graph: JobGraph) -> dict[str, tuple[str, str]]:
    """The pages for the stages of the graph; a config without DPO has no DPO page.

    Returns:
        For each file name below `results/report/pages`, the category in Snakemake's report and the name of the caption file.
    """
    return pages_for({job.stage for job in _reported(graph)}, compared=bool(graph.config.report.compare))


def judging_files(graph: JobGraph) -> list[str]:
    """The CSV files of all responses below `results/report/pages`, which are too large for Snakemake's report."""
    evaluations = (job for job in _reported(graph) if job.stage == "eval" and not job.spec.rewards)
    corpora = {job.name.partition("/")[0]: job.spec.conversations for job in evaluations}
    return [name for names in side_by_side_files(corpora).values() for name in names]


def _reported(graph: JobGraph) -> tuple[Job, ...]:
    return graph.job("report", "").artifacts["results"]


def pages_for(stages: Collection[str], *, compared: bool = False) -> dict[str, tuple[str, str]]:
    """The pages for stages that have results. Args: compared: whether `report.compare` names earlier runs.

    >>> list(pages_for({"corpus"}))
    ['index.html', 'data.csv', 'corpus.html']
    """
    pages = {name: about for needed, group in PAGES if needed <= {*stages} for name, about in group.items()}
    return pages | ({"compare.html": ("Comparison", "compare")} if compared else {})


def side_by_side_files(corpora: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """The files of each evaluation and corpus, as `evaluation/corpus` → paths below the report's pages.

    Args:
        corpora: By evaluation, its corpora of conversations.

    >>> side_by_side_files({"main": ["chat"]})["main/chat"][0]
    'side_by_side/main/chat/side_by_side.csv'
    """
    keys = [f"{evaluation}/{corpus}" for evaluation, corpora in corpora.items() for corpus in corpora]
    return {key: [f"side_by_side/{key}/{name}.csv" for name in JUDGING] for key in keys}
