"""The files of a corpus, `train-00000.arrow`, `held_out-00000.arrow` and so on: of one length each, but the last of a split."""

import re
from pathlib import Path

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table


def file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.arrow"


def split_files(corpus: Artifact, split: str) -> list[Path]:
    """The files of a split, verified, in order."""
    names = [name for name in sorted(corpus.manifest["payload"]) if re.fullmatch(rf"{split}-\d{{5,}}\.arrow", name)]
    if not names:
        rebuild = rebuild_command(corpus.manifest_path)
        raise SnaketuneError(f"{corpus.manifest_path} lists no file of split {split}; rebuild it with: {rebuild}")
    return [corpus.file(name) for name in names]


def read_split(corpus: Artifact, split: str) -> pa.Table:
    """The rows of a split, mapped."""
    return pa.concat_tables(map(read_table, split_files(corpus, split)))
