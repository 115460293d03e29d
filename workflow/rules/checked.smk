"""Where the package is, and config files held against what one may hold, before their values are used."""

import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# Of this file, whichever Snakefile includes it.
PACKAGE_ROOT = Path(str(workflow.current_basedir.get_path_or_uri(secret_free=True))).parent
if os.pathsep in str(PACKAGE_ROOT):
    raise WorkflowError(
        f"{PACKAGE_ROOT} has a {os.pathsep!r} in its path, at which PYTHONPATH is split, so that jobs would run other code; "
        "rename the folder"
    )
sys.path.insert(0, str(PACKAGE_ROOT))

from snaketune.config.files import check_file
from snaketune.errors import SnaketuneError

try:
    for file in workflow.overwrite_configfiles or ["config/config.yaml"]:
        check_file(Path(file))
except SnaketuneError as error:
    raise WorkflowError(str(error)) from None
