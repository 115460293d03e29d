"""Lists of sources in a file of their own: `sources: data/sources.yaml` stands for the list that the file holds."""

from pathlib import Path
from typing import Any

import yaml

from snaketune.config.secrets import find_secret
from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError


def listed_sources(sources: Any) -> Any:
    """The list of a file, if `sources` names one; else `sources` as it is. ValueError: the file holds no list."""
    if not isinstance(sources, str):
        return sources
    path = Path(sources)
    try:
        # The checks of a config; the key of a secret is said, and not the secret.
        check_file(path)
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{sources!r} doesn't exist; it names a YAML file with a list of sources") from None
    except (SnaketuneError, OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{sources!r} can't be read: {error}") from None
    if not isinstance(listed, list):
        raise ValueError(f"{sources!r} holds no list; expected what `sources` takes, such as `- files: [s3://...]`")
    if (key := find_secret(listed)) is not None:
        raise ValueError(
            f"{sources!r}, entry {key}: contains what looks like a key, a token or a password; credentials come from the "
            "environment"
        )
    return listed
