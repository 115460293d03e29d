"""Links in the results folder to a payload that a manifest names: `results/best` → `dpo/NAME/model`."""

import json
from pathlib import Path

from snaketune.errors import SnaketuneError

# Stages whose payloads may be linked to.
LINKED = ("sft", "dpo")


def check_link(link: Path) -> None:
    """Raise SnaketuneError if `link` exists and is no link; Snakemake would remove it, like any output of a rule.

    A dangling link, as to a model that is being trained again, is removed: Snakemake fails when it reads its time.
    """
    if link.is_symlink() and not link.exists():
        link.unlink(missing_ok=True)
    elif link.exists() and not link.is_symlink():
        raise SnaketuneError(f"{link} is no link, but report.sort_by links the best model there; move it away")


def link_payload(out: Path, name: str) -> None:
    """Link `name` beside `out` to the payload that `out/manifest.json` names under `name`; without one, remove the link.

    The link is replaced atomically, and it is relative, so that results can be moved. SnaketuneError if it can't be made.
    """
    link = out.parent / name
    named = json.loads((out / "manifest.json").read_text(encoding="utf-8")).get(name)
    if not named:
        # Only a link that a report made; a stage run from the command line may have other files beside its output.
        if link.is_symlink() and link.readlink().parts[:1] in {(stage,) for stage in LINKED}:
            link.unlink()
        return
    payload = named["payload"]
    parts = Path(payload).parts
    if not parts or parts[0] not in LINKED or ".." in parts:
        raise SnaketuneError(
            f"{out / 'manifest.json'} names {payload!r}, which is no payload of {' or '.join(LINKED)}; remove the manifest and "
            "run again"
        )
    if not (out.parent / payload).is_dir():
        print(f"{link} isn't made: {out.parent / payload} doesn't exist", flush=True)
        return
    check_link(link)
    partial = out.parent / f".{name}.partial"
    try:
        partial.unlink(missing_ok=True)
        partial.symlink_to(payload, target_is_directory=True)
        partial.replace(link)
    except OSError as error:
        raise SnaketuneError(f"{link} can't be linked to {payload}: {error.strerror}") from None
    print(f"{link} → {payload}", flush=True)
