"""Check that a conda channel has every version that the environments pin: python envs/check_pins.py INDEX

INDEX is a channel: a folder or URL with linux-64/repodata.json and noarch/repodata.json, such as conda-forge (some hundred MB).
Each pin is looked up separately, in a build for the environment's Python. Only conda can check that they are compatible:
`conda env create --dry-run --file envs/data.yaml`.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import yaml

ENVIRONMENTS = Path(__file__).parent
SUBDIRS = ("linux-64", "noarch")


def conda_pins(file: Path) -> list[str]:
    """Return the packages that an environment takes from its channel, as `name=version`."""
    dependencies = yaml.safe_load(file.read_text(encoding="utf-8"))["dependencies"]
    return [pin for pin in dependencies if isinstance(pin, str) and "=" in pin]


def missing(file: Path, index: str) -> list[str]:
    """Return the pins of an environment that the channel lacks."""
    pins = conda_pins(file)
    python = next(pin.split("=")[1] for pin in pins if pin.startswith("python="))
    return [pin for pin in pins if not any(fits(record, pin, python) for record in named(index, pin.split("=")[0]))]


def fits(record: dict, pin: str, python: str) -> bool:
    """Return whether a package has the pinned version and a build for this Python or for any.

    >>> built = {"version": "3.11.2", "depends": ["python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311"]}
    >>> [fits(built, pin, "3.11") for pin in ("matplotlib=3.11.2", "matplotlib=3.11", "matplotlib=3.1")]
    [True, True, False]
    >>> fits(built, "matplotlib=3.11.2", "3.12")
    False
    """
    version = re.escape(pin.split("=")[1])
    builds = [needed.split()[1] for needed in record["depends"] if re.match(r"python_abi \S", needed)]
    return bool(re.fullmatch(rf"{version}(\..*)?", record["version"])) and builds in ([], [f"{python}.*"])


def named(index: str, name: str) -> list[dict]:
    return packages(index).get(name, [])


@cache
def packages(index: str) -> dict[str, list[dict]]:
    """Return all packages of a channel by name."""
    found: dict[str, list[dict]] = {}
    for record in records(index):
        found.setdefault(record["name"], []).append(record)
    return found


def records(index: str) -> Iterator[dict]:
    for subdir in SUBDIRS:
        place = f"{index.rstrip('/')}/{subdir}/repodata.json"
        if "://" in place:
            with urlopen(place) as answer:
                listed = json.load(answer)
        else:
            listed = json.loads(Path(place).read_text(encoding="utf-8"))
        # Of two formats of the files.
        yield from (record for part in ("packages", "packages.conda") for record in listed.get(part, {}).values())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lacking = [(file.name, pin) for file in sorted(ENVIRONMENTS.glob("*.yaml")) for pin in missing(file, sys.argv[1])]
    for name, pin in lacking:
        print(f"envs/{name}: {pin} is not in {sys.argv[1]}")
    sys.exit(bool(lacking))
