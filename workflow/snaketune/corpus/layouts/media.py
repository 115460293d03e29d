"""Images, audio and video beside a text: such rows are refused, because the text has another meaning without them."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from snaketune.corpus.rows import Malformed

# Links to video and audio are mostly the source of a text.
KEY = re.compile(
    r"(?:image|picture|photo|img|audio|video)(?:s|_?\d+|_(?:paths?|files?|bytes))?|(?:image|picture|photo|img)_urls?",
    re.IGNORECASE,
)
# The placeholder of an image in a user's text; with an end tag it is markup.
PLACEHOLDER, END = "<image>", "</image>"
OTHER_PLACEHOLDERS = re.compile(r"<(?:image|video|audio)[ _]?\d+>|^\s*<(?:video|audio)>|<(?:video|audio)>\s*\Z")


def refuse_media(holder: Mapping[str, Any], where: str = "") -> None:
    """Raise Malformed if a row or a turn has a media key that isn't empty."""
    key = next((key for key in media_keys(tuple(holder)) if _holds_any(holder[key])), None)
    if key is not None:
        raise Malformed(
            "unsupported_part",
            f"{where}{key} belongs to the text, which can't represent it; remove such rows, or the key if it isn't needed",
        )


def shows_media(text: str) -> bool:
    """Return True if a user's text has a media placeholder."""
    if "<" not in text:
        return False
    return (PLACEHOLDER in text and END not in text) or OTHER_PLACEHOLDERS.search(text) is not None


@lru_cache(maxsize=4096)
def media_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that name media."""
    return tuple(key for key in keys if KEY.fullmatch(key))


def _holds_any(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_holds_any, value.values()))
        case list():
            return any(map(_holds_any, value))
        case str():
            # Values of empty cells in tables.
            return value.strip().lower() not in ("", "nan", "none", "null", "[]", "{}", "false", "0")
    return bool(value)
