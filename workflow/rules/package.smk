"""Import the Python package of these rules: the one beside them, or the installed one if the rules come from a git repository."""

import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.sourcecache import HostingProviderFile, LocalGitFile, LocalSourceFile

# The folder of this file, whichever Snakefile includes it.
RULES = workflow.current_basedir
# The revision as pip's argument.
if isinstance(RULES, HostingProviderFile):
    REVISION = f"git+https://{RULES.host}/{RULES.repo}@{RULES.ref}"
elif isinstance(RULES, LocalGitFile):
    REVISION = f"git+file://{os.path.abspath(RULES.repo_path)}@{RULES.ref}"
else:
    REVISION = "git+URL@REVISION, of the revision of the rules"
if isinstance(RULES, LocalSourceFile):
    sys.path.insert(0, str(Path(RULES).parent))

try:
    from snaketune.snakemake_adapter.package import package_root, set_shell_prefix
except ModuleNotFoundError as error:
    if not error.name.startswith("snaketune"):
        raise
    raise WorkflowError(
        f"the rules in {RULES} need the Python package snaketune, which isn't installed here: pip install {REVISION}"
    ) from None

PACKAGE_ROOT = package_root(workflow, RULES, REVISION)
set_shell_prefix(workflow, PACKAGE_ROOT)

from snaketune.snakemake_adapter.adapter import set_default_target
from snaketune.snakemake_adapter.checks import check_config
from snaketune.stages.table import STAGES
