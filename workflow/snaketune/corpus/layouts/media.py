"""Pictures, sounds and films beside a text: a row that has any is refused, since a text without them says something else."""

from collections.abc import Mapping
from typing import Any

from snaketune.corpus.rows import Malformed

KEYS = frozenset(
    f"{name}{ending}"
    for name in ("image", "picture", "photo", "audio", "video")
    for ending in ("", "s", "_url", "_urls", "_path", "_paths", "_file", "_files", "_bytes")
)
# Where a user's text shows one; as a tag with an end it is markup.
PLACEHOLDER, END = "<image>", "</image>"


def refuse_media(holder: Mapping[str, Any], where: str = "") -> None:
    """Raise Malformed if a row or a turn has a key of media that holds anything."""
    if KEYS.isdisjoint(holder):
        return
    key = next((key for key in holder if key in KEYS and holder[key]), None)
    if key is not None:
        raise Malformed(
            "unsupported_part",
            f"{where}{key} goes with the text, which can't hold it; leave such rows out, or the key where it isn't needed",
        )


def shows_media(text: str) -> bool:
    """Whether a user's text has a place where a picture was."""
    return PLACEHOLDER in text and END not in text
