"""The RO-Crate of a published model: `ro-crate-metadata.json`, which says how the model was made, for programs and archives.

It follows RO-Crate 1.1 and the Process Run Crate profile 0.5: an action for each result of the model card, from the corpora to
the checks, with the digests of what it read, its resolved settings, the digest of its code and the command that repeats it. All
of this is from manifests. Times and the revision of the code are from run.json, which no manifest depends on, so the crate is
written when a model is pushed. The same results give the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from mimetypes import MimeTypes
from pathlib import Path
from typing import Any

from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from snaketune.diagnostics.verified import checks_in
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, write_json
from snaketune.publishing.cards.card_text import CardResults, shown_path
from snaketune.publishing.results import Files, Result, read_json
from snaketune.stages.job import RESULTS, result_at
from snaketune.stages.plan.published_jobs import CHECKS
from snaketune.stages.specs import CardSpec

CRATE = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
# Has `sha256`, which RO-Crate 1.1 lacks.
TERMS = "https://w3id.org/ro/terms/workflow-run/context"
HUB = "https://huggingface.co"
# Stages whose settings name no files of the author's.
WITH_SETTINGS = ("tokenizer", "pack", "sft", "dpo", "reward")
# By the names in Python alone: a machine's own list may differ.
TYPES = MimeTypes()
TYPES.add_type("text/markdown", ".md")


def write_crate(card: Path, files: Files, folder: Path) -> Path:
    """Write the crate of a model to `folder` and return its path.

    Args:
        card: the manifest of its model card.
        files: the files of the repository by name, each with its digest.
    Raises:
        SnaketuneError: A result of the card is missing, or is another one than the card's.
    """
    crate = _Crate(_results_of(card)).filled(files)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CRATE, crate.metadata.generate())
    return folder / CRATE


def _results_of(card: Path) -> CardResults:
    made = result_at(card)
    spec = CardSpec.model_validate_json(json.dumps(made.manifest["spec"]))
    manifests = [RESULTS / job.stage / job.name / "manifest.json" for job in spec.jobs]
    for manifest in manifests:
        if digest_file(result_at(manifest).manifest_path) not in made.manifest["inputs"]["manifests"]:
            raise SnaketuneError(f"{card} is of another {manifest}; run: snakemake {card}")
    return CardResults(spec, manifests)


class _Crate:
    def __init__(self, results: CardResults):
        self.results = results
        self.crate = ROCrate(version="1.1")
        self.crate.metadata.extra_contexts.append(TERMS)

    def filled(self, files: Files) -> ROCrate:
        results, root = self.results, self.crate.root_dataset
        trained = [
            self.crate.add_file(path, name, properties=_described(name, path, digest))
            for name, (path, digest) in files.items()
        ]
        root["name"] = results.spec.model
        root["description"] = f"A model that was trained with snaketune as {results.spec.model}, and how it was made."
        root["datePublished"] = _ended(_run(results.model))
        root["conformsTo"] = self._add(PROFILE, "CreativeWork", name="Process Run Crate", version="0.5")
        # A crate needs one.
        name = results.spec.license or "not stated"
        url = f"{HUB}/models?license=license:{name}" if results.spec.license else "#license"
        root["license"] = self._add(url, "CreativeWork", name=name, description=f"The license: {name}")
        made = {key: self._made(result) for key, result in results.by_key.items()}
        outputs: dict[str, list[ContextEntity]] = {key: [entity] for key, entity in made.items()}
        outputs[_key(results.model)] = [one for one in trained if one.id in results.model.manifest["payload"]]
        root["mentions"] = [self._action(result, outputs) for result in reversed([*results.by_key.values()])]
        return self.crate

    def _add(self, of: str, kind: str, /, **properties: Any) -> Any:
        """The entity with an `@id`, added unless it is there already."""
        known = self.crate.dereference(of)
        # A list of one value is written as that value.
        plain = {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in properties.items()
        }
        kept = {key: value for key, value in plain.items() if value not in (None, [])}
        return known or self.crate.add(ContextEntity(self.crate, of, properties={"@type": kind} | kept))

    def _value(self, of: str, name: str, value: Any, **properties: Any) -> Any:
        return self._add(of, "PropertyValue", name=name, value=value, **properties)

    def _instrument(self, result: Result, revision: str | None) -> ContextEntity:
        """The code in the revision that made a result, and the libraries that shape it."""
        libraries = []
        for name, version in sorted(result.manifest["versions"].items()):
            if version:
                url = f"https://pypi.org/project/{name}/{version.partition('+')[0]}/"
                libraries.append(self._add(url, "SoftwareApplication", name=name, softwareVersion=version, url=url))
        return self._add(
            f"#snaketune/{_key(result)}",
            "SoftwareApplication",
            name="snaketune",
            description="A Snakemake workflow: from raw conversations to an evaluated, aligned model",
            # Of code that isn't committed, the digest alone is known.
            softwareVersion=revision or f"code {result.manifest['code']}",
            softwareRequirements=libraries,
        )

    def _made(self, result: Result) -> ContextEntity:
        """The result of a job, which isn't in the crate itself."""
        kept = {name: value for name, value in result.counts.items() if isinstance(value, int)}
        return self._add(
            f"#results/{_key(result)}",
            "CreativeWork",
            name=_key(result),
            identifier=result.artifact.content,
            description=f"A result of the stage {result.stage}: {json.dumps(kept, sort_keys=True)}",
        )

    def _action(self, result: Result, outputs: dict[str, list[ContextEntity]]) -> ContextEntity:
        """The job that made a result. Args: outputs: by job, what it made."""
        key, run = _key(result), _run(result)
        read = [entity for keys in result.job.made_from.values() for one in keys for entity in outputs.get(one, ())]
        if result.stage == "eval" or result.stage in CHECKS:
            read += outputs[_key(self.results.model)]
        read += self._read_from_outside(result)
        for role, digests in sorted(result.manifest["inputs"].items()):
            read += [
                self._value(f"#{key}/inputs/{role}/{number}", f"digest of input {role}", digest)
                for number, digest in enumerate(digests, 1)
            ]
        read.append(self._value(f"#{key}/code", "digest of the stage's code", result.manifest["code"]))
        if result.stage in WITH_SETTINGS:
            settings = json.dumps(_public(result.spec), sort_keys=True)
            read.append(self._value(f"#{key}/spec", "resolved settings", settings))
        return self._add(
            f"#{key}",
            "CreateAction",
            name=key,
            description=f"Repeated by: snakemake {RESULTS / key / 'manifest.json'}",
            instrument=self._instrument(result, run.get("revision")),
            object=read,
            result=[*outputs[key], *self._figures(result)],
            startTime=datetime.fromisoformat(run["started"]).isoformat(),
            endTime=_ended(run),
            actionStatus="http://schema.org/CompletedActionStatus",
        )

    def _read_from_outside(self, result: Result) -> Iterator[ContextEntity]:
        """Base models and datasets of the Hub; of local ones the digests are known, and their names aren't disclosed."""
        base = self.results.base_on_hub if result is self.results.trainings[-1] else None
        if base:
            path = base["path"]
            yield self._add(f"{HUB}/{path}", "CreativeWork", name=path, version=base["revision"])
        if result.stage == "corpus":
            named = {hub["path"]: hub for hub in (source["hub"] for source in result.spec["sources"]) if hub}
            for path in self.results.hub_datasets(result):
                url, description = f"{HUB}/datasets/{path}", self.results.spec.corpora.get(result.name)
                license = description.license if description else None
                yield self._add(url, "CreativeWork", name=path, version=named[path]["revision"], license=license)

    def _figures(self, result: Result) -> Iterator[ContextEntity]:
        """The scores of an evaluation, and the figures of checks."""
        key = _key(result)
        if result.stage in CHECKS:
            for number, check in enumerate(checks_in(result.artifact), 1):
                bound = "minValue" if check["at_least"] else "maxValue"
                yield self._value(
                    f"#{key}/{number}",
                    check["name"],
                    check["figure"] if check["figure"] is not None else check["status"],
                    description=f"{check['status']}: {check['compares']}",
                    **{bound: check["tolerance"]},
                )
        if result.stage == "eval":
            scores = (score for score in self.results.scores if score[0].result is result)
            for number, (scored, one) in enumerate(scores, 1):
                yield self._value(f"#{key}/{number}", f"{one.label} on {one.on}", one.values[scored.model])


def _key(result: Result) -> str:
    return f"{result.stage}/{result.name}"


def _described(name: str, path: Path, digest: str) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": name,
        "contentSize": str(path.stat().st_size),
        "encodingFormat": TYPES.guess_type(name)[0] or "application/octet-stream",
        "sha256": sha256,
        "identifier": digest,
    }


def _run(result: Result) -> dict[str, Any]:
    return read_json(result.artifact.manifest_path.with_name("run.json"))


def _ended(run: dict[str, Any]) -> str:
    """When the last attempt ended, in ISO 8601."""
    started = datetime.fromisoformat(run["started"])
    return (started + timedelta(seconds=round(run["attempts"][-1]))).isoformat()


def _public(settings: Any) -> Any:
    """Settings without the folders of local models."""
    if isinstance(settings, dict):
        return {
            key: shown_path(value) if key == "path" and isinstance(value, str) else _public(value)
            for key, value in settings.items()
        }
    return [_public(one) for one in settings] if isinstance(settings, list) else settings
