"""A complete first config for files and a base model, from what their previews find: `python -m snaketune init`.

What it chooses stands in the file with the reason, for a person to check: how each file is read, the row length, LoRA or all
weights, learning rates, the batch size.
"""

import math
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from safetensors import safe_open

from snaketune.config.load import load
from snaketune.corpus.rows import TEXT
from snaketune.errors import SnaketuneError
from snaketune.preview.rendered_rows import load_renderer
from snaketune.preview.source_preview import SourcePreview, preview_file

NAMES = {"conversations": "chat", "preferences": "pairs", "unpaired": "ratings", TEXT: "documents"}
# Full training in mixed precision: weights, gradients and AdamW's two states, in bytes; the rest is for activations.
BYTES_PER_PARAMETER, USABLE = 16, 0.6
# The model's size in its name: Qwen2.5-0.5B, SmolLM2-135M.
SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BMbm])(?![A-Za-z])")
LEARNING_RATES = {("sft", False): "1.0e-5", ("sft", True): "1.0e-4", ("dpo", False): "5.0e-7", ("dpo", True): "5.0e-6"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# A training of fewer steps hardly moves a model; a batch of more rows is rarely better.
MIN_STEPS, BATCHES = 50, (32, 16, 8, 4)
SHIPPED_TEMPLATE = "resources/chat_templates/chatml.jinja"


def first_config(files: list[str], base: str) -> str:
    """The text of the config. SnaketuneError: a file can't be read, or the files don't fit each other."""
    folder = Path(base) if Path(base).is_dir() else None
    renderer = load_renderer(None, folder if folder and (folder / "tokenizer.json").is_file() else None)
    previews: dict[str, list[SourcePreview]] = defaultdict(list)
    for file in files:
        preview = preview_file(file, renderer)
        if not preview.entry or preview.trouble or not (preview.rendered and len(preview.rendered.lengths)):
            reason = "; ".join(preview.trouble) or preview.undecided or "no row of it can be used"
            raise SnaketuneError(f"{file}: {reason}. Look at it first: python -m snaketune preview {file}")
        previews[preview.reading.kind].append(preview)
    if not previews.keys() & {"conversations", TEXT}:
        raise SnaketuneError(
            "init: none of the files holds conversations or documents, from which an SFT learns; add one"
        )
    parameters, known_by = parameters_of(base, folder)
    memory, device = memory_of_device()
    lora = parameters is None or parameters * BYTES_PER_PARAMETER > USABLE * memory
    if parameters is None:
        reason = "the model's size isn't known here; without `lora`, all weights are trained"
    else:
        needed = parameters * BYTES_PER_PARAMETER / 1e9
        taken = f"all weights of {_count(parameters)} parameters ({known_by}) take {needed:.0f} GB and activations"
        reason = f"{taken}, {device} has {memory / 1e9:.0f} GB"
    lines = [
        "# Written by `python -m snaketune init`. Check what follows a `#`, then: snakemake -n --configfile FILE",
        "",
    ]
    lines += ["corpora:", *(line for kind, found in previews.items() for line in _corpus(kind, found)), ""]
    lines += ["tokenizers:", "  base:", f"    adopt: {_quoted(base)}", *_template(folder), ""]
    learned = "conversations" if "conversations" in previews else TEXT
    runs = [("sft", "tuned", learned, [f"base: {{path: {_quoted(base)}}}", "tokenizer: base"])]
    runs += [("dpo", "aligned", "preferences", ["from: tuned"])] if "preferences" in previews else []
    if "unpaired" in previews:
        runs.append(("dpo", "rated", "unpaired", ["from: tuned", "loss: kto"]))
    section = ""
    for stage, name, kind, keys in runs:
        lines += [] if stage == section else ["", f"{stage}:"] if section else [f"{stage}:"]
        section = stage
        lines += [f"  {name}:", *(f"    {line}" for line in _run(stage, kind, keys, previews[kind], lora, reason))]
    models = ["base:tuned", *(f"{stage}:{name}" for stage, name, *_ in runs)]
    lines += ["", "eval:", "  scores:", f"    models: [{', '.join(models)}]"]
    lines += [f"    {kind}: [{NAMES[kind]}]" for kind in ("conversations", "preferences") if kind in previews]
    text = "\n".join(lines) + "\n"
    load(yaml.safe_load(text))
    return text


def _corpus(kind: str, previews: list[SourcePreview]) -> list[str]:
    """One corpus of all files of a kind, each with how the preview reads it."""
    lines = [f"  {NAMES[kind]}:", f"    kind: {kind}", "    sources:"]
    for preview in previews:
        ((_, entry),) = yaml.safe_load(preview.entry)["corpora"].items()
        (source,) = entry["sources"]
        shown = yaml.safe_dump(source, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000)
        first, *others = shown.splitlines()
        layouts = ", ".join(preview.reading.layouts)
        lines.append(f"      # {preview.why}" + (f"; layout {layouts}" if layouts else ""))
        lines += [f"      - {first}", *(f"        {line}" for line in others)]
        # What a person decides: rows to drop, repairs.
        lines += [f"      {line.strip()}" for line in preview.entry.splitlines() if line.strip().startswith("#")]
    return lines


def _template(folder: Path | None) -> list[str]:
    settings = folder and folder / "tokenizer_config.json"
    given = folder and (folder / "chat_template.jinja").is_file()
    if given or (settings and settings.is_file() and "chat_template" in settings.read_text("utf-8", errors="replace")):
        return []
    if folder:
        return [f"    chat_template: {SHIPPED_TEMPLATE}   # the model has none of its own"]
    return [f"    # chat_template: {SHIPPED_TEMPLATE}   # if the model has none of its own, as base models"]


def _run(stage: str, kind: str, keys: list[str], previews: list[SourcePreview], lora: bool, reason: str) -> list[str]:
    lengths = np.concatenate([preview.rendered.lengths for preview in previews if preview.rendered])
    most, longest = int(np.quantile(lengths, 0.99)), int(lengths.max())
    length = next((length for length in LENGTHS if length >= most), LENGTHS[-1])
    rows = sum(_rows(preview) for preview in previews)
    packed = rows * float(lengths.mean()) / length
    batch = next((batch for batch in BATCHES if packed / batch >= MIN_STEPS), BATCHES[-1])
    steps = math.ceil(packed / batch)
    few = ", few: add rows or epochs" if steps < MIN_STEPS else ""
    about = "" if all(preview.rendered and preview.rendered.exact for preview in previews) else "about "
    adapters = ["lora: {rank: 16}   # " + reason] if lora else [f"# {reason}: lora isn't needed"]
    return [
        keys[0],
        f"corpus: {NAMES[kind]}",
        *keys[1:],
        f"packing: {{length: {length}}}   # 99% of rows have at most {about}{most:,} tokens, the longest {longest:,}",
        *adapters,
        "training:",
        f"  learning_rate: {LEARNING_RATES[stage, lora]}",
        f"  batch_rows: {batch}   # {about}{steps:,} steps{few}: {rows:,} rows fill {packed:,.0f} of {length} tokens",
    ]


def _rows(preview: SourcePreview) -> int:
    """Rows of a file that can be used, as far as the sample tells."""
    rows = sum(sample.rows or len(sample.raws) for sample in preview.samples)
    return round(rows * len(preview.reading.rows) / max(1, preview.rows_read))


def parameters_of(base: str, folder: Path | None) -> tuple[float | None, str]:
    """The number of parameters, and how it is known.

    >>> parameters_of("Qwen/Qwen2.5-0.5B-Instruct", None)
    (500000000.0, 'by its name')
    >>> parameters_of("owner/model-v2", None)
    (None, '')
    """
    if folder:
        count = 0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "np") as weights:
                count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        return (count, "by its files") if count else (None, "")
    found = SIZE.search(base.rsplit("/", 1)[-1])
    return (float(found[1]) * (1e9 if found[2] in "Bb" else 1e6), "by its name") if found else (None, "")


def memory_of_device() -> tuple[float, str]:
    """Bytes of the smallest GPU's memory; without one, of this machine's."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout if shutil.which(command[0]) else ""
    if sizes := [int(size) for size in re.findall(r"^\d+$", listed, re.MULTILINE)]:
        return min(sizes) * 2**20, "a GPU here"
    return float(psutil.virtual_memory().total), "this machine (no GPU)"


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _quoted(text: str) -> Any:
    return yaml.safe_dump(text, width=10_000, allow_unicode=True).split("\n")[0]
