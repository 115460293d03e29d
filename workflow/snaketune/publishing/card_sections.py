"""The sections of a model card as Markdown."""

import json
from collections.abc import Iterator
from typing import Any

from snaketune.config.losses import PreferenceLoss
from snaketune.publishing.card_results import CardResult, CardResults
from snaketune.publishing.card_scores import Score
from snaketune.publishing.markdown import table, text

UNKNOWN = "not stated"


def summary(results: CardResults) -> str:
    """Base model, training method and license in a sentence each."""
    steps = [_method(run) for run in reversed(results.trainings)]
    return f"{_base(results)}, trained {', then '.join(steps)}, with snaketune.{_license(results)}"


def _base(results: CardResults) -> str:
    if base := results.base_on_hub:
        at = f" at {text(base['revision'])}" if base["revision"] else ""
        return f"[{text(base['path'])}](https://huggingface.co/{base['path']}){at}"
    if "path" in results.base:
        return "A model from a local folder"
    return f"A new {text(results.base['architecture'])} model with random weights"


def _method(run: CardResult) -> str:
    if run.job.stage == "sft":
        return "by supervised fine-tuning"
    sentence = f"by preference optimization ({text(_value(run.spec['loss']))})"
    if reference := run.spec.get("reference"):
        path = reference["path"].rstrip("/")
        # A local path would disclose the author's folders.
        local = path.startswith((".", "/", "~")) or path.count("/") > 1
        sentence += f" against {text(path.rpartition('/')[2] if local else path)}"
    return sentence


def _license(results: CardResults) -> str:
    return f" License: {text(results.spec.license)}." if results.spec.license else " Its license isn't stated."


def data(results: CardResults) -> str:
    """Each training corpus: description, license, sources and row counts."""
    return "\n\n".join(_corpus(results, corpus) for corpus in results.corpora)


def _corpus(results: CardResults, corpus: CardResult) -> str:
    words, counts = results.words(corpus.job.name), corpus.counts
    sentence = f"License: {text(words.license or UNKNOWN)}. From {_sources(results, corpus)}."
    if words.description:
        sentence = f"Description: {text(words.description)}\n\n{sentence}"
    rows = [("read", counts["read"])]
    rows += [
        (what, counts.get(name))
        for name, what in (("extra", "extra (made from read rows)"), ("joined", "joined to others"))
    ]
    rows += [
        (f"malformed: {_words(reason)}", n) for reason, n in sorted(counts["quarantined"].items()) if reason != "total"
    ]
    rows += [(f"dropped: {_words(reason)}", n) for reason, n in sorted(counts["dropped"].items())]
    rows += [("repeated by weight", counts.get("repeated"))]
    rows += [("kept for training", counts["kept"]["train"]), ("held out", counts["kept"]["held_out"])]
    shown = ([what, _whole(n)] for what, n in rows if n or what in ("read", "kept for training", "held out"))
    parts = [f"### {text(corpus.job.name)}", sentence, table(["rows", ""], shown)]
    return "\n\n".join([*parts, *(_packing(pack) for pack in _packs(results, corpus))])


def _sources(results: CardResults, corpus: CardResult) -> str:
    """Hub datasets by name and revision; local files only by their number, since their names would disclose folders."""
    files = sum(len(source["files"]) for source in corpus.spec["sources"])
    linked, hub = results.hub_datasets(corpus), [source["hub"] for source in corpus.spec["sources"] if source["hub"]]
    named = [
        (
            f"[{text(one['path'])}](https://huggingface.co/datasets/{one['path']})"
            if one["path"] in linked
            else text(one["path"])
        )
        + f" ({', '.join(text(one[key]) for key in ('name', 'split', 'revision') if one[key])})"
        for one in hub
    ]
    return " and ".join(named + ([f"{files} local file{'s' if files > 1 else ''}"] if files else []))


def _packs(results: CardResults, corpus: CardResult) -> list[CardResult]:
    return [pack for pack in results.of("pack") if results.made_from(pack, "corpus") is corpus]


def _packing(pack: CardResult) -> str:
    """The counts of the train split: rows dropped, truncated and split, and tokens."""
    counts = pack.counts["train"]
    # Raw rows aren't packed, so their tokens aren't counted.
    lost = [f"{_whole(n)} dropped ({_words(reason)})" for reason, n in sorted(counts.get("dropped", {}).items()) if n]
    for name, what in (("truncated", "truncated"), ("split", "split")):
        lost += [f"{_whole(n)} {what}"] if (n := counts.get(name, {}).get("rows")) else []
    sentence = f"In rows of {_whole(pack.manifest['row_length'])} tokens: {', '.join(lost) or 'nothing lost'}"
    tokens = counts.get("tokens")
    return sentence + (
        f"; {_whole(tokens)} tokens, {_whole(counts['supervised_tokens'])} supervised." if tokens else "."
    )


def training(results: CardResults) -> str:
    """Hyperparameters and sizes, with a column per run in the order of training."""
    runs = list(reversed(results.trainings))
    columns = [dict(_settings(results, run)) for run in runs]
    keys = list(dict.fromkeys(key for column in reversed(columns) for key in column))
    rows = ([text(key), *(text(column.get(key, "")) for column in columns)] for key in keys)
    versions = {name: version for run in runs for name, version in run.manifest["versions"].items() if version}
    made_with = ", ".join(f"{text(name)} {text(version)}" for name, version in sorted(versions.items()))
    head = ["", *(text(f"{run.job.stage}:{run.job.name}") for run in runs)]
    return f"{table(head, rows)}\n\nMade with {made_with}."


def _settings(results: CardResults, run: CardResult) -> Iterator[tuple[str, str]]:
    spec, manifest = run.spec, run.manifest
    pack = results.made_from(run, "pack")
    corpus = pack and results.made_from(pack, "corpus")
    yield "corpus", corpus.job.name if corpus else ""
    yield from ((key, _value(spec[key])) for key in PreferenceLoss.model_fields if _is_informative(spec, key))
    yield from ((key, _value(value)) for key, value in spec["training"].items() if value not in (None, {}))
    for section in ("lora", "quantization"):
        yield from ((f"{section}.{key}", _value(value)) for key, value in (spec[section] or {}).items())
    for key in ("steps", "rows", "tokens", "tokens_per_epoch"):
        if key in run.counts:
            yield "tokens trained" if key == "tokens" else key.replace("_", " "), _whole(run.counts[key])
    for key in ("parameters", "trainable_parameters"):
        if key in manifest:
            yield key.replace("_", " "), _whole(manifest[key])
    yield from (
        (name, manifest[key])
        for key, name in (("dtype", "computed in"), ("saved_dtype", "saved in"))
        if key in manifest
    )


def _is_informative(spec: dict[str, Any], key: str) -> bool:
    """Return True for the keys of a preference loss to list: loss, beta, and keys that differ from their default."""
    field = PreferenceLoss.model_fields[key]
    return key in spec and (key in ("loss", "beta") or spec[key] != field.default)


def scores(all_scores: list[Score]) -> str:
    """All scores, with intervals where known."""
    rows = (
        [text(one.evaluation), text(one.on), text(one.name), _number(one.value), _interval(one), _whole(one.size)]
        for one in all_scores
    )
    return table(["evaluation", "on", "metric", "value", "95% interval", "size"], rows) or "It wasn't evaluated."


def files(results: CardResults) -> str:
    """Size and digest of each file, to verify a copy."""
    manifest = results.model.manifest
    rows = (
        [text(name), _whole(entry["bytes"]), text(entry["digest"])]
        for name, entry in sorted(manifest["payload"].items())
    )
    listed = table(["file", "bytes", "digest (XXH3-128)"], rows)
    return f"{listed}\n\nFingerprint of the training: {text(manifest['fingerprint'])}."


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _words(reason: str) -> str:
    return text(reason.replace("_", " "))


def _whole(n: int | None) -> str:
    return "" if n is None else f"{n:,}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def _interval(score: Score) -> str:
    return f"{_number(score.interval[0])} to {_number(score.interval[1])}" if score.interval else ""
