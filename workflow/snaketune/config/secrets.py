"""Detection and masking of keys, tokens and passwords, which must not be in a config, a log or a result."""

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "…"
# Tokens of Hugging Face, Weights & Biases, OpenAI-like services, GitHub, AWS and Slack. Plain hex digits aren't matched, as
# revisions look the same.
TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|wandb_v\d_\w{10,}|sk-[\w-]{20,}|gh[opsur]_\w{30,}|github_pat_\w{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,})"
)
# `user:password` before the host of a URL; the password may have an @.
PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/\s]+(?=@)")
# The value of a signature or a key in the query of a URL, as in signed URLs of object stores.
SIGNATURE_IN_ADDRESS = re.compile(
    r"(://[^\s'\"<>]*?[?&](?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|awsaccesskeyid|googleaccessid"
    r"|key-pair-id|(?:[a-z]+[_-])?(?:token|key|secret|password))=)[^&#\s'\"<>…]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Mask tokens, users with passwords in URLs, and signatures of URLs, in a text.

    >>> without_secrets("no https://me:word@host/x?token=hf_abcdefghijklmnopqrstuvw for you")
    'no https://…@host/x?token=… for you'
    """
    text = TOKEN.sub(HIDDEN, PASSWORD_IN_ADDRESS.sub(HIDDEN, text))
    # A URL may have several.
    while (masked := SIGNATURE_IN_ADDRESS.sub(rf"\1{HIDDEN}", text)) != text:
        text = masked
    return text


def find_secret(config: Any) -> str | None:
    """The dotted key of a value that looks like a secret; None if there is none.

    >>> find_secret({"report": {"note": "with hf_abcdefghijklmnopqrstuvw"}})
    'report.note'
    """
    for keys, value in nested(config):
        if isinstance(value, str) and without_secrets(value) != value:
            return ".".join(keys)
    return None


def nested(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value inside lists and mappings, and these, each once and with the keys and indices that lead to it."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    seen: set[int] = set()
    while waiting:
        keys, value = waiting.pop()
        yield keys, value
        # YAML aliases refer to objects that were checked already.
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([((*keys, str(key)), inner) for key, inner in items])
