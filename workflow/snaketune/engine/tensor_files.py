"""Named tensors of a checkpoint on disk: one safetensors file, or for sharded tensors a folder with several.

    weights.safetensors                              all tensors
    weights/shard-00001-model-00001-of-00002.saf…    the first process's shard of each tensor, and its offset in the tensor

Each process writes its own shards through torch.distributed.checkpoint, without a pickle, and any number of processes read
the parts that they need.
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
# Data type and full shape of a tensor.
Kind = tuple[torch.dtype, torch.Size]
# Approximate bytes per file and process. A file that is being written is in memory twice.
FILE_SIZE = 2**28


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], is_main: bool) -> None:
    """Write tensors: sharded ones by all processes, replicated ones by the main process."""
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        size, files = 0, {}
        for key, tensor in tensors.items():
            # The number, from 1, of the file of each process that holds the tensor.
            files[key] = 1 + size // FILE_SIZE
            size += tensor.numel() * tensor.element_size() // dist.get_world_size()
        writer = HuggingFaceStorageWriter(str(folder / name), fqn_to_index_mapping=files, save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)
    elif is_main:
        folder.mkdir(parents=True, exist_ok=True)
        # Copied, since 8-bit optimizers share one table among all states, and safetensors refuses shared memory.
        copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
        save_file(copies, folder / f"{name}{SUFFIX}")


class StoredTensors:
    """Tensors on disk that `write` wrote.

    Attributes:
        path: the file, or the folder of files.
        tensors: data types and full shapes, by name.
    """

    def __init__(self, folder: Path, name: str):
        self.path = folder / name if (folder / name).is_dir() else folder / f"{name}{SUFFIX}"
        metadata = self._reader().read_metadata().state_dict_metadata
        self.tensors: dict[str, Kind] = {
            key: (tensor.properties.dtype, tensor.size) for key, tensor in metadata.items()
        }

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, or this process's shards of them, with the stored values of the same names, in place."""
        with warnings.catch_warnings():
            # Each process reads on its own, which torch warns about.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load({**tensors}, storage_reader=self._reader(), no_dist=True)

    def _reader(self) -> HuggingFaceStorageReader:
        reader = HuggingFaceStorageReader(str(self.path))
        if self.path.is_file():
            reader.fs = _OneFile()
        return reader


class _OneFile(FileSystem):
    """A file system in which a file is a folder that contains only itself."""

    def ls(self, path: str) -> list[str]:
        return [str(path)]
