"""Responses that were written already: whatever else of an evaluation changes, they aren't generated again.

    results/.work/.responses/<key>/<digest of the file>.jsonl      {"prompt": digest of its tokens, "text": ..., "tokens": ...}

The key is a digest of all that shapes a response besides the prompt, so another `samples`, `answer_pattern` or corpus finds
what is there, and so does an evaluation that was killed. A file is never changed: each is called after its content, written
beside and renamed. So any number of jobs can add at once, without locks, and one that isn't what its name says (half written,
damaged) is removed and not read.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from snaketune.artifacts.digests import digest_json
from snaketune.evaluation.generation import GeneratedText
from snaketune.stages.cache.clean import RESPONSES
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.libraries import installed_version

# Whose code shapes a response: how it is written, how weights come together, how a model attends by itself.
CODE = ("snaketune.evaluation.generation", "snaketune.models.adapter_stack", "snaketune.models.attention")
LIBRARIES = ("torch", "transformers", "peft")


class ResponseCache:
    """Those of one key.

    Attributes:
        key: digest of all that shapes a response besides its prompt.
        known: by digest of the prompt.
    """

    def __init__(self, work_root: Path, shaped_by: dict[str, Any]):
        """Args: shaped_by: besides code and libraries, as plain JSON: weights, tokenizer, settings, kind of device."""
        parts = {
            "code": [code_digest(module) for module in CODE],
            "versions": [installed_version(x) for x in LIBRARIES],
        }
        self.key = digest_json(shaped_by | parts)[:32]
        self.folder = work_root / RESPONSES / self.key
        self.known: dict[str, GeneratedText] = {}
        # What a link leads to is not ours to read or to write.
        self.there = not any(path.is_symlink() for path in (self.folder, self.folder.parent))
        # Sorted, so that of two responses to one prompt every job takes the same.
        for path in sorted(self.folder.glob("*.jsonl") if self.there else ()):
            for line in _intact(path):
                row = json.loads(line)
                self.known.setdefault(row["prompt"], GeneratedText(row["text"], row["tokens"]))

    def add(self, new: dict[str, GeneratedText]) -> None:
        """Args: new: by digest of the prompt."""
        self.known |= new
        if not self.there:
            return
        rows = [{"prompt": prompt, "text": text, "tokens": tokens} for prompt, (text, tokens) in sorted(new.items())]
        content = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()
        name = f"{_digest(content)}.jsonl"
        partial = self.folder / f".{name}.{os.getpid()}.partial"
        # A folder that can't be written to costs the time of generating again, and nothing else.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            with partial.open("xb") as file:
                file.write(content)
            partial.replace(self.folder / name)


def prompt_digest(prompt: np.ndarray) -> str:
    """Of its tokens, int32[n]."""
    return _digest(prompt.astype("<i4").tobytes())


def _intact(path: Path) -> Iterable[bytes]:
    try:
        content = path.read_bytes()
    except OSError:
        return ()
    if _digest(content) == path.stem:
        return content.splitlines()
    print(f"{path} isn't intact and is removed; what it held is generated again", flush=True)
    with suppress(OSError):
        path.unlink()
    return ()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
