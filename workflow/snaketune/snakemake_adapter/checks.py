"""Checks of the config's files and of how Snakemake was started, before values of the config are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake.logging import logger

from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError
from snaketune.snakemake_adapter.package import Error
from snaketune.stages.host.streams import escape_record

# Snakemake imports this module in circles.
if TYPE_CHECKING:
    from snakemake.workflow import Workflow

DEFAULT_CONFIG = "config/config.yaml"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of the package into those that Snakemake shows by their message alone."""
    try:
        yield
    except SnaketuneError as error:
        raise Error(str(error)) from None


def check_config(workflow: Workflow, config: Mapping[str, Any]) -> None:
    """Check config files and the `module` statement, before values of the config are used.

    Raises:
        Error: if a file isn't plain YAML, there is no config, or the paths of rules are moved.
    """
    # Messages quote configs, models and results of others.
    logger.addFilter(escape_record)
    moves = workflow.modifier.path_modifier
    while moves is not None:
        if moves.prefix or moves.modifies_prefixes:
            raise Error(
                "module: `prefix` and `replace_prefix` would change the paths of rules only, but jobs look for results and "
                "work folders below results/ of the working directory; remove them, and run each config in another folder "
                "(snakemake --directory)"
            )
        moves = moves.inner_modifier
    # Those already read, by the command line or the Snakefile that uses this one as a module; and the one read next.
    files = [Path(file) for file in workflow.configfiles]
    if not (workflow.overwrite_configfiles or workflow.modifier.skip_configfile):
        files.append(Path(DEFAULT_CONFIG))
    with plain_errors():
        for file in files:
            check_file(file)
    if workflow.overwrite_configfiles and not config:
        raise Error(
            f"there is no config: {', '.join(map(str, workflow.overwrite_configfiles))} is empty, or a `module` statement "
            "doesn't pass it on (`config: config`)"
        )


def check_storage(provider: str | None, prefix: str | None) -> None:
    """Refuse a default storage other than the working directory on a shared volume (docs/platforms.md).

    Otherwise manifests couldn't be read while planning, so stale results would be missed, and unfinished work not be found.
    """
    if provider != "fs" or Path(prefix or "").resolve() != Path.cwd():
        raise Error(
            f"--default-storage-provider {provider} --default-storage-prefix {prefix}: results have to be in the working "
            f"directory, on a volume that all jobs share (fs, and {Path.cwd()}); see docs/platforms.md"
        )
