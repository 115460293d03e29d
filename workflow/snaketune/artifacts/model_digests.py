"""Digests of a model's files by what libraries read from them: JSON by its value, weights by their tensors.

Neither the whitespace of a config.json nor the number of files that weights are split into changes a model. The digests of
tensors, and those of their names, are added up, so the sums of two files are those of one file with the tensors of both.
"""

import json
import os
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import xxhash

from snaketune.artifacts.digests import digest_bytes, digest_json
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file

# The names by which transformers finds weights.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The longest header that safetensors reads, and the bytes that are read at once.
HEADER_BYTES, CHUNK_BYTES = 100_000_000, 1 << 20
# Sums are those of 128-bit numbers.
MODULUS = 1 << 128


def digest_model_file(path: Path) -> str:
    """Return the digest of what a library reads from a model's file; of a file that isn't what its suffix says, that of its
    content."""
    try:
        if path.suffix == ".json":
            return _digest_value(path)
        if path.suffix == ".safetensors":
            return _digest_tensors(path)
    except OSError as error:
        raise SnaketuneError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return digest_file(path)


def join_shards(digests: dict[Path, str]) -> dict[Path, str]:
    """Return the digests of a model's files sorted by path, with the digest of one file of weights instead of those of its
    shards and their index.

    Only where the index is right: each tensor is in the file that it names, and all files of weights are named. Otherwise
    which files are read is for the library to decide, and each counts.
    """
    joined = dict(digests)
    for index in [path for path in digests if path.name == INDEX]:
        shards = {path.name: path for path in digests if path.parent == index.parent and path.suffix == ".safetensors"}
        parts = {name: digests[path].split(":") for name, path in shards.items()}
        # With a whole file beside them, transformers reads no shards.
        if (WEIGHTS in parts and len(parts) > 1) or any(part[0] != "tensors" for part in parts.values()):
            continue
        names = _digest_index({name: int(part[2], 16) for name, part in parts.items()})
        metadata = {part[3] for part in parts.values()}
        if len(metadata) == 1 and digests[index].rpartition(":")[2] == names:
            for path in (index, *shards.values()):
                del joined[path]
            tensors, names = (f"{_sum(int(part[at], 16) for part in parts.values()):032x}" for at in (1, 2))
            joined[index.with_name(WEIGHTS)] = f"tensors:{tensors}:{names}:{metadata.pop()}"
    return dict(sorted(joined.items()))


def _digest_value(path: Path) -> str:
    value = json.loads(path.read_bytes())
    # The order of keys counts: that of special tokens decides their ids.
    digest = digest_bytes(json.dumps(value, ensure_ascii=False).encode()).replace("xxh3", "json")
    if not path.name.endswith(".safetensors.index.json"):
        return digest
    names: dict[str, list[str]] = {}
    for name, file in value["weight_map"].items():
        names.setdefault(file, []).append(name)
    return f"{digest}:{_digest_index({file: _sum(map(_hash, some)) for file, some in names.items()})}"


def _digest_index(names: dict[str, int]) -> str:
    """Return the digest of which file holds which tensors. Args: names: by file, the sum of its tensors' names."""
    return digest_json(names)[:32]


def _digest_tensors(path: Path) -> str:
    """Return the sum of the digests of a file's tensors, that of their names, and the digest of its metadata."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError("no safetensors")
        header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", None)
        end, buffer = 0, bytearray(CHUNK_BYTES)
        tensors: list[int] = []
        for name, about in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]):
            begin, stop = about["data_offsets"]
            if begin != end:
                raise ValueError("bytes of no tensor")
            end = stop
            tensors.append(_hash([name, about["dtype"], about["shape"], _digest_bytes(file, end - begin, buffer)]))
        if file.read(1):
            raise ValueError("bytes of no tensor")
    return f"tensors:{_sum(tensors):032x}:{_sum(map(_hash, header)):032x}:{digest_json(metadata)[:16]}"


def _digest_bytes(file: BufferedReader, count: int, buffer: bytearray) -> str:
    digest, view = xxhash.xxh3_128(), memoryview(buffer)
    while count:
        read = file.readinto(view[: min(count, len(view))])
        if not read:
            raise ValueError("the file is cut off")
        digest.update(view[:read])
        count -= read
    return digest.hexdigest()


def _hash(value: Any) -> int:
    return int(digest_json(value)[:32], 16)


def _sum(numbers: Iterable[int]) -> int:
    return sum(numbers) % MODULUS
