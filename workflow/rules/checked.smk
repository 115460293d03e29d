"""What a config file and a `module` statement may hold, checked before values are used."""

from pathlib import Path

from snakemake.exceptions import WorkflowError

from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError

moves = workflow.modifier.path_modifier
while moves is not None:
    if moves.prefix or moves.modifies_prefixes:
        raise WorkflowError(
            "module: `prefix` and `replace_prefix` would move the paths of rules alone, but jobs look for results and work below "
            "results/ of the working directory; leave them out, and run each config in a folder of its own (snakemake --directory)"
        )
    moves = moves.inner_modifier

# What was read: on the command line, or by the Snakefile that has this one as a module. And what is read next.
files = [Path(file) for file in workflow.configfiles]
if not (workflow.overwrite_configfiles or workflow.modifier.skip_configfile):
    files.append(Path("config/config.yaml"))
try:
    for file in files:
        check_file(file)
except SnaketuneError as error:
    raise WorkflowError(str(error)) from None
if workflow.overwrite_configfiles and not config:
    raise WorkflowError(
        f"there is no config: {', '.join(map(str, workflow.overwrite_configfiles))} holds none, or a `module` statement doesn't "
        "pass it on (`config: config`)"
    )
