"""The text of a model card: a template filled with escaped text, and YAML front matter, which huggingface_hub writes.

Its content are the results of the training, those that it builds on, their data, and the scores of the model.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from snaketune.config.load import HUB_ID
from snaketune.config.losses import PreferenceLoss
from snaketune.diagnostics.verified import checks_in, table
from snaketune.publishing.measures import Measure, measures
from snaketune.publishing.results import Result, Results, read_json
from snaketune.publishing.scored_models import ScoredModel
from snaketune.stages.plan.published_jobs import CHECKS
from snaketune.stages.specs import CardSpec, CorpusDescription
from snaketune.text import whole, words

# Characters with a meaning within a line in CommonMark or the Hub's extensions (such as automatic links), to be escaped.
SPECIAL = re.compile(r"([\\`*_\[\]<>&|~#$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
# Control characters that aren't whitespace, lone surrogates, and bidirectional controls.
UNSHOWABLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ALWAYS_SHOWN = ("read", "kept for training", "held out")
NOT_DESCRIBED = CorpusDescription(license=None, description=None)


class CardResults(Results):
    """All results of a card; a SnaketuneError is raised if one can't be read or isn't that of its job."""

    def __init__(self, spec: CardSpec, manifests: list[Path]):
        super().__init__(spec.jobs, manifests)
        self.spec = spec
        # The training of the model is first, then those that it builds on.
        self.model = self.trainings[0]
        self.gives_rewards = self.model.stage == "reward"
        # The base model in the spec of the first training: a model with a `path`, or the architecture of a new one.
        self.base: dict[str, Any] = self.trainings[-1].spec["base"]
        self.is_adapter = "base_dtype" in self.model.manifest
        self.trusts_remote_code = bool(self.model.spec.get("trust_remote_code"))

    @cached_property
    def corpora(self) -> list[Result]:
        """The corpora that were trained on, in the order of the trainings."""
        corpora = [self.corpus_of(run) for run in reversed(self.trainings)]
        return list({corpus.name: corpus for corpus in corpora if corpus}.values())

    def corpus_of(self, run: Result) -> Result | None:
        return self.first(self.first(run, "pack"), "corpus")

    @property
    def base_on_hub(self) -> dict[str, Any] | None:
        """The base model if it is on the Hub; None for a local folder, whose files are in the manifest, and for a new model."""
        local = self.trainings[-1].manifest["inputs"].get("base")
        return self.base if not local and HUB_ID.fullmatch(self.base.get("path", "")) else None

    def hub_datasets(self, corpus: Result) -> list[str]:
        """The Hub datasets that a corpus is made of."""
        paths = (source["hub"]["path"] for source in corpus.spec["sources"] if source["hub"])
        # These become URLs, and manifests of other origin are untrusted.
        return [path for path in paths if HUB_ID.fullmatch(path)]

    @cached_property
    def scores(self) -> list[tuple[ScoredModel, Measure]]:
        """The scores of all evaluations of the model: those that have a better direction, and all of tasks."""
        evaluated = [
            ScoredModel(result=result, scores=read_json(result.artifact.file("scores.json")), responses=[])
            for result in self.of("eval")
        ]
        return [
            (scored, measure)
            for scored in evaluated
            for measure in measures([scored])
            if (measure.better and not measure.detail) or _is_of_task(measure)
        ]


def _is_of_task(measure: Measure) -> bool:
    return measure.path.startswith("tasks.")


def card_text(results: CardResults) -> str:
    """The whole card as Markdown."""
    runs = results.trainings[::-1]
    columns = [dict(_settings(results, run)) for run in runs]
    keys = dict.fromkeys(key for column in reversed(columns) for key in column)
    versions = {name: version for run in runs for name, version in run.manifest["versions"].items() if version}
    # A continued adapter replaces the adapter of the SFT run.
    continued = bool(results.model.spec.get("continued"))
    checks = [check for result in results.of(*CHECKS) for check in checks_in(result.artifact)]
    made = [check for check in checks if check["status"] != "not checked"]
    environment = Environment(
        loader=PackageLoader("snaketune", "publishing/cards/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escaped, "whole": whole, "lost": _lost}
    return environment.get_template("card.md.jinja").render(
        results=results,
        metadata=_metadata(results),
        methods=[_method(results, run) for run in runs],
        corpora=[_corpus(results, corpus) for corpus in results.corpora],
        settings_head=["", *(run.label for run in runs)],
        settings=[[key, *(column.get(key, "") for column in columns)] for key in keys],
        versions=[f"{escaped(name)} {escaped(version)}" for name, version in sorted(versions.items())],
        scores=[
            [scored.evaluation, one.on, one.label, one.shown(scored.model), one.shown_interval(scored.model)]
            for scored, one in results.scores
        ],
        checks=[row[1:4] + row[:1] for row in table(made)],
        unchecked=[f"{escaped(check['name'])} ({escaped(check['reason'])})" for check in checks if check not in made],
        base_name=_base_name(results.trainings[2 if continued else 1 :]),
        has_plain_base=continued or len(runs) == 1,
        only_text=all(corpus.spec["kind"] == "text" for corpus in results.corpora),
        files=[
            [name, whole(entry["bytes"]), entry["digest"]]
            for name, entry in sorted(results.model.manifest["payload"].items())
        ],
    )


def escaped(value: object) -> str:
    r"""Escape untrusted text as one line of Markdown, for use within a line or in a table cell.

    >>> print(escaped("a|b <b>*c*</b>\n# [x](javascript:y) http://x www.x"))
    a\|b \<b\>\*c\*\</b\> \# \[x\](javascript:y) http\://x www\.x
    """
    return SPECIAL.sub(r"\\\1", " ".join(UNSHOWABLE.sub("�", str(value)).split()))


def _metadata(results: CardResults) -> str:
    base, adapter, scores = results.base_on_hub, results.is_adapter, results.scores
    languages = [corpus.spec["cleaning"]["languages"] for corpus in results.corpora]
    # A dataset has its Hub id if exactly one corpus is made of it, else the corpus' name.
    measured = {one.on: results.by_key.get(f"corpus/{one.on}") for _, one in scores if not _is_of_task(one)}
    on_hub = {on: results.hub_datasets(corpus) for on, corpus in measured.items() if corpus}
    made_of = Counter(path for paths in on_hub.values() for path in set(paths))
    links = {on: paths[0] for on, paths in on_hub.items() if len(paths) == 1 and made_of[paths[0]] == 1}
    several = len({scored.evaluation for scored, _ in scores}) > 1
    task = "text-classification" if results.gives_rewards else "text-generation"
    evaluated = [
        EvalResult(
            task_type=task,
            dataset_type=links.get(one.on, one.on),
            dataset_name=one.on,
            dataset_split=None if _is_of_task(one) else "held_out",
            metric_type=one.key,
            metric_name=f"{one.label} ({scored.evaluation})" if several else one.label,
            metric_value=one.values[scored.model],
        )
        for scored, one in scores
    ]
    data = ModelCardData(
        base_model=base["path"] if base else None,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        datasets=sorted({path for corpus in results.corpora for path in results.hub_datasets(corpus)}) or None,
        # Known only if every corpus was filtered by language.
        language=sorted({code for group in languages for code in group}) if languages and all(languages) else None,
        library_name="peft" if adapter else "transformers",
        license=results.spec.license,
        model_name=results.model.name,
        pipeline_tag=task,
        tags=["snaketune", *sorted({run.stage for run in results.trainings}), *(["lora"] if adapter else [])],
        eval_results=evaluated or None,
    )
    return data.to_yaml()


def _method(results: CardResults, run: Result) -> str:
    if run.stage == "sft":
        teacher = results.first(run, "teacher")
        if teacher is None:
            return "by supervised fine-tuning"
        result = teacher.job.made_from.get("model", ())
        named = result[0].replace("/", ":", 1) if result else shown_path(teacher.spec["base"]["path"])
        return f"by supervised fine-tuning towards the probabilities of {escaped(named)}"
    if run.stage == "reward":
        return "as a reward model on pairs"
    sentence = f"by preference optimization ({escaped(_value(run.spec['loss']))})"
    reference = run.spec.get("reference")
    if reference == "result":
        sentence += f" against {escaped(run.job.made_from['reference'][0].replace('/', ':', 1))}"
    elif reference:
        sentence += f" against {escaped(shown_path(reference['path']))}"
    return sentence


def shown_path(path: str) -> str:
    """The name of a model from outside; of a local one without its folder, which would disclose the author's."""
    path = path.rstrip("/")
    local = path.startswith((".", "/", "~")) or path.count("/") > 1
    return path.rpartition("/")[2] if local else path


def _corpus(results: CardResults, corpus: Result) -> dict[str, Any]:
    counts = corpus.counts
    malformed = {key: n for key, n in counts["quarantined"].items() if key != "total"}
    rows = {"read": counts["read"], "extra (made from read rows)": counts.get("extra")}
    rows |= {"joined to others": counts.get("joined")}
    rows |= {f"malformed: {words(reason)}": n for reason, n in sorted(malformed.items())}
    rows |= {f"dropped: {words(reason)}": n for reason, n in sorted(counts["dropped"].items())}
    rows |= {"repeated by weight": counts.get("repeated")}
    rows |= {"kept for training": counts["kept"]["train"], "held out": counts["kept"]["held_out"]}
    return {
        "name": corpus.name,
        **results.spec.corpora.get(corpus.name, NOT_DESCRIBED).model_dump(),
        "sources": list(_sources(results, corpus)),
        "rows": [[what, whole(n)] for what, n in rows.items() if n or what in ALWAYS_SHOWN],
        "packs": [pack for pack in results.of("pack") if results.first(pack, "corpus") is corpus],
    }


def _sources(results: CardResults, corpus: Result) -> Iterator[str]:
    """Hub datasets by name and revision; local files only by their number, since their names would disclose folders."""
    linked = results.hub_datasets(corpus)
    for hub in (source["hub"] for source in corpus.spec["sources"] if source["hub"]):
        path, about = escaped(hub["path"]), (escaped(hub[key]) for key in ("name", "split", "revision") if hub[key])
        name = f"[{path}](https://huggingface.co/datasets/{hub['path']})" if hub["path"] in linked else path
        yield f"{name} ({', '.join(about)})"
    if files := sum(len(source["files"]) for source in corpus.spec["sources"]):
        yield f"{files} local file{'s' if files > 1 else ''}"


def _lost(pack: Result) -> list[str]:
    """The train rows that were dropped, truncated and split. Raw rows aren't packed, so not all of it is counted."""
    counts = pack.counts["train"]
    dropped = sorted((reason, n) for reason, n in counts.get("dropped", {}).items() if n)
    changed = {what: counts.get(what, {}).get("rows") for what in ("truncated", "split")}
    return [f"{whole(n)} dropped ({escaped(words(reason))})" for reason, n in dropped] + [
        f"{whole(n)} {what}" for what, n in changed.items() if n
    ]


def _settings(results: CardResults, run: Result) -> Iterator[tuple[str, str]]:
    """Hyperparameters and sizes of one run; of the keys of its loss, those that differ from their default."""
    spec, manifest, corpus = run.spec, run.manifest, results.corpus_of(run)
    yield "corpus", corpus.name if corpus else ""
    for key, field in PreferenceLoss.model_fields.items():
        if key in spec and (key in ("loss", "beta") or spec[key] != field.default):
            yield key, _value(spec[key])
    for key in ("center_rewards_coefficient", "margin"):
        if spec.get(key):
            yield key, _value(spec[key])
    yield from ((key, _value(value)) for key, value in spec["training"].items() if value not in (None, {}))
    for section in ("distill", "lora", "quantization"):
        yield from ((f"{section}.{key}", _value(value)) for key, value in (spec.get(section) or {}).items())
    if teacher := results.first(run, "teacher"):
        yield "distill.k", whole(teacher.manifest["k"])
    for key in ("steps", "rows", "tokens", "tokens_per_epoch"):
        if key in run.counts:
            yield "tokens trained" if key == "tokens" else words(key), whole(run.counts[key])
    yield from ((words(key), whole(manifest[key])) for key in ("parameters", "trainable_parameters") if key in manifest)
    names = {"dtype": "computed in", "saved_dtype": "saved in"}
    yield from ((name, manifest[key]) for key, name in names.items() if key in manifest)


def _base_name(trained: list[Result]) -> str:
    """The base of an adapter, from the runs before it."""
    if not trained:
        return "the model that its training started from"
    merged = ", an adapter itself, merged" if "base_dtype" in trained[0].manifest else ""
    return f"the result of `{trained[0].label}`{merged}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
