"""Five runs with one deliberate fault each, and one without: does the doctor name the cause first? (make bench-doctor)

Each is the demo's SFT run with one thing wrong, in a folder of its own, inspected by `snakemake doctor`. What it said goes to
results/bench/doctored.json and, as a table, to docs/diagnosing.md.
"""

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from benchmarks.results import keep_table, made_on

ROOT = Path(__file__).parents[1]
FOUND, DOCUMENT = ROOT / "results/bench/doctored.json", ROOT / "docs/diagnosing.md"
# By case: the misconfiguration, the settings that it changes, and the expected beginning of the first finding.
CASES: dict[str, tuple[str, dict[str, Any], str | tuple[str, ...]]] = {
    "well": ("nothing", {}, ("no switch of the config", "compute: ")),
    "one row": (
        "16 rows per step, one per micro-batch",
        {"training": {"batch_rows": 16, "micro_batch_rows": 1}, "packing": {"length": 128}},
        "the micro-batch",
    ),
    "unpacked": (
        "no packing, rows four times as long as the documents",
        {"training": {"batch_rows": 16, "micro_batch_rows": 16}, "packing": {"length": 256, "strategy": "none"}},
        "padding",
    ),
    "recomputed": (
        "gradient checkpointing although memory suffices",
        {"training": {"gradient_checkpointing": True}},
        "recomputed activations",
    ),
    "pad is eos": (
        "an adopted tokenizer that pads with its end-of-turn token",
        {},
        "what is learned: sft.demo.tokenizer",
    ),
    "masked": ("a template that marks the wrong words", {}, "the chat template doesn't mark all that assistants say"),
}
MASKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{% generation %}{{ m.content[:1] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(case: str, folder: Path) -> dict[str, Any]:
    """Return the demo's corpora and SFT run with the fault of this case."""
    demo = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config = {key: deepcopy(demo[key]) for key in ("corpora", "tokenizers", "sft")}
    run = config["sft"]["demo"]
    for section, keys in CASES[case][1].items():
        run[section] = run.get(section, {}) | keys
    if case == "masked":
        (folder / "masked.jinja").write_text(MASKED, encoding="utf-8")
        config["tokenizers"]["demo"]["chat_template"] = "masked.jinja"
    if case == "pad is eos":
        _adopted(config, folder)
    return config


def _adopted(config: dict[str, Any], folder: Path) -> None:
    """Train the tokenizer, remove its padding token, and adopt it."""
    (folder / "first.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    snakemake(folder, "first.yaml", "results/tokenizer/demo/manifest.json")
    shutil.copytree(folder / "results/tokenizer/demo/tokenizer", folder / "own")
    shutil.rmtree(folder / "results")
    file = folder / "own/tokenizer_config.json"
    tokenizer_config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(tokenizer_config | {"pad_token": tokenizer_config["eos_token"]}), encoding="utf-8")
    config["tokenizers"]["demo"] = {"adopt": "own"}


def snakemake(folder: Path, config: str, target: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--configfile",
        config,
        "--cores",
        "all",
        "--retries",
        "0",
    ]
    return subprocess.run(
        [*command, "--resources", "gpu=1", "--", target], cwd=folder, env=environment, capture_output=True, text=True
    )


def look_at(case: str) -> dict[str, Any]:
    """Run the doctor and return its output."""
    folder = Path(mkdtemp(prefix="doctored-"))
    try:
        (folder / "resources").symlink_to(ROOT / "resources")
        (folder / "config.yaml").write_text(yaml.safe_dump(config_of(case, folder), sort_keys=False), encoding="utf-8")
        done = snakemake(folder, "config.yaml", "doctor")
        audit = folder / "results/audit/sft-demo/audit/audit.json"
        if audit.is_file():
            found = json.loads(audit.read_text(encoding="utf-8"))
            table = (audit.parent / "audit.md").read_text(encoding="utf-8")
            return {"said": found["holds_back"], "table": table}
        errors = [
            line.removeprefix("error: ")
            for line in done.stdout.splitlines() + done.stderr.splitlines()
            if line.startswith("error: ")
        ]
        return {"said": errors[0] if errors else f"nothing: {done.stdout[-2000:]}{done.stderr[-2000:]}", "table": ""}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    found = {}
    for case in sys.argv[1:] or CASES:
        found[case] = look_at(case) | {"right": False}
        found[case]["right"] = found[case]["said"].startswith(CASES[case][2])
        print(f"{case}: {'right' if found[case]['right'] else 'WRONG'}: {found[case]['said']}", flush=True)
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    FOUND.write_text(
        json.dumps({"made": made_on("benchmarks.doctored"), "cases": found}, indent=1) + "\n", encoding="utf-8"
    )
    lines = ["| misconfiguration | the doctor's first finding |", "|---|---|"]
    lines += [
        f"| {CASES[case][0]} | {one['said'].partition(chr(10))[0].replace('|', chr(92) + '|')} |"
        for case, one in found.items()
    ]
    keep_table(DOCUMENT, "doctored", "\n".join(lines))
    sys.exit(
        f"{sum(not one['right'] for one in found.values())} wrong"
        if not all(one["right"] for one in found.values())
        else 0
    )


if __name__ == "__main__":
    main()
