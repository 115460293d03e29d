"""Cache of generated responses, so that changes of other parts of an evaluation don't generate them again."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from snaketune.evaluation.generation import GeneratedText
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.row_store import RowStore

# Modules whose code affects responses: generation, merging of adapters, the model's own attention.
CODE = ("snaketune.evaluation.generation", "snaketune.models.adapter_stack", "snaketune.engine.model.attention")
LIBRARIES = ("torch", "transformers", "peft")


class ResponseCache:
    """Responses by digest of the prompt (`known`), kept as rows of one key: the digest of everything else that affects them."""

    def __init__(self, work_root: Path, key_parts: dict[str, Any]):
        """Args: key_parts: parts of the key besides code and libraries, as JSON: weights, tokenizer, settings, device type."""
        code, versions = [code_digest(module) for module in CODE], [installed_version(name) for name in LIBRARIES]
        self.rows = RowStore(work_root, key_parts | {"code": code, "versions": versions})
        self.known: dict[bytes, GeneratedText] = {}

    def find(self, prompts: Iterable[bytes]) -> None:
        """Read the kept responses to these prompts, given by digest, into `known`."""
        self.known |= {prompt: GeneratedText(*json.loads(text)) for prompt, text in self.rows.find(prompts).items()}

    def add(self, new: dict[bytes, GeneratedText]) -> None:
        """Add responses, by digest of the prompt, and keep them."""
        self.known |= new
        self.rows.add({prompt: json.dumps(text).encode() for prompt, text in new.items()})


def prompt_digest(prompt: np.ndarray) -> bytes:
    """Return the digest of a prompt's tokens, int32[n]: 16 bytes."""
    return hashlib.sha256(prompt.astype("<i4").tobytes()).digest()[:16]
