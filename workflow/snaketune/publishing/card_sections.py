"""The text of a card, section by section, as Markdown."""

import json
from collections.abc import Iterator
from typing import Any

from snaketune.config.losses import PreferenceLoss
from snaketune.publishing.card_results import Result, Told
from snaketune.publishing.card_scores import Figure
from snaketune.publishing.markdown import table, text

UNKNOWN = "not stated"


def summary(told: Told) -> str:
    """What it is, in a few sentences."""
    steps = [_how(run) for run in reversed(told.trainings)]
    return f"{_start(told)}, trained {', then '.join(steps)}, with snaketune.{_license(told)}"


def _start(told: Told) -> str:
    if base := told.base_on_hub:
        at = f" at {text(base['revision'])}" if base["revision"] else ""
        return f"[{text(base['path'])}](https://huggingface.co/{base['path']}){at}"
    if "path" in told.base:
        return "A model from a local folder"
    return f"A new {text(told.base['architecture'])} model with random weights"


def _how(run: Result) -> str:
    if run.job.stage == "sft":
        return "by supervised fine-tuning"
    said = f"by preference optimization ({text(_value(run.spec['loss']))})"
    if reference := run.spec.get("reference"):
        path = reference["path"].rstrip("/")
        # A place in somebody's folders is nobody else's business.
        local = path.startswith((".", "/", "~")) or path.count("/") > 1
        said += f" against {text(path.rpartition('/')[2] if local else path)}"
    return said


def _license(told: Told) -> str:
    return f" License: {text(told.spec.license)}." if told.spec.license else " Its license isn't stated."


def data(told: Told) -> str:
    """Each corpus that was trained on: what it is, and where its rows went."""
    return "\n\n".join(_corpus(told, corpus) for corpus in told.corpora)


def _corpus(told: Told, corpus: Result) -> str:
    words, counts = told.words(corpus.job.name), corpus.counts
    said = f"License: {text(words.license or UNKNOWN)}. From {_sources(told, corpus)}."
    if words.description:
        said = f"What it is: {text(words.description)}\n\n{said}"
    rows = [("read", counts["read"])]
    rows += [
        (what, counts.get(name)) for name, what in (("extra", "more made of them"), ("joined", "joined to others"))
    ]
    rows += [
        (f"malformed: {_words(reason)}", n) for reason, n in sorted(counts["quarantined"].items()) if reason != "total"
    ]
    rows += [(f"dropped: {_words(reason)}", n) for reason, n in sorted(counts["dropped"].items())]
    rows += [("repeated for their weight", counts.get("repeated"))]
    rows += [("kept for training", counts["kept"]["train"]), ("held out", counts["kept"]["held_out"])]
    shown = ([what, _whole(n)] for what, n in rows if n or what in ("read", "kept for training", "held out"))
    parts = [f"### {text(corpus.job.name)}", said, table(["rows", ""], shown)]
    return "\n\n".join([*parts, *(_packed(pack) for pack in _packs(told, corpus))])


def _sources(told: Told, corpus: Result) -> str:
    """The Hub's by name and revision; of files, whose names say where somebody keeps them, how many."""
    files = sum(len(source["files"]) for source in corpus.spec["sources"])
    linked, hub = told.hub_datasets(corpus), [source["hub"] for source in corpus.spec["sources"] if source["hub"]]
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


def _packs(told: Told, corpus: Result) -> list[Result]:
    return [pack for pack in told.of("pack") if told.made_from(pack, "corpus") is corpus]


def _packed(pack: Result) -> str:
    """What became of its train rows on the way into rows of a length."""
    counts = pack.counts["train"]
    # Raw rows aren't packed, and what a trainer makes of them is counted by nobody.
    lost = [f"{_whole(n)} dropped ({_words(reason)})" for reason, n in sorted(counts.get("dropped", {}).items()) if n]
    for name, what in (("truncated", "truncated"), ("split", "split")):
        lost += [f"{_whole(n)} {what}"] if (n := counts.get(name, {}).get("rows")) else []
    said = f"In rows of {_whole(pack.manifest['row_length'])} tokens: {', '.join(lost) or 'nothing lost'}"
    tokens = counts.get("tokens")
    return said + (f"; {_whole(tokens)} tokens, {_whole(counts['supervised_tokens'])} supervised." if tokens else ".")


def training(told: Told) -> str:
    """Hyperparameters and sizes, a column for each run, the first one first."""
    runs = list(reversed(told.trainings))
    columns = [dict(_settings(told, run)) for run in runs]
    keys = list(dict.fromkeys(key for column in reversed(columns) for key in column))
    rows = ([text(key), *(text(column.get(key, "")) for column in columns)] for key in keys)
    versions = {name: version for run in runs for name, version in run.manifest["versions"].items() if version}
    made_with = ", ".join(f"{text(name)} {text(version)}" for name, version in sorted(versions.items()))
    head = ["", *(text(f"{run.job.stage}:{run.job.name}") for run in runs)]
    return f"{table(head, rows)}\n\nMade with {made_with}."


def _settings(told: Told, run: Result) -> Iterator[tuple[str, str]]:
    spec, manifest = run.spec, run.manifest
    pack = told.made_from(run, "pack")
    corpus = pack and told.made_from(pack, "corpus")
    yield "corpus", corpus.job.name if corpus else ""
    yield from ((key, _value(spec[key])) for key in PreferenceLoss.model_fields if _says(spec, key))
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


def _says(spec: dict[str, Any], key: str) -> bool:
    """Whether a key of a preference loss says something; most are of one loss alone."""
    field = PreferenceLoss.model_fields[key]
    return key in spec and (key in ("loss", "beta") or spec[key] != field.default)


def scores(found: list[Figure]) -> str:
    """All of them, with the intervals that there are."""
    rows = (
        [text(one.evaluation), text(one.on), text(one.name), _number(one.value), _interval(one), _whole(one.size)]
        for one in found
    )
    return table(["evaluation", "on", "figure", "value", "interval", "of"], rows) or "It wasn't evaluated."


def files(told: Told) -> str:
    """What the result is, file by file, so that a copy can be held against it."""
    manifest = told.model.manifest
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


def _interval(figure: Figure) -> str:
    return f"{_number(figure.interval[0])} to {_number(figure.interval[1])}" if figure.interval else ""
