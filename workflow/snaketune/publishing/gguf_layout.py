"""A model's folder as llama.cpp's converter has to find it, so that what it writes cuts texts as the model learned them.

The converter takes a sentencepiece tokenizer from `tokenizer.model` and from nothing else. Without that file it puts one
together from tokenizer.json, whose pieces have no ranks and no blanks as it writes them: the file can be loaded, and each text
is other tokens. It also has a blank put before every text, unless the tokenizer's config says otherwise, and for some families
whatever that says.
"""

import json
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError

# What a tokenizer that was trained here has beside tokenizer.json, and what the converter calls it.
TRAINED, CALLED = "sentencepiece.model", "tokenizer.model"
# Of tokenizers that were trained here: tokens and logits of these were held against llama.cpp's own.
FAMILIES = ("llama", "mistral")


def lay_out(model: Artifact, folder: Path) -> Path:
    """Fill `folder` with links to the files of a model, and what the converter needs besides.

    Raises:
        SnaketuneError: a file was damaged, or the tokenizer is one that would come out as another.
    """
    folder.mkdir(parents=True)
    for path in model.files():
        if path.parent == model.folder:
            (folder / path.name).symlink_to(path.resolve())
    _check_tokenizer(folder)
    if (folder / TRAINED).exists():
        (folder / CALLED).symlink_to((folder / TRAINED).resolve())
        said = _read(folder / "tokenizer_config.json") | {"add_prefix_space": False}
        (folder / "tokenizer_config.json").unlink(missing_ok=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def _check_tokenizer(folder: Path) -> None:
    tokenizer, family = (
        _read(folder / "tokenizer.json").get("model", {}),
        _read(folder / "config.json").get("model_type"),
    )
    kind = tokenizer.get("type")
    if (folder / TRAINED).exists():
        if kind != "BPE":
            raise SnaketuneError(
                f"the tokenizer is {kind}, and llama.cpp would read its pieces as byte-pair encoding; train one with model: bpe"
            )
        if family not in FAMILIES:
            raise SnaketuneError(
                f"a tokenizer that was trained here comes out as another one in a GGUF file of architecture {family}; of "
                f"{' and '.join(FAMILIES)} it comes out as it is"
            )
    elif (kind == "Unigram" or tokenizer.get("byte_fallback")) and not (folder / CALLED).exists():
        raise SnaketuneError(
            f"the tokenizer was sentencepiece's, and without its {CALLED} the converter would write another one; copy the "
            f"model's folder, put {CALLED} of the base model into it, and convert that by hand"
        )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
