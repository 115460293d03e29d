"""Checks of config files and `module` statements, before values of the config are used."""

from pathlib import Path

from snakemake.logging import logger

from snaketune.config.yaml_values import check_file
from snaketune.stages.host.streams import escape_record
from snaketune.errors import SnaketuneError

# Messages quote configs, models and results of others.
logger.addFilter(escape_record)

moves = workflow.modifier.path_modifier
while moves is not None:
    if moves.prefix or moves.modifies_prefixes:
        raise Error(
            "module: `prefix` and `replace_prefix` would change the paths of rules only, but jobs look for results and work "
            "folders below results/ of the working directory; remove them, and run each config in another folder (snakemake "
            "--directory)"
        )
    moves = moves.inner_modifier

# The config files already read, by the command line or the Snakefile that uses this one as a module; and the one read next.
files = [Path(file) for file in workflow.configfiles]
if not (workflow.overwrite_configfiles or workflow.modifier.skip_configfile):
    files.append(Path("config/config.yaml"))
try:
    for file in files:
        check_file(file)
except SnaketuneError as error:
    raise Error(str(error)) from None
if workflow.overwrite_configfiles and not config:
    raise Error(
        f"there is no config: {', '.join(map(str, workflow.overwrite_configfiles))} is empty, or a `module` statement doesn't "
        "pass it on (`config: config`)"
    )
