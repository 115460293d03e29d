"""Named tensors on disk as checkpoints hold them: one safetensors file, or, of what lies in shards, several in a folder.

    weights.safetensors                              all of it
    weights/shard-00001-model-00001-of-00002.saf…    what the first process has of each tensor, and where in the tensor that is

Shards are written by all processes at once, each its own, through torch's distributed checkpoints (without a pickle: what is
where stands in the files' headers). Whoever reads takes the parts that it needs, so any number of processes may, sharing
tensors out or not, whichever wrote them.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

SUFFIX = ".safetensors"
# Bytes of a process's file, about. While it is written it is in memory twice.
FILE_SIZE = 2**28


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], first: bool) -> None:
    """Write tensors: what lies in shards by all processes, what they have alike by the first one.

    Args:
        first: whether this is the process that writes what all have.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        files = _files_of(tensors)
        writer = HuggingFaceStorageWriter(str(folder / name), fqn_to_index_mapping=files, save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)
    elif first:
        folder.mkdir(parents=True, exist_ok=True)
        # Copied, since 8-bit optimizers share one table among all states, and safetensors stores no tensor twice.
        whole = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
        save_file(whole, folder / f"{name}{SUFFIX}")


def _files_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Which of a process's files each tensor goes to, counted from 1."""
    size, found = 0, {}
    for name, tensor in tensors.items():
        found[name] = 1 + size // FILE_SIZE
        size += tensor.numel() * tensor.element_size() // dist.get_world_size()
    return found


class StoredTensors:
    """What `write` wrote.

    Attributes:
        path: the file, or the folder of files.
        tensors: data types and shapes of the whole tensors, by name.
    """

    def __init__(self, folder: Path, name: str):
        self.path = folder / name if (folder / name).is_dir() else folder / f"{name}{SUFFIX}"
        found = self._reader().read_metadata().state_dict_metadata
        self.tensors = {key: (one.properties.dtype, one.size) for key, one in found.items()}

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill these, or this process's shards of them, with what is there under their names."""
        with warnings.catch_warnings():
            # That no other process is asked.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load({**tensors}, storage_reader=self._reader(), no_dist=True)

    def _reader(self) -> HuggingFaceStorageReader:
        reader = HuggingFaceStorageReader(str(self.path))
        if self.path.is_file():
            reader.fs = _OneFile()
        return reader


class _OneFile(FileSystem):
    """As if a file were the folder that it alone is in."""

    def ls(self, path: str) -> list[str]:
        return [str(path)]


def describe_tensor(dtype: torch.dtype, shape: torch.Size) -> str:
    """
    >>> describe_tensor(torch.float32, torch.Size([2, 3]))
    'float32[2, 3]'
    """
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
