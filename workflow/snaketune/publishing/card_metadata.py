"""What the Hub reads of a card: the YAML at its head, as huggingface_hub writes it."""

from collections import Counter

from huggingface_hub import EvalResult, ModelCardData

from snaketune.publishing.card_results import Told
from snaketune.publishing.card_scores import Figure


def metadata(told: Told, figures: list[Figure]) -> str:
    """The lines between the two `---`."""
    base = told.base_on_hub
    data = ModelCardData(
        base_model=base and base["path"],
        base_model_relation=base and ("adapter" if told.is_adapter else "finetune"),
        datasets=sorted({path for corpus in told.corpora for path in told.hub_datasets(corpus)}) or None,
        language=_languages(told) or None,
        library_name="peft" if told.is_adapter else "transformers",
        license=told.spec.license,
        model_name=told.model.job.name,
        pipeline_tag="text-generation",
        tags=["snaketune", *sorted({run.job.stage for run in told.trainings}), *(["lora"] if told.is_adapter else [])],
        eval_results=_results(told, figures) or None,
    )
    return data.to_yaml()


def _languages(told: Told) -> list[str]:
    """Known where all that was trained on was sorted by language; else somebody would be told wrong."""
    sorted_by = [corpus.spec["cleaning"]["languages"] for corpus in told.corpora]
    return sorted({language for some in sorted_by for language in some}) if all(sorted_by) else []


def _results(told: Told, figures: list[Figure]) -> list[EvalResult]:
    """The Hub links a dataset that it has; any other, and one that two corpora are made of, is known by the corpus' name."""
    measured = {figure.on: told.results.get(f"corpus/{figure.on}") for figure in figures if figure.section != "tasks"}
    on_hub = {on: told.hub_datasets(corpus) for on, corpus in measured.items() if corpus}
    made_of = Counter(path for paths in on_hub.values() for path in set(paths))
    links = {on: paths[0] for on, paths in on_hub.items() if len(paths) == 1 and made_of[paths[0]] == 1}
    several = len({figure.evaluation for figure in figures}) > 1
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=links.get(figure.on, figure.on),
            dataset_name=figure.on,
            dataset_split=None if figure.section == "tasks" else "held_out",
            metric_type=figure.path,
            metric_name=f"{figure.name} ({figure.evaluation})" if several else figure.name,
            metric_value=figure.value,
        )
        for figure in figures
    ]
