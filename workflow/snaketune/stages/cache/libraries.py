"""The libraries that shape a stage's result with a given spec; their versions are recorded, so that changes can be reported."""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.stages.host.streams import escape_output
from snaketune.stages.specs import (
    CalibrateSpec,
    CorpusSpec,
    EvalSpec,
    GenerateSpec,
    RefLogpsSpec,
    ReproductionSpec,
    TokenizerSpec,
    TrainingSpec,
    VerificationSpec,
)

Inputs = dict[str, list[Artifact]]


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


def always(*names: str) -> Callable[[Any, Inputs], tuple[str, ...]]:
    return lambda spec, inputs: names


def of_corpus(spec: CorpusSpec, inputs: Inputs) -> tuple[str, ...]:
    return _used(
        pyarrow=True,
        datasets=any(source.hub for source in spec.sources),
        ftfy=spec.cleaning.fix_mojibake,
        datafog=spec.cleaning.mask_personal_data,
        py3langid=spec.cleaning.languages,
        rensa=spec.near_duplicates is not None,
    )


def of_tokenizer(spec: TokenizerSpec, inputs: Inputs) -> tuple[str, ...]:
    # An adopted template may have a training template in TRL.
    return _used(tokenizers=True, transformers=True, sentencepiece=spec.adopt is None, trl=spec.adopt is not None)


def of_training(spec: TrainingSpec, inputs: Inputs) -> tuple[str, ...]:
    # Rows that aren't packed are trained by TRL's trainer, which takes them as a Hub dataset.
    raw = any(pack.manifest.get("format_version") == "2.0" for pack in inputs["pack"])
    return _used(
        torch=True,
        transformers=True,
        accelerate=True,
        peft=spec.lora is not None or _adds_adapters(inputs),
        bitsandbytes=spec.quantization is not None or OPTIMIZERS[spec.training.optimizer].package == "bitsandbytes",
        trl=raw,
        datasets=raw,
    )


def of_calibration(spec: CalibrateSpec, inputs: Inputs) -> tuple[str, ...]:
    return of_training(spec.run, inputs)


def of_reference(spec: RefLogpsSpec, inputs: Inputs) -> tuple[str, ...]:
    adapters = spec.apart or _adds_adapters(inputs)
    return _used(torch=True, transformers=True, peft=adapters, bitsandbytes=spec.quantization is not None)


def of_evaluation(spec: EvalSpec, inputs: Inputs) -> tuple[str, ...]:
    has_tasks = spec.tasks is not None
    return _used(torch=True, transformers=True, peft=_adds_adapters(inputs), lm_eval=has_tasks, datasets=has_tasks)


def of_verification(spec: VerificationSpec, inputs: Inputs) -> tuple[str, ...]:
    reads_gguf = spec.gguf_type is not None
    return _used(torch=True, transformers=True, accelerate=True, peft=spec.run.lora is not None, gguf=reads_gguf)


def of_reproduction(spec: ReproductionSpec, inputs: Inputs) -> tuple[str, ...]:
    return of_training(spec.run, inputs | {"model": inputs["start"][:1]})


def of_responses(spec: GenerateSpec, inputs: Inputs) -> tuple[str, ...]:
    # vLLM is in an environment of its own; its version is in the manifest.
    return _used(torch=True, transformers=True, peft=_adds_adapters(inputs))


def _adds_adapters(inputs: Inputs) -> bool:
    """Whether one of the models holds an adapter only (`models.adapter_stack`)."""
    return any("base_dtype" in model.manifest for model in inputs.get("model", ()))


def _used(**libraries: Any) -> tuple[str, ...]:
    return tuple(name for name, used in libraries.items() if used)
