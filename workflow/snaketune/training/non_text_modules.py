"""Completion of a saved text part to the vision-language model that its base is: the same config, files and tensor names.

transformers saves the text part alone, as a model of its own. Tensors of the base that it lacks are copied unchanged, one file
at a time; its own get the names that the base has for them.

    saved                        base                                        result
    lm_head.weight               lm_head.weight                              lm_head.weight, trained
    model.norm.weight            model.language_model.norm.weight            model.language_model.norm.weight, trained
                                 model.visual.patch_embed.proj.weight        the base's
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from snaketune.config.base_models import Pretrained
from snaketune.files import write_json
from snaketune.models.load_model import file_of, read_config

# Files of a processor of images, without which the model takes none.
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def add_non_text_modules(folder: Path, model: PreTrainedModel, base: Pretrained) -> None:
    """Complete `folder`, which `model` was saved to, where the weights at `base` are more than those of `model`. Prints what
    it added, or why the result is the text part alone."""
    config = read_config(base)
    if not hasattr(config, "text_config"):
        return
    for name in PROCESSOR:
        if file := file_of(base.path, base.revision, name):
            shutil.copyfile(file, folder / name)
    if type(config) is type(model.config):
        return
    files, stored = sorted(folder.glob("*.safetensors")), _files_of(base)
    trained = {name for file in files for name in _names(file)}
    new_names = names_in_base(trained, stored)
    if new_names is None:
        print(
            f"only the text part of {base.path} is trained and saved, as a {model.config.model_type} model: its tensors, such "
            f"as {min(trained)}, don't all have a counterpart in the base's files",
            flush=True,
        )
        return
    missing = defaultdict(list)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    for name in sorted(stored.keys() - new_names.values()):
        # A second copy of an embedding that is also the head would be out of date.
        if not f".{name}".endswith(f".{head_name}.weight"):
            missing[stored[name]].append(name)
    parts = [(file, {name: new_names[name] for name in _names(file)}) for file in files]
    parts += [(file, {name: name for name in names}) for file, names in sorted(missing.items())]
    _write_parts(folder, parts)
    config.text_config, config.dtype = model.config, model.config.dtype
    config.save_pretrained(folder)
    copied = sum(map(len, missing.values()))
    print(f"the text part of {base.path} was trained; its other {copied} tensors are copied unchanged", flush=True)


def _write_parts(folder: Path, parts: list[tuple[Path, dict[str, str]]]) -> None:
    """Write the tensors of each file, by their new names, to a file of `folder`, and the index; files in `folder` are moved."""
    size, weight_map = 0, {}
    for number, (source, new_names) in enumerate(parts, start=1):
        target = folder / f"model-{number:05}-of-{len(parts):05}.safetensors.new"
        with safe_open(source, "pt") as file:
            tensors = {new: file.get_tensor(name) for name, new in sorted(new_names.items())}
        size += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, target.stem)
        save_file(tensors, target, metadata={"format": "pt"})
        if source.parent == folder:
            source.unlink()
    for path in folder.glob("*.safetensors.new"):
        path.rename(path.with_suffix(""))
    write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _files_of(base: Pretrained) -> dict[str, Path]:
    """Return the files of a model's tensors, by name of the tensor."""
    if single := file_of(base.path, base.revision, SAFE_WEIGHTS_NAME):
        return dict.fromkeys(_names(Path(single)), Path(single))
    index = json.loads(Path(file_of(base.path, base.revision, SAFE_WEIGHTS_INDEX_NAME)).read_text(encoding="utf-8"))
    files = {name: Path(file_of(base.path, base.revision, name)) for name in set(index["weight_map"].values())}
    return {tensor: files[name] for tensor, name in index["weight_map"].items()}


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def names_in_base(names: Iterable[str], base: Iterable[str]) -> dict[str, str] | None:
    """Return the base's names of tensors; None where they aren't clear. All names with the same first part get the same prefix,
    before that part or instead of it.

    >>> base = {"model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight"}
    >>> names_in_base(["lm_head.weight", "model.language_model.norm.weight"], base)["model.language_model.norm.weight"]
    'model.language_model.norm.weight'
    >>> base = {"model.text.embed.weight", "model.text.norm.weight", "model.visual.norm.weight", "lm_head.weight"}
    >>> names_in_base(["lm_head.weight", "model.embed.weight", "model.norm.weight"], base)["model.norm.weight"]
    'model.text.norm.weight'
    >>> names_in_base(["model.embed.weight"], ["text.model.embed.weight"])
    {'model.embed.weight': 'text.model.embed.weight'}
    >>> names_in_base(["lm_head.weight", "model.norm.weight"], base) is None
    True
    """
    known, first_parts, found = set(base), defaultdict(list), {}
    for name in names:
        first_parts[name.partition(".")[0]].append(name)
    for first, group in first_parts.items():
        for cut in ("", f"{first}."):
            tails = {name: name.removeprefix(cut) for name in group}
            ends = f".{min(tails.values())}"
            prefixes = {name.removesuffix(ends[1:]) for name in known if f".{name}".endswith(ends)}
            fitting = [prefix for prefix in prefixes if all(prefix + tail in known for tail in tails.values())]
            if "" in fitting or len(fitting) == 1:
                prefix = "" if "" in fitting else fitting[0]
                found |= {name: prefix + tail for name, tail in tails.items()}
                break
        else:
            return None
    return found
