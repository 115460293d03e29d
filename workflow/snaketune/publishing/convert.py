"""The `convert` stage: a trained model as one GGUF file, by llama.cpp's own converter.

Which architectures and tokenizers it knows, and how it writes them, is llama.cpp's to say; where it fails, its last words are
the error. It is a program of the user's: `convert_hf_to_gguf.py` in the folder that LLAMA_CPP names, or else on PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.publishing.gguf_layout import lay_out
from snaketune.stages.cache.work_folders import WorkFolder, remove
from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.plan.convert_jobs import convert_jobs
from snaketune.stages.specs import ConvertSpec

STAGE = Stage(
    module=__name__,
    spec=ConvertSpec,
    payload="gguf",
    inputs={"model": exactly_one("sft", "dpo")},
    # Weights go through the converter one after the other, and are written from memory.
    cost=Cost(mb=2000, minutes=5, bytes_per_parameter=4, minutes_per_billion=3),
    # By the converter that is there when it runs.
    measures=True,
    jobs=convert_jobs,
)

LAID_OUT = "model"
CONVERTER, FOLDER = "convert_hf_to_gguf.py", "LLAMA_CPP"
LAST_LINES = 12
# Of the environment, what the converter has no use for.
SECRET = re.compile(r"^(HF|HUGGING_FACE)_|(TOKEN|KEY|SECRET|PASSWORD)$")


def build(spec: ConvertSpec, work: WorkFolder, *, model: Artifact) -> Outcome:
    """Fill `work.payload` with `model-<type>.gguf`.

    Raises:
        SnaketuneError: there is no converter, the result is an adapter alone, or the converter failed.
    """
    if "base_dtype" in model.manifest:
        raise SnaketuneError(
            f"{model.folder} holds an adapter alone (lora.merge: false), and a GGUF file holds whole weights; set lora.merge: "
            "true, or give the adapter to llama.cpp's convert_lora_to_gguf.py"
        )
    code = [name for name in model.manifest["payload"] if name.endswith(".py")]
    if code and not model.manifest["spec"]["trust_remote_code"]:
        raise SnaketuneError(
            f"{model.folder} has code ({', '.join(code)}), which the converter might run; nobody trusts it"
        )
    command, converter = find_converter()
    # An attempt that was killed may have left one.
    remove(work.state / LAID_OUT)
    folder, target = lay_out(model, work.state / LAID_OUT), work.payload / f"model-{spec.type}.gguf"
    status, said = _run(
        [*command, str(folder.resolve()), "--outfile", str(target.resolve()), "--outtype", spec.type], work.state
    )
    if status or not target.is_file():
        raise SnaketuneError("\n       ".join([f"{converter} failed (exit status {status}); it said:", *said]))
    return Outcome(about={"converter": digest_file(converter)})


def _run(command: list[str], state: Path) -> tuple[int, list[str]]:
    """The exit status and the last lines of a program, whose words are printed as they come. No shell is there to take any."""
    # It reads a folder. Parts of it would run code that the folder names on the Hub: they get none, no cache, and no token.
    hidden = {"HF_HUB_OFFLINE": "1", "HF_HOME": str((state / "hub").resolve())}
    environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)} | hidden
    said: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.rstrip())
    return process.returncode, list(said)


def find_converter() -> tuple[list[str], Path]:
    """The command that runs llama.cpp's converter, and its file; SnaketuneError if there is none."""
    if folder := os.environ.get(FOLDER):
        found = Path(folder).expanduser() / CONVERTER
        if found.is_file():
            return [sys.executable, str(found)], found
        raise SnaketuneError(
            f"{FOLDER} names {folder!r}, and there is no {CONVERTER} in it; name the folder of llama.cpp"
        )
    if found := shutil.which(CONVERTER):
        # With the Python that it was installed with.
        return [found], Path(found)
    raise SnaketuneError(
        f"llama.cpp's {CONVERTER} isn't here: get it with `git clone https://github.com/ggml-org/llama.cpp`, and say where it "
        f"is with `export {FOLDER}=/path/to/llama.cpp`, or put the script on PATH"
    )
