"""The files of a result to upload: those that its manifest describes, with verified digests, and its card. Nothing else."""

from dataclasses import dataclass
from pathlib import Path

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.publishing.card import CARD
from snaketune.stages.job import RESULTS, result_at

# Snakemake writes this file into output folders.
SNAKEMAKE_FILE = ".snakemake_timestamp"


@dataclass(frozen=True, kw_only=True)
class File:
    """One file to upload."""

    path: Path
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Upload:
    """All files of a model to upload.

    Attributes:
        files: The files by their names in the repository, sorted.
        fingerprint: Fingerprint of its training.
    """

    files: dict[str, File]
    fingerprint: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def upload_of(model: str, results: Path = RESULTS) -> Upload:
    """Collect all files of a model and its card.

    Args:
        model: `sft:NAME` or `dpo:NAME`.
    Raises:
        SnaketuneError: If a file is missing or changed, the card is of another result, or there are files that no manifest has.
    """
    kind, name = model.split(":")
    trained = result_at(results / kind / name / "manifest.json")
    card = result_at(results / "card" / f"{kind}-{name}" / "manifest.json")
    if digest_file(trained.manifest_path) not in card.manifest["inputs"]["manifests"]:
        raise SnaketuneError(
            f"{card.manifest_path} is of another result of {model}; run: snakemake {card.manifest_path}"
        )
    _refuse_others(trained)
    files = {file: _file(trained, file) for file in trained.manifest["payload"]} | {CARD: _file(card, CARD)}
    return Upload(files=dict(sorted(files.items())), fingerprint=trained.manifest["fingerprint"])


def _refuse_others(artifact: Artifact) -> None:
    described = {*artifact.manifest["payload"], *artifact.manifest["records"], SNAKEMAKE_FILE}
    present = (path.relative_to(artifact.folder).as_posix() for path in artifact.folder.rglob("*") if not path.is_dir())
    if others := sorted(set(present) - described):
        raise SnaketuneError(
            f"{artifact.folder} has {', '.join(others[:5])}, not in {artifact.manifest_path}; move these files elsewhere"
        )


def _file(artifact: Artifact, name: str) -> File:
    path = artifact.file(name)
    return File(path=path, bytes=path.stat().st_size, digest=artifact.manifest["payload"][name]["digest"])
