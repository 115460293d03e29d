"""The Python package of these rules: the one beside them, or the installed one if the rules come from a git repository.

Rules and package have to be of one revision, so an installed package is compared with the repository file by file. Jobs import
it from a copy in .snakemake: then PYTHONPATH holds nothing else of this environment, from which a job in a conda environment
must not import, and a job in a container or on another node can read it. The process that plans imports the installed package,
and makes the copy again if it isn't exactly that: a folder that came with results or a project of others is never run.
"""

import hashlib
import os
import posixpath
import shlex
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import ExecMode
from snakemake.sourcecache import HostingProviderFile, LocalGitFile, LocalSourceFile

# The folder of this file, whichever Snakefile includes it.
RULES = workflow.current_basedir
IS_CLONE = isinstance(RULES, LocalSourceFile)
# The revision as pip's argument.
if isinstance(RULES, HostingProviderFile):
    REVISION = f"git+https://{RULES.host}/{RULES.repo}@{RULES.ref}"
elif isinstance(RULES, LocalGitFile):
    REVISION = f"git+file://{os.path.abspath(RULES.repo_path)}@{RULES.ref}"
else:
    REVISION = "git+URL@REVISION, of the revision of the rules"


class Error(WorkflowError):
    """An error that its message explains. It hides its traceback from Snakemake, which would put the lines of rules that it
    passed before and after the message."""

    __traceback__ = property(lambda self: None, lambda self, traceback: None)


def installed_package():
    """Return the folder of the installed package; Error if it is missing, or of another revision than the rules."""
    spec = find_spec("snaketune")
    # A folder of that name without code is found too, without an origin.
    if spec is None or spec.origin is None:
        raise Error(
            f"the rules in {RULES} need the Python package snaketune, which isn't installed here: pip install {REVISION}"
        )
    package = Path(spec.origin).parent
    # Processes that run single jobs compare their code with the plan instead.
    if workflow.exec_mode == ExecMode.DEFAULT and isinstance(RULES, (HostingProviderFile, LocalGitFile)):
        there, here = files_in_repository(), files_of(package)
        if differing := sorted(name for name in {*there, *here} if there.get(name) != here.get(name)):
            raise Error(
                f"the package in {package} isn't of the revision of the rules in {RULES}: {len(differing)} files differ (first "
                f"{differing[0]}); install that revision: pip install --force-reinstall --no-deps {REVISION}"
            )
    return package


def files_in_repository():
    """Return git's digest of each file of the package at the revision of the rules, by path."""
    from git import Repo

    # For github() and gitlab(), Snakemake's cache has a clone.
    repository = RULES.hosted_repo.repo if isinstance(RULES, HostingProviderFile) else Repo(RULES.repo_path)
    folder = posixpath.normpath(posixpath.join(RULES.path, "../snaketune"))
    entries = (line.split("\t") for line in repository.git.ls_tree("-r", RULES.ref, f"{folder}/").splitlines())
    return {posixpath.relpath(path, folder): entry.split()[2] for entry, path in entries}


def files_of(package):
    """Return the digest that git would give each file of a package, by path."""
    files = (path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    contents = {path.relative_to(package).as_posix(): path.read_bytes() for path in files}
    return {
        path: hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest() for path, content in contents.items()
    }


def copied(package):
    """Return a folder that holds only a copy of the package, named after its content."""
    files = files_of(package)
    digest = hashlib.sha256(str(sorted(files.items())).encode()).hexdigest()[:16]
    folder = Path(".snakemake/snaketune", digest).absolute()
    # The jobs of this run only read what its main process has checked.
    if workflow.exec_mode == ExecMode.DEFAULT and os.path.lexists(folder) and not is_copy(folder, files):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
            # File by file, since shutil.copytree keeps the modes of the installed package.
            for name in files_of(package):
                target = Path(unfinished, digest, "snaketune", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(package / name, target)
            try:
                Path(unfinished, digest).rename(folder)
            except OSError:
                # Another process created it first.
                if not folder.is_dir():
                    raise
    return folder


def is_copy(folder, files):
    """Return True if a folder holds exactly these files of the package, and no link. What Python compiled there is removed,
    since it would be loaded in place of the files."""
    if any(path.is_symlink() for path in (folder, *folder.rglob("*"))):
        return False
    for compiled in folder.rglob("__pycache__"):
        shutil.rmtree(compiled)
    return files_of(folder) == {f"snaketune/{name}": digest for name, digest in files.items()}


PACKAGE = Path(RULES).parent / "snaketune" if IS_CLONE else installed_package()
PACKAGE_ROOT = PACKAGE.parent if IS_CLONE else copied(PACKAGE)
if os.pathsep in str(PACKAGE_ROOT):
    raise Error(
        f"{PACKAGE_ROOT} has a {os.pathsep!r} in its path, which separates the entries of PYTHONPATH, so jobs would import "
        "other code; rename the folder"
    )
if IS_CLONE:
    sys.path.insert(0, str(PACKAGE_ROOT))

import snaketune

IMPORTED = Path(snaketune.__file__).parent
if not IMPORTED.samefile(PACKAGE):
    raise Error(
        f"the rules in {RULES} belong to the package in {PACKAGE}, but another module of this workflow has already "
        f"imported the one in {IMPORTED}; a workflow can use only one revision of snaketune"
    )

# Jobs run in their rule's environment, in which the package isn't installed. Idle threads sleep instead of spinning: that costs
# nothing when a job runs alone, and helps much when cores are shared. The config is for messages that name whole commands.
PREFIX = (
    "set -euo pipefail; export OMP_WAIT_POLICY=PASSIVE RAYON_NUM_THREADS=$OMP_NUM_THREADS "
    f"PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))} "
    f"SNAKETUNE_CONFIG={shlex.quote(shlex.join(map(str, workflow.overwrite_configfiles)))}; "
)
# Snakemake formats the prefix, so braces are doubled.
shell.prefix(PREFIX.replace("{", "{{").replace("}", "}}"))
