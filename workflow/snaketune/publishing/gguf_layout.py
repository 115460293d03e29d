"""Lay out a model's folder for llama.cpp's converter so that the GGUF file tokenizes text as in training.

The converter reads a sentencepiece tokenizer only from `tokenizer.model`. Without that file it builds one from tokenizer.json,
whose tokens have no ranks and another notation for spaces: the GGUF file loads, but tokenizes differently. It also adds a space
before every text unless tokenizer_config.json disables that; for some model families it always does.
"""

import json
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError

# The sentencepiece file of a tokenizer that was trained here, and the name that the converter expects.
TRAINED_TOKENIZER, CONVERTER_TOKENIZER = "sentencepiece.model", "tokenizer.model"
# Families whose tokens and logits, with a tokenizer that was trained here, were checked against llama.cpp.
FAMILIES = ("llama", "mistral")


def lay_out(model: Artifact, folder: Path) -> Path:
    """Fill `folder` with links to the files of a model, and with the files that the converter needs besides.

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
        config = _read(folder / "tokenizer_config.json") | {"add_prefix_space": False}
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _check_tokenizer(folder: Path) -> None:
    tokenizer, family = (
        _read(folder / "tokenizer.json").get("model", {}),
        _read(folder / "config.json").get("model_type"),
    )
    kind = tokenizer.get("type")
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
