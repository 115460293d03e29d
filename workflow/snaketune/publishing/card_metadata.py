"""The YAML front matter of a model card, written by huggingface_hub."""

from collections import Counter

from huggingface_hub import EvalResult, ModelCardData

from snaketune.publishing.card_results import CardResults
from snaketune.publishing.card_scores import Score


def metadata(results: CardResults, scores: list[Score]) -> str:
    """The YAML between the two lines `---`."""
    base = results.base_on_hub
    data = ModelCardData(
        base_model=base and base["path"],
        base_model_relation=base and ("adapter" if results.is_adapter else "finetune"),
        datasets=sorted({path for corpus in results.corpora for path in results.hub_datasets(corpus)}) or None,
        language=_languages(results) or None,
        library_name="peft" if results.is_adapter else "transformers",
        license=results.spec.license,
        model_name=results.model.job.name,
        pipeline_tag="text-generation",
        tags=[
            "snaketune",
            *sorted({run.job.stage for run in results.trainings}),
            *(["lora"] if results.is_adapter else []),
        ],
        eval_results=_results(results, scores) or None,
    )
    return data.to_yaml()


def _languages(results: CardResults) -> list[str]:
    """The languages of the training data; empty unless every corpus was filtered by language."""
    sorted_by = [corpus.spec["cleaning"]["languages"] for corpus in results.corpora]
    return sorted({language for some in sorted_by for language in some}) if all(sorted_by) else []


def _results(results: CardResults, scores: list[Score]) -> list[EvalResult]:
    """The scores as evaluation results. A dataset has its Hub id if exactly one corpus is made of it, else the corpus' name."""
    measured = {score.on: results.by_job.get(f"corpus/{score.on}") for score in scores if score.section != "tasks"}
    on_hub = {on: results.hub_datasets(corpus) for on, corpus in measured.items() if corpus}
    made_of = Counter(path for paths in on_hub.values() for path in set(paths))
    links = {on: paths[0] for on, paths in on_hub.items() if len(paths) == 1 and made_of[paths[0]] == 1}
    several = len({score.evaluation for score in scores}) > 1
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=links.get(score.on, score.on),
            dataset_name=score.on,
            dataset_split=None if score.section == "tasks" else "held_out",
            metric_type=score.path,
            metric_name=f"{score.name} ({score.evaluation})" if several else score.name,
            metric_value=score.value,
        )
        for score in scores
    ]
