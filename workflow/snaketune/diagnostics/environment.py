"""Checks of a run's environment: free disk space, features of the file system, and models on the Hub."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from snaketune.config.base_models import Pretrained, Scratch
from snaketune.models.memory import TracedModel
from snaketune.packing.reader import is_slow_to_map
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightRun

GB = 1e9
SECONDS_TO_ANSWER = 10.0


def check_disk_space(run: PreflightRun, planned: TracedModel, width: int, folder: Path) -> Iterator[Finding]:
    """Check that the result fits on the disk, with two checkpoints: the older one is removed after the newer one is complete.
    With `keep: best`, two more copies of the trained weights; each checkpoint of averaged weights has one more.

    Args:
        width: bytes per number of the result.
        folder: the folder of all results.
    """
    free = shutil.disk_usage(folder).free
    whole = run.run.lora is None or run.run.lora.merge
    result = width * (planned.parameters if whole else planned.trained)
    # Of each checkpoint: weights and two optimizer states, in float32.
    training = run.run.training
    copies = 3 + (training.keep == "best") + (training.average is not None)
    needed = result + 2 * 4 * copies * planned.trained
    do = "free disk space (`snakemake clean_work` removes old work)"
    # An existing result may be current, and then nothing is written.
    if result > free and not (folder / run.key.replace(".", "/", 1) / "manifest.json").is_file():
        problem = f"its result takes up to {result / GB:.1f} GB, but the disk of {folder} has {free / GB:.1f} GB free"
        yield Finding(key=run.key, problem=problem, do=f"{do}, or move results to another disk")
    elif needed > free:
        problem = f"result and checkpoints take up to {needed / GB:.1f} GB, but the disk has {free / GB:.1f} GB free"
        yield Finding(key=run.key, problem=problem, do=do, certain=False)


def check_file_system(folder: Path) -> Iterator[Finding]:
    """Check that a folder's file system has what results rely on: locks, and fast memory mapping."""
    try:
        with TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        problem = f"the file system of {folder} has no locks ({error.strerror})"
        do = (
            "jobs detect each other by heartbeats in their work folders, which takes 90 seconds after a crash; a file system "
            "with flock is faster"
        )
        yield Finding(key="results", problem=problem, do=do, certain=False)
    if is_slow_to_map(folder):
        problem = f"the file system of {folder} is slow to map, so rows are read into memory first"
        do = "move results to a local disk if they don't fit in memory"
        yield Finding(key="operation.load_in_memory", problem=problem, do=do, certain=False)


def check_hub(key: str, base: Pretrained | Scratch | None) -> Iterator[Finding]:
    """Check that a model from the Hub is cached or can be downloaded: repository, revision, and safetensors in it.

    Args:
        key: the config key that names it.
    """
    if not isinstance(base, Pretrained) or Path(base.path).is_dir():
        return
    # The import takes a second, so it is done for models from the Hub only.
    from huggingface_hub import HfApi, errors, snapshot_download

    path, revision, certain = base.path, base.revision or "main", True
    # It may be in the cache.
    with suppress(OSError, ValueError):
        if any(Path(snapshot_download(path, revision=revision, local_files_only=True)).glob("*.safetensors")):
            return
    try:
        info = HfApi().model_info(path, revision=revision, timeout=SECONDS_TO_ANSWER)
        if info.gated:
            # The description of a gated model is public, its files aren't.
            HfApi().auth_check(path)
        if any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            return
        problem = f"{path} has no safetensors at revision {revision!r}"
        do = "choose a revision that has them; other formats could run code and aren't read"
    except errors.GatedRepoError:
        problem = f"{path} is gated on the Hub, and your account has no access"
        do = "accept its conditions on its page, and set HF_TOKEN in the environment"
    except errors.RevisionNotFoundError:
        problem, do = f"{path} has no revision {revision!r}", "choose one that is on its page"
    except errors.RepositoryNotFoundError:
        problem = f"the Hub has no model {path!r}, or your account can't see it"
        do = "check the name, which is no local folder either; for a private model set HF_TOKEN in the environment"
    except Exception as error:
        # Any other error: libraries have many names for a network failure, and the next try may succeed.
        name, certain = type(error).__name__, isinstance(error, errors.OfflineModeIsEnabled)
        problem = f"{path} isn't in the Hub's cache on this machine, and the Hub can't be reached ({name})"
        do = f"download it on a machine with a network: hf download {path} --revision {revision}"
    yield Finding(key=f"{key}.path", problem=problem, do=do, certain=certain)
