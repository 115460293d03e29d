"""Accepted code changes: results made with earlier code count as made with the current code; recorded among the results."""

from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import published_manifests

RECORD = "accepted_code.json"


def accepted_codes(stage: str, code: str, results: Path) -> tuple[str, ...]:
    """Return the digests of other code of the stage that is accepted for the results below `results`, in place of `code`."""
    return tuple(_read(results / RECORD).get(stage, {}).get(code, ()))


def accept(code_of: Callable[[str], str | None], results: Path) -> None:
    """Accept the code that every result below `results` was made with, and print which results that affects.

    Args:
        code_of: the digest of a stage's code, by the stage's name; None for an unknown stage.
    """
    accepted = _read(results / RECORD)
    results_by_code: dict[tuple[str, str], list[str]] = {}
    for path, ((made_by, code),) in published_manifests(
        results, lambda manifest: {(manifest["stage"], manifest["code"])}
    ):
        results_by_code.setdefault((made_by, code), []).append(str(path.parent.relative_to(results)))
    count = 0
    for (stage, made_with), names in results_by_code.items():
        now = code_of(stage)
        known = accepted.setdefault(stage, {})
        if now is None or made_with == now or made_with in known.get(now, ()):
            continue
        # Code that was accepted in place of that code is accepted in place of the current code too.
        known[now] = sorted({made_with, *known.get(now, ()), *known.get(made_with, ())} - {now})
        print(f"accepted, though made with other code of stage {stage}: {', '.join(names)}")
        count += len(names)
    if count:
        write_json(results / RECORD, {stage: known for stage, known in accepted.items() if known})
        print(f"{count} results count as made with the current code; recorded in {results / RECORD}")
    else:
        print("nothing to accept: all results count as made with the current code")


def _read(record: Path) -> dict[str, dict[str, list[str]]]:
    try:
        return TypeAdapter(dict[str, dict[str, list[str]]]).validate_json(record.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise SnaketuneError(
            f"{record} can't be read ({problem}); remove it, and accept again what you want to reuse"
        ) from None
