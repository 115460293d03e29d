"""Detection and masking of keys, tokens and passwords, which must not be in a config, a log or a result."""

import re
from typing import Any

HIDDEN = "…"
# Tokens of Hugging Face, Weights & Biases, OpenAI-like services, GitHub, AWS and Slack. Plain hex digits aren't matched, as
# revisions look the same.
TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|wandb_v\d_\w{10,}|sk-[\w-]{20,}|gh[opsur]_\w{30,}|github_pat_\w{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,})"
)
# `user:password` before the host of a URL.
PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")


def without_secrets(text: str) -> str:
    """Mask tokens, and users with passwords in URLs, in a text.

    >>> without_secrets("no https://me:word@host/x?token=hf_abcdefghijklmnopqrstuvw for you")
    'no https://…@host/x?token=… for you'
    """
    return TOKEN.sub(HIDDEN, PASSWORD_IN_ADDRESS.sub(HIDDEN, text))


def find_secret(given: Any, key: str = "", seen: set[int] | None = None) -> str | None:
    """The dotted key of a value that looks like a secret; None if there is none.

    >>> find_secret({"report": {"note": "with hf_abcdefghijklmnopqrstuvw"}})
    'report.note'
    """
    if isinstance(given, str):
        return key if TOKEN.search(given) or PASSWORD_IN_ADDRESS.search(given) else None
    seen = set() if seen is None else seen
    # YAML aliases refer to objects that were checked already.
    if not isinstance(given, dict | list) or id(given) in seen:
        return None
    seen.add(id(given))
    items = given.items() if isinstance(given, dict) else enumerate(given)
    keys = (find_secret(value, f"{key}.{name}" if key else str(name), seen) for name, value in items)
    return next((one for one in keys if one), None)
