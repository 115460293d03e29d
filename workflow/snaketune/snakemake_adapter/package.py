"""The package that jobs import: the one beside the rules, or a copy of the installed one if the rules come from git.

Rules and package have to be of one revision, so an installed package is compared with the repository file by file, before any
other module of it is imported. Jobs import it from a copy in .snakemake: then PYTHONPATH holds nothing else of this
environment, from which a job in a conda environment must not import, and a job in a container or on another node can read it.
The process that plans makes the copy again if it isn't exactly the installed package: a folder that came with results or a
project of others is never run.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shlex
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from snakemake.exceptions import WorkflowError
from snakemake.shell import shell
from snakemake.sourcecache import HostingProviderFile, LocalGitFile, LocalSourceFile, SourceFile

import snaketune

# Snakemake imports this module in circles.
if TYPE_CHECKING:
    from snakemake.workflow import Workflow

PACKAGE = Path(snaketune.__file__).parent
# Jobs run in their rule's environment, in which the package isn't installed. Idle threads sleep instead of spinning: that costs
# nothing when a job runs alone, and helps much when cores are shared. The config is for messages that name whole commands.
PREFIX = (
    "set -euo pipefail; export OMP_WAIT_POLICY=PASSIVE RAYON_NUM_THREADS=$OMP_NUM_THREADS "
    "PYTHONPATH={folder} SNAKETUNE_CONFIG={config}; "
)


class Error(WorkflowError):
    """An error that its message explains. It hides its traceback from Snakemake, which would put the lines of rules that it
    passed before and after the message."""

    __traceback__ = property(lambda self: None, lambda self, traceback: None)  # type: ignore[assignment]


def package_root(workflow: Workflow, rules_folder: SourceFile, revision: str) -> Path:
    """Return the folder that jobs import the package from; Error if the imported package isn't that of the rules.

    Args:
        rules_folder: where the rules are.
        revision: that of the rules, as pip's argument.
    """
    if isinstance(rules_folder, LocalSourceFile):
        beside = Path(rules_folder).parent / "snaketune"
        if not PACKAGE.samefile(beside):
            raise Error(
                f"the rules in {rules_folder} belong to the package in {beside}, but another module of this workflow has "
                f"already imported the one in {PACKAGE}; a workflow can use only one revision of snaketune"
            )
        root = beside.parent
    else:
        # Processes that run single jobs only read what the main process has checked; they compare their code with the plan.
        if workflow.is_main_process and isinstance(rules_folder, HostingProviderFile | LocalGitFile):
            _check_revision(rules_folder, revision)
        root = _copied(PACKAGE, checks=workflow.is_main_process)
    if os.pathsep in str(root):
        raise Error(
            f"{root} has a {os.pathsep!r} in its path, which separates the entries of PYTHONPATH, so jobs would import "
            "other code; rename the folder"
        )
    return root


def set_shell_prefix(workflow: Workflow, root: Path) -> None:
    """Have the commands of rules import the package from `root`. A Snakemake that is called by its path, without activating its
    environment, finds its own Python, if jobs find what they need there."""
    config = shlex.join(map(str, workflow.overwrite_configfiles))
    prefix = PREFIX.format(folder=shlex.quote(str(root)), config=shlex.quote(config))
    deployment, folder = workflow.deployment_settings, str(Path(sys.executable).parent)
    is_activated = folder in os.environ.get("PATH", "").split(os.pathsep)
    if not (is_activated or (deployment and deployment.deployment_method)) and find_spec("torch"):
        prefix += f"export PATH={shlex.quote(folder)}:$PATH; "
    # Snakemake formats the prefix, so braces are doubled.
    shell.prefix(prefix.replace("{", "{{").replace("}", "}}"))


def _check_revision(rules_folder: HostingProviderFile | LocalGitFile, revision: str) -> None:
    there, here = _files_in_repository(rules_folder), files_of(PACKAGE)
    if differing := sorted(name for name in {*there, *here} if there.get(name) != here.get(name)):
        raise Error(
            f"the package in {PACKAGE} isn't of the revision of the rules in {rules_folder}: {len(differing)} files differ "
            f"(first {differing[0]}); install that revision: pip install --force-reinstall --no-deps {revision}"
        )


def _files_in_repository(rules_folder: HostingProviderFile | LocalGitFile) -> dict[str, str]:
    """Return git's digest of each file of the package at the revision of the rules, by path."""
    from git import Repo

    # For github() and gitlab(), Snakemake's cache has a clone.
    repository = (
        rules_folder.hosted_repo.repo if isinstance(rules_folder, HostingProviderFile) else Repo(rules_folder.repo_path)
    )
    folder = posixpath.normpath(posixpath.join(rules_folder.path, "../snaketune"))
    entries = (line.split("\t") for line in repository.git.ls_tree("-r", rules_folder.ref, f"{folder}/").splitlines())
    return {posixpath.relpath(path, folder): entry.split()[2] for entry, path in entries}


def files_of(package: Path) -> dict[str, str]:
    """Return the digest that git would give each file of a package, by path."""
    files = (path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    contents = {path.relative_to(package).as_posix(): path.read_bytes() for path in files}
    return {
        path: hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest() for path, content in contents.items()
    }


def _copied(package: Path, *, checks: bool) -> Path:
    """Return a folder that holds only a copy of the package, named after its content. Args: checks: replace what isn't one."""
    files = files_of(package)
    digest = hashlib.sha256(str(sorted(files.items())).encode()).hexdigest()[:16]
    folder = Path(".snakemake/snaketune", digest).absolute()
    if checks and os.path.lexists(folder) and not is_copy(folder, files):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
            # File by file, since shutil.copytree keeps the modes of the installed package.
            for name in files:
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


def is_copy(folder: Path, files: dict[str, str]) -> bool:
    """Return True if a folder holds exactly these files of the package, and no link. What Python compiled there is removed,
    since it would be loaded in place of the files."""
    if any(path.is_symlink() for path in (folder, *folder.rglob("*"))):
        return False
    for compiled in folder.rglob("__pycache__"):
        shutil.rmtree(compiled)
    return files_of(folder) == {f"snaketune/{name}": digest for name, digest in files.items()}
