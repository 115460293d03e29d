"""Run `python -m MODULE ...` as a fork, and everything else in Python itself."""

import os
import sys
from pathlib import Path

_, FORKS, PYTHON, *WORDS = sys.argv

# torchrun starts its workers unbuffered.
if (words := WORDS[1:] if WORDS[:1] == ["-u"] else WORDS)[:1] == ["-m"]:
    sys.stdout.reconfigure(write_through=words is not WORDS)
    sys.path.insert(0, str(Path(FORKS).parent))
    from forks import run_as_fork

    run_as_fork(words[1:], waits=True)
os.execv(PYTHON, [PYTHON, *WORDS])
