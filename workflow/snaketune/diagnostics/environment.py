"""Where a run works and what it fetches: room on the disk, what the file system can, models on the Hub."""

import fcntl
import shutil
from pathlib import Path
from tempfile import TemporaryFile

from snaketune.config.training_runs import Pretrained, Scratch
from snaketune.models.memory_trace import TracedModel
from snaketune.packing.reader import is_slow_to_map
from snaketune.stages.gpu_needs import Finding
from snaketune.stages.specs import PreflightRun

GB = 1e9
SECONDS_TO_ANSWER = 10.0


def disk_space(run: PreflightRun, planned: TracedModel, width: int, place: Path) -> list[Finding]:
    """Whether the results fit, and the checkpoints beside them: two, as the older one goes when the newer one is there.

    Args:
        width: bytes of a number of the result.
        place: the folder of all results.
    """
    free = shutil.disk_usage(place).free
    whole = run.run.lora is None or run.run.lora.merge
    result = width * (planned.parameters if whole else planned.trained)
    # Weights and two states of the optimizer, in float32.
    checkpoint = 12 * planned.trained
    # One that is there may be current, and then nothing is written.
    made = (place / run.key.replace(".", "/", 1) / "manifest.json").is_file()
    if result > free and not made:
        return [
            Finding(
                key=run.key,
                found=f"its result takes up to {result / GB:.1f} GB, and the disk of {place} has {free / GB:.1f} GB left",
                do="make room there (`snakemake clean_work` tells what old work would free), or move results to another disk",
            )
        ]
    if result + 2 * checkpoint > free:
        return [
            Finding(
                key=run.key,
                found=f"result and checkpoints take up to {(result + 2 * checkpoint) / GB:.1f} GB, and the disk has "
                f"{free / GB:.1f} GB left",
                do="make room (`snakemake clean_work` tells what old work would free)",
                certain=False,
            )
        ]
    return []


def file_system(place: Path) -> list[Finding]:
    """Whether a folder's file system can do what results lean on: locks, and mapping files into memory."""
    found = []
    try:
        with TemporaryFile(dir=place) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        found.append(
            Finding(
                key="results",
                found=f"the file system of {place} has no locks ({error.strerror})",
                do="jobs tell each other apart by heartbeats in their work folders, which takes 90 seconds after a crash; "
                "a file system with flock is quicker",
                certain=False,
            )
        )
    if is_slow_to_map(place):
        found.append(
            Finding(
                key="operation.load_in_memory",
                found=f"the file system of {place} is slow to map, so rows are read into memory first",
                do="put results on a local disk where they don't fit in memory",
                certain=False,
            )
        )
    return found


def hub(key: str, base: Pretrained | Scratch | None) -> list[Finding]:
    """Whether a model from the Hub is here, or can be had: the repository, the revision, and safetensors in it.

    Args:
        key: of the config, that names it.
    """
    if not isinstance(base, Pretrained) or Path(base.path).is_dir() or _is_here(base):
        return []
    revision = base.revision or "main"
    found, do, certain = _on_the_hub(base.path, revision)
    return [Finding(key=f"{key}.path", found=found, do=do, certain=certain)] if found else []


def _is_here(base: Pretrained) -> bool:
    """Whether the Hub's cache has it, as far as it says."""
    # A second to import, for bases from the Hub alone.
    from huggingface_hub import snapshot_download

    try:
        there = Path(snapshot_download(base.path, revision=base.revision or "main", local_files_only=True))
    except (OSError, ValueError):
        return False
    return any(there.glob("*.safetensors"))


def _on_the_hub(path: str, revision: str) -> tuple[str, str, bool]:
    """What keeps it from being fetched, what to do, and whether that is certain; empty where nothing does."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        told = HfApi().model_info(path, revision=revision, timeout=SECONDS_TO_ANSWER)
        if told.gated:
            # Of a gated one everybody may read what it is.
            HfApi().auth_check(path)
    except GatedRepoError:
        return (
            f"{path} is gated on the Hub, and you aren't let in",
            "accept its conditions on its page there, and set HF_TOKEN in the environment",
            True,
        )
    except RevisionNotFoundError:
        return f"{path} has no revision {revision!r}", "name one that is on its page", True
    except RepositoryNotFoundError:
        return (
            f"the Hub has no model {path!r}, or none that you may see",
            "check the name, a folder would be looked for here; for a private one set HF_TOKEN in the environment",
            True,
        )
    except Exception as error:
        # Whatever keeps it from answering: its libraries have many names for that, and it may answer the next time.
        return (
            f"{path} isn't in the Hub's cache here, and the Hub can't be reached ({type(error).__name__})",
            f"fetch it where there is a network: hf download {path} --revision {revision}",
            isinstance(error, OfflineModeIsEnabled),
        )
    if not any(file.rfilename.endswith(".safetensors") for file in told.siblings or ()):
        return (
            f"{path} has no safetensors at revision {revision!r}",
            "choose a revision that has them; other formats could run code and aren't read",
            True,
        )
    return "", "", False
