"""The `convert` stage: convert a trained model to a GGUF file with llama.cpp's converter.

The converter decides which architectures and tokenizers are supported; if it fails, its last lines of output are in the error.
The user installs it: `convert_hf_to_gguf.py` in the folder that LLAMA_CPP names, else on PATH.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file
from snaketune.stages.cache.work_folders import WorkFolder, remove
from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.published_jobs import convert_jobs
from snaketune.stages.specs import ConvertSpec

STAGE = Stage(
    module=__name__,
    spec=ConvertSpec,
    payload="gguf",
    inputs={"model": exactly_one("sft", "dpo", "merge", entries=("spec.trust_remote_code",))},
    # The converter processes one tensor after the other in memory.
    cost=Cost(mb=2000, minutes=5, bytes_per_parameter=4, minutes_per_billion=3, disk_per_parameter=2),
    # The result depends on the converter that is installed when it runs.
    measures=True,
    jobs=convert_jobs,
)

LAYOUT = "model"
CONVERTER, LLAMA_CPP = "convert_hf_to_gguf.py", "LLAMA_CPP"
LAST_LINES = 12
# Environment variables that the converter doesn't get.
SECRET = re.compile(r"^(HF|HUGGING_FACE)_|(TOKEN|KEY|SECRET|PASSWORD)$")
# The sentencepiece file of a tokenizer that was trained here, and the name that the converter expects.
TRAINED_TOKENIZER, CONVERTER_TOKENIZER = "sentencepiece.model", "tokenizer.model"
# Families whose tokens and logits, with a tokenizer that was trained here, were checked against llama.cpp.
FAMILIES = ("llama", "mistral")


def build(spec: ConvertSpec, work: WorkFolder, *, model: Artifact) -> Outcome:
    """Fill `work.payload` with `model-<type>.gguf`.

    Raises:
        SnaketuneError: If there is no converter, the result has only adapter weights, or the converter failed.
    """
    if "base_dtype" in model.manifest:
        raise SnaketuneError(
            f"{model.folder} has only adapter weights (lora.merge: false), and a GGUF file needs full weights; set lora.merge: "
            "true, or give the adapter to llama.cpp's convert_lora_to_gguf.py"
        )
    code = [name for name in model.manifest["payload"] if name.endswith(".py")]
    if code and not model.manifest["spec"]["trust_remote_code"]:
        raise SnaketuneError(
            f"{model.folder} contains Python code ({', '.join(code)}), which the converter might run; if you "
            "trust it, set base.trust_remote_code: true in the config of the SFT run and train again"
        )
    command, converter = find_converter()
    # An earlier attempt that was killed may have left the folder.
    remove(work.state / LAYOUT)
    folder, target = lay_out(model, work.state / LAYOUT), work.payload / f"model-{spec.type}.gguf"
    command += [str(folder.resolve()), "--outfile", str(target.resolve()), "--outtype", spec.type]
    status, output = _run(command, work.state)
    if status or not target.is_file():
        raise SnaketuneError(
            "\n       ".join([f"{converter} failed (exit status {status}); its last output:", *output])
        )
    return Outcome(about={"converter": digest_file(converter)})


def find_converter() -> tuple[list[str], Path]:
    """The command that runs llama.cpp's converter, and its file. Raises SnaketuneError if there is none."""
    if folder := os.environ.get(LLAMA_CPP):
        path = Path(folder).expanduser() / CONVERTER
        if path.is_file():
            return [sys.executable, str(path)], path
        raise SnaketuneError(f"{LLAMA_CPP} is {folder!r}, which has no {CONVERTER}; set it to the folder of llama.cpp")
    if path := shutil.which(CONVERTER):
        # It runs with the Python that it was installed with.
        return [path], Path(path)
    raise SnaketuneError(
        f"llama.cpp's {CONVERTER} was not found: get it with `git clone https://github.com/ggml-org/llama.cpp`, and set its "
        f"folder with `export {LLAMA_CPP}=/path/to/llama.cpp`, or put the script on PATH"
    )


def lay_out(model: Artifact, folder: Path) -> Path:
    """Fill `folder` with links to the files of a model, so that the GGUF file tokenizes text as in training.

    The converter reads a sentencepiece tokenizer only from `tokenizer.model`. Without that file it builds one from
    tokenizer.json, whose tokens have no ranks and another notation for spaces: the GGUF file loads, but tokenizes differently.
    It also adds a space before every text unless tokenizer_config.json disables that; for some model families it always does.

    Raises:
        SnaketuneError: If a file is damaged, or the converter would write a different tokenizer.
    """
    folder.mkdir(parents=True)
    for path in model.files():
        if path.parent == model.folder:
            (folder / path.name).symlink_to(path.resolve())
    _check_tokenizer(folder)
    if (folder / TRAINED_TOKENIZER).exists():
        (folder / CONVERTER_TOKENIZER).symlink_to((folder / TRAINED_TOKENIZER).resolve())
        config = folder / "tokenizer_config.json"
        content = _read(config) | {"add_prefix_space": False}
        config.unlink(missing_ok=True)
        config.write_text(json.dumps(content), encoding="utf-8")
    return folder


def _check_tokenizer(folder: Path) -> None:
    tokenizer = _read(folder / "tokenizer.json").get("model", {})
    kind, family = tokenizer.get("type"), _read(folder / "config.json").get("model_type")
    if (folder / TRAINED_TOKENIZER).exists():
        if kind != "BPE":
            raise SnaketuneError(
                f"the tokenizer is {kind}, which llama.cpp would read as BPE; train one with model: bpe"
            )
        if family not in FAMILIES:
            raise SnaketuneError(
                f"for architecture {family}, the converter would change a tokenizer that was trained here; it keeps it for "
                f"{' and '.join(FAMILIES)}"
            )
    elif (kind == "Unigram" or tokenizer.get("byte_fallback")) and not (folder / CONVERTER_TOKENIZER).exists():
        raise SnaketuneError(
            f"the tokenizer is from sentencepiece, and without its {CONVERTER_TOKENIZER} the converter would change it; copy "
            f"the model's folder, add {CONVERTER_TOKENIZER} of the base model, and run the converter on the copy yourself"
        )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _run(command: list[str], state: Path) -> tuple[int, list[str]]:
    """Run a program without a shell, and print its output. Return the exit status and the last lines."""
    # The converter may run code from the Hub that the model's config names; offline, without cache and token, it can't.
    hidden = {"HF_HUB_OFFLINE": "1", "HF_HOME": str((state / "hub").resolve())}
    environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)} | hidden
    output: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            output.append(line.rstrip())
    return process.returncode, list(output)
