"""A link beside the folders of the stages to a payload that a manifest names: `results/best` → `dpo/NAME/model`."""

import json
from pathlib import Path

from snaketune.errors import SnaketuneError

# Stages whose payloads are linked to.
LINKED = ("sft", "dpo")


def check_link(link: Path) -> None:
    """Raise SnaketuneError where anything but a link is; Snakemake would remove it, as it does with whatever a rule makes.

    A link to a model that was deleted, or is just being trained again, is taken away: Snakemake fails at the time of what leads
    nowhere.
    """
    if link.is_symlink():
        if not link.exists():
            link.unlink(missing_ok=True)
    elif link.exists():
        raise SnaketuneError(f"{link} is no link, and report.sort_by links the best model there; move it away")


def link_payload(out: Path, name: str) -> None:
    """Let `name` beside `out` lead to the payload that `out/manifest.json` names under `name`; without one, lead nowhere.

    Made at once, so that there is never half a link; relative, so that results can be moved.

    Raises:
        SnaketuneError: something else is there, or no link can be made there.
    """
    link = out.parent / name
    named = json.loads((out / "manifest.json").read_text(encoding="utf-8")).get(name)
    if not named:
        # One that a report made; what else may lie beside a stage run by hand isn't ours.
        if link.is_symlink() and link.readlink().parts[:1] in {(stage,) for stage in LINKED}:
            link.unlink()
        return
    parts = Path(named["payload"]).parts
    if not parts or parts[0] not in LINKED or ".." in parts:
        raise SnaketuneError(
            f"{out / 'manifest.json'} names {named['payload']!r}, which is no result of ours; remove it and run again"
        )
    if not (out.parent / named["payload"]).is_dir():
        print(f"{link} isn't made: there is no {out.parent / named['payload']}", flush=True)
        return
    check_link(link)
    partial = out.parent / f".{name}.partial"
    try:
        partial.unlink(missing_ok=True)
        partial.symlink_to(named["payload"], target_is_directory=True)
        partial.replace(link)
    except OSError as error:
        raise SnaketuneError(f"{link} can't be linked to {named['payload']}: {error.strerror}") from None
    print(f"{link} → {named['payload']}", flush=True)
