"""Pictures, sounds and films beside a text: a row that has any is refused, since a text without them says something else."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.rows import Malformed

# Links to films and sounds are mostly where a text comes from.
KEY = re.compile(
    r"(?:image|picture|photo|img|audio|video)(?:s|_?\d+|_(?:paths?|files?|bytes))?|(?:image|picture|photo|img)_urls?",
    re.IGNORECASE,
)
# Where a user's text shows one; as a tag with an end it is markup.
PLACEHOLDER, END = "<image>", "</image>"
OTHER_PLACEHOLDERS = re.compile(r"<(?:image|video|audio)[ _]?\d+>|^\s*<(?:video|audio)>|<(?:video|audio)>\s*\Z")


def refuse_media(holder: Mapping[str, Any], where: str = "") -> None:
    """Raise Malformed if a row or a turn has a key of media that holds anything."""
    key = next((key for key in media_keys(tuple(holder)) if _holds_any(holder[key])), None)
    if key is not None:
        raise Malformed(
            "unsupported_part",
            f"{where}{key} goes with the text, which can't hold it; leave such rows out, or the key where it isn't needed",
        )


def shows_media(text: str) -> bool:
    """Whether a user's text has a place where a picture was."""
    if "<" not in text:
        return False
    return (PLACEHOLDER in text and END not in text) or OTHER_PLACEHOLDERS.search(text) is not None


@lru_cache(maxsize=4096)
def media_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Those that name media."""
    return tuple(key for key in keys if KEY.fullmatch(key))


def _holds_any(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_holds_any, value.values()))
        case list():
            return any(map(_holds_any, value))
        case str():
            # As tables write an empty cell.
            return value.strip().lower() not in ("", "nan", "none", "null", "[]", "{}", "false", "0")
    return bool(value)
