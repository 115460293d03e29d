"""The libraries that can shape the results of stages; their versions are recorded, so that changes can be reported."""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from snaketune.stages.host.streams import escape_output

# Libraries that several stages declare. Manifests have the versions of those that are installed.
CORPUS = ("pyarrow", "datasets", "ftfy", "datafog", "py3langid", "rensa")
# vLLM is in an environment of its own; its version is in the manifests of what it made.
MODEL = ("torch", "transformers", "peft")
FROZEN = (*MODEL, "bitsandbytes")
# Rows that aren't packed are trained by TRL's trainer, which takes them as a dataset of the library `datasets`.
TRAINING = (*FROZEN, "accelerate", "trl", "datasets")


def quiet_libraries() -> None:
    """Prepare this process for the output of libraries, before any is imported: control characters in it are escaped, warnings
    that concern no user are silenced, and progress bars are rare. peft imports bitsandbytes wherever it is installed, which
    would warn in every log about kernels that aren't used."""
    escape_output()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # It warns of every model that it didn't load itself.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    # Progress bars, of lm-evaluation-harness for example, would add ten lines per second to a log.
    os.environ.setdefault("TQDM_MININTERVAL", "10")


@contextmanager
def importing() -> Iterator[None]:
    """Disable Python's garbage collector during imports: searching what they create takes as long as creating it.

    With torch, transformers and peft: 6.5 s of a core, 3.5 s without.
    """
    gc.disable()
    try:
        yield
    finally:
        # Later collections skip them too.
        gc.freeze()
        gc.enable()


def installed_version(distribution: str) -> str | None:
    """The version of a distribution in this environment; None if it isn't installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
