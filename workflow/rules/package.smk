"""The Python package that goes with these rules: the one beside them, or, where they come from a git repository, the installed one.

Rules and package are of one revision. An installed package is held against the repository file by file, and copied below
results/, since jobs may run where the environment of this process can't be seen, or mustn't: in conda's, in an image.
"""

import hashlib
import os
import posixpath
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import ExecMode

# Of this file, whichever Snakefile includes it. Only the one of a local file is a path.
RULES = workflow.current_basedir


def installed_package():
    """The folder of the installed package; refused where it is missing, or of another revision than the rules."""
    found = find_spec("snaketune")
    # A folder of that name is none.
    if found is None or found.origin is None:
        raise WorkflowError(f"{RULES}: these rules need the package snaketune, which isn't installed here; {how_to_install()}")
    package = Path(found.origin).parent
    # A process that runs one job compares its code with that of the plan.
    if workflow.exec_mode == ExecMode.DEFAULT and hasattr(RULES, "ref"):
        there, here = files_in_repository(), files_of(package)
        if differing := sorted(name for name in {*there, *here} if there.get(name) != here.get(name)):
            raise WorkflowError(
                f"{package} isn't the package of these rules ({RULES}): {len(differing)} files differ, the first is "
                f"{differing[0]}; {how_to_install()}"
            )
    return package


def how_to_install():
    """The command that installs the package of the rules' revision."""
    if not hasattr(RULES, "ref"):
        return "install the same revision: pip install git+URL@REVISION"
    host = f"https://{RULES.host}/{RULES.repo}" if hasattr(RULES, "host") else f"file://{Path(RULES.repo_path).resolve()}"
    return f"install it: pip install --force-reinstall --no-deps git+{host}@{RULES.ref} (without --no-deps for the first time)"


def files_in_repository():
    """By path, what git calls the content of each file of the package at the revision of the rules."""
    from git import Repo

    # github() and gitlab() have a clone in Snakemake's cache; gitfile() names one.
    repository = RULES.hosted_repo.repo if hasattr(RULES, "hosted_repo") else Repo(RULES.repo_path)
    folder = posixpath.normpath(posixpath.join(RULES.path, "../snaketune"))
    lines = repository.git.ls_tree("-r", RULES.ref, f"{folder}/").splitlines()
    entries = (line.split("\t") for line in lines)
    return {posixpath.relpath(path, folder): entry.split()[2] for entry, path in entries}


def files_of(package):
    """By path, what git would call the content of each file of a package."""
    files = (path for path in sorted(package.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(package).as_posix(): blob(path.read_bytes()) for path in files}


def blob(content):
    """What git calls this content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def copied(package):
    """A folder that holds a copy of the package and nothing else of where it is installed. The same package has the same copy."""
    digest = hashlib.sha256(str(sorted(files_of(package).items())).encode()).hexdigest()[:16]
    folder = Path("results/.package", digest).absolute()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
            shutil.copytree(package, Path(unfinished, digest, "snaketune"), ignore=shutil.ignore_patterns("__pycache__"))
            try:
                Path(unfinished, digest).rename(folder)
            except OSError:
                # Another process was faster.
                if not folder.is_dir():
                    raise
    return folder


PACKAGE_ROOT = Path(RULES).parent if isinstance(RULES, os.PathLike) else copied(installed_package())
if os.pathsep in str(PACKAGE_ROOT):
    raise WorkflowError(
        f"{PACKAGE_ROOT} has a {os.pathsep!r} in its path, at which PYTHONPATH is split, so that jobs would run other code; "
        "rename the folder"
    )
sys.path.insert(0, str(PACKAGE_ROOT))

import snaketune

if Path(snaketune.__file__).parents[1] != PACKAGE_ROOT:
    raise WorkflowError(
        f"the package snaketune of these rules is in {PACKAGE_ROOT}, but this process has already imported the one in "
        f"{Path(snaketune.__file__).parents[1]}; a workflow can use one revision of snaketune"
    )
