"""Cache of generated responses, so that changes of other parts of an evaluation don't generate them again.

    results/.work/.responses/<key>/<digest of the file>.jsonl      {"prompt": digest of its tokens, "text": ..., "tokens": ...}

The key is a digest of everything that affects a response except the prompt. A file is never changed: it is named by the digest
of its content, written under a temporary name and renamed. So any number of jobs can add files concurrently without locks, and
a file whose content doesn't match its name is removed unread.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from snaketune.artifacts.digests import digest_json
from snaketune.evaluation.generation import GeneratedText
from snaketune.stages.cache.clean import RESPONSES
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.libraries import installed_version

# Modules whose code affects responses: generation, merging of adapters, the model's own attention.
CODE = ("snaketune.evaluation.generation", "snaketune.models.adapter_stack", "snaketune.models.attention")
LIBRARIES = ("torch", "transformers", "peft")


class ResponseCache:
    """Cached responses of one key, the digest of everything that affects a response except its prompt; by digest of the
    prompt."""

    def __init__(self, work_root: Path, key_parts: dict[str, Any]):
        """Args: key_parts: parts of the key besides code and libraries, as JSON: weights, tokenizer, settings, device type."""
        code, versions = [code_digest(module) for module in CODE], [installed_version(name) for name in LIBRARIES]
        self.key = digest_json(key_parts | {"code": code, "versions": versions})[:32]
        self.folder = work_root / RESPONSES / self.key
        self.known: dict[str, GeneratedText] = {}
        # Symbolic links may lead to files of others, which must not be read or written.
        self.usable = not any(path.is_symlink() for path in (self.folder, self.folder.parent))
        # Sorted, so that every job uses the same of two responses to one prompt.
        for path in sorted(self.folder.glob("*.jsonl") if self.usable else ()):
            for line in _intact(path):
                row = json.loads(line)
                self.known.setdefault(row["prompt"], GeneratedText(row["text"], row["tokens"]))

    def add(self, new: dict[str, GeneratedText]) -> None:
        """Add responses, by digest of the prompt, and write them to the cache."""
        self.known |= new
        if not self.usable:
            return
        rows = [{"prompt": prompt, "text": text, "tokens": tokens} for prompt, (text, tokens) in sorted(new.items())]
        content = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()
        name = f"{_digest(content)}.jsonl"
        partial = self.folder / f".{name}.{os.getpid()}.partial"
        # Without write access, responses are generated again next time.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            with partial.open("xb") as file:
                file.write(content)
            partial.replace(self.folder / name)


def prompt_digest(prompt: np.ndarray) -> str:
    """Return the digest of a prompt's tokens, int32[n]."""
    return _digest(prompt.astype("<i4").tobytes())


def _intact(path: Path) -> list[bytes]:
    with suppress(OSError):
        content = path.read_bytes()
        if _digest(content) == path.stem:
            return content.splitlines()
        print(f"{path} is damaged and is removed; its responses are generated again", flush=True)
        path.unlink()
    return []


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
