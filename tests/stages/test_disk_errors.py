"""The error message for a disk that is full or read-only."""

import errno
import resource
import subprocess
import sys

import pytest

from snaketune.stages.host.disk_errors import disk_error_message


@pytest.mark.parametrize(
    "save",
    [
        "from safetensors.numpy import save_file; save_file({'a': np.zeros(9999)}, path)",
        "import pyarrow as pa; from snaketune.tables import write_table; "
        "write_table(path, pa.table({'a': np.zeros(9999)}))",
        "path.write_bytes(bytes(99999))",
    ],
    ids=["safetensors", "arrow", "python"],
)
def test_the_message_is_the_same_for_every_library(tmp_path, save):
    """A limit on the size of files simulates a full disk: the same call fails."""
    script = (
        "import numpy as np\nfrom pathlib import Path\nfrom snaketune.stages.host.disk_errors import disk_error_message\n"
        f"path = Path({str(tmp_path / 'x')!r})\n"
        f"try:\n    {save.replace('; ', chr(10) + '    ')}\n"
        "except Exception as error:\n    print(disk_error_message(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
    )
    assert "the results can't be written: " in done.stdout, done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert "snakemake clean_work frees old work" in done.stdout


def test_no_other_error_is_taken_for_it():
    assert disk_error_message(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    assert disk_error_message(RuntimeError("shapes differ")) is None
