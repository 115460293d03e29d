"""Five runs with one deliberate fault each, and one without: does the doctor name the cause first? (make bench-doctor)

Each is the demo's SFT run with one thing wrong, in a folder of its own, inspected by `snakemake doctor`. What it said goes to
results/bench/doctored.json and, as a table, to docs/diagnosing.md.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks import processes
from benchmarks.results import ROOT, keep_table, made_on, markdown, write_json

FOUND, DOCUMENT = ROOT / "results/bench/doctored.json", ROOT / "docs/diagnosing.md"
# By case: the misconfiguration, the settings that it changes, and the expected beginning of the first finding.
CASES: dict[str, tuple[str, dict[str, Any], str | tuple[str, ...]]] = {
    "well": ("nothing", {}, ("no setting gains", "compute: ")),
    "one row": (
        "16 rows per step, one per micro-batch",
        {"training": {"batch_rows": 16, "micro_batch_rows": 1}, "packing": {"length": 128}}, "the micro-batch",
    ),
    "unpacked": (
        "no packing, rows four times as long as the documents",
        {"training": {"batch_rows": 16, "micro_batch_rows": 16}, "packing": {"length": 256, "strategy": "none"}}, "padding",
    ),
    "recomputed": (
        "gradient checkpointing although memory suffices", {"training": {"gradient_checkpointing": True}},
        "recomputed activations",
    ),
    "pad is eos": (
        "an adopted tokenizer that pads with its end-of-turn token", {}, "what is learned: sft.demo.tokenizer",
    ),
    "masked": ("a template that marks the wrong words", {}, "the chat template doesn't mark all that assistants say"),
}  # fmt: skip
MASKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{{ m.content[:-1] }}"
    "{% generation %}{{ m.content[-1:] }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_of(case: str, folder: Path) -> dict[str, Any]:
    """Return the demo's corpora and SFT run with the fault of this case."""
    demo = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config = {key: demo[key] for key in ("corpora", "tokenizers", "sft")}
    run = config["sft"]["demo"]
    for section, keys in CASES[case][1].items():
        run[section] = run.get(section, {}) | keys
    if case == "masked":
        (folder / "masked.jinja").write_text(MASKED, encoding="utf-8")
        config["tokenizers"]["demo"]["chat_template"] = "masked.jinja"
    if case == "pad is eos":
        # The tokenizer is trained, loses its padding token, and is adopted.
        snakemake(folder, config, "results/tokenizer/demo/manifest.json")
        shutil.copytree(folder / "results/tokenizer/demo/tokenizer", folder / "own")
        shutil.rmtree(folder / "results")
        file = folder / "own/tokenizer_config.json"
        own = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(own | {"pad_token": own["eos_token"]}), encoding="utf-8")
        config["tokenizers"]["demo"] = {"adopt": "own"}
    return config


def snakemake(folder: Path, config: dict[str, Any], target: str) -> subprocess.CompletedProcess:
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    options = ("--cores", "all", "--retries", "0", "--resources", "gpu=1")
    return processes.snakemake(folder, *processes.SNAKEFILE, *options, "--", target)


def look_at(case: str) -> dict[str, Any]:
    with TemporaryDirectory(prefix="doctored-") as name:
        folder = Path(name)
        (folder / "resources").symlink_to(ROOT / "resources")
        done = snakemake(folder, config_of(case, folder), "doctor")
        report = folder / "results/bottleneck/sft-demo/doctor/doctor.json"
        if report.is_file():
            found = json.loads(report.read_text(encoding="utf-8"))
            return {"said": found["limit"], "table": report.with_name("doctor.md").read_text(encoding="utf-8")}
        errors = [line.removeprefix("error: ") for line in done.stdout.splitlines() if line.startswith("error: ")]
        return {"said": errors[0] if errors else f"nothing: {done.stdout[-4000:]}", "table": ""}


def main() -> None:
    found = {}
    for case in sys.argv[1:] or CASES:
        one = look_at(case)
        found[case] = one | {"right": one["said"].startswith(CASES[case][2])}
        print(f"{case}: {'right' if found[case]['right'] else 'WRONG'}: {one['said']}", flush=True)
    write_json(FOUND, {"made": made_on("benchmarks.doctored"), "cases": found}, indent=1)
    rows = [(CASES[case][0], one["said"].partition("\n")[0].replace("|", "\\|")) for case, one in found.items()]
    keep_table(DOCUMENT, "doctored", markdown(("misconfiguration", "the doctor's first finding"), rows))
    wrong = sum(not one["right"] for one in found.values())
    sys.exit(f"{wrong} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
