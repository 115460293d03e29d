"""Deployed as a module of another workflow: from a path, and from git repositories, with the package installed.

There is no network: git takes a folder for https://github.com/, so that github() clones by a file:// URL.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snaketune.snakemake_adapter.package import files_of, is_copy

from .command_line import snakemake
from .conftest import ROOT, Project, copy_code, made_once, rules_in
from .test_pins import write_channel

pytestmark = pytest.mark.workflow
SHIMS = Path(__file__).parent / "shims"
TOKENIZER = "results/tokenizer/small/manifest.json"
CORPUS = "results/corpus/chat/manifest.json"
GITHUB = 'github("someone/snaketune", path="workflow/Snakefile", tag="v1")'
MODULE = """
configfile: "config.yaml"
module snaketune:
    snakefile: {snakefile}
    config: {config}
{use}
"""


def run(*command: str, folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def make_repository(folder: Path) -> None:
    """The checkout under test, as a repository with a tag, without what users don't run."""
    folder.mkdir(parents=True)
    parts = ("--", ".", ":!tests", ":!docs", ":!benchmarks")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *parts, folder=ROOT)
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    for arguments in (["init"], ["add", "--all"], ["commit", "--message", "all"], ["tag", "v1"]):
        done = run("git", "-c", "user.name=me", "-c", "user.email=me@localhost", *arguments, folder=folder)
        assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "hosted", lambda folder: make_repository(folder / "someone/snaketune")) / (
        "someone/snaketune"
    )


@pytest.fixture(scope="session")
def installed(repository, tmp_path_factory) -> Path:
    """The package as pip installs it from the repository; nothing is fetched."""
    pytest.importorskip("setuptools", reason="it builds the package")

    def install(folder: Path) -> None:
        options = [
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--target",
            str(folder),
        ]
        done = run(sys.executable, "-m", "pip", "install", *options, f"git+file://{repository}@v1", folder=ROOT)
        assert done.returncode == 0, done.stdout

    return made_once(tmp_path_factory, "site", install)


class User:
    """A user's workflow with snaketune as a module, and default Snakemake: no profile, its own rerun triggers."""

    def __init__(self, project: Project, repository: Path):
        self.project, self.folder, self.repository = project, project.folder, repository
        # Whether the module is a file, with its package beside it.
        self.is_path = False
        project.write_config()

    def write(self, snakefile: str, use: str = "use rule * from snaketune", config: str = "config") -> "User":
        text = MODULE.format(snakefile=snakefile, use=use, config=config)
        (self.folder / "Snakefile").write_text(text, encoding="utf-8")
        self.is_path = snakefile.startswith(f'"{self.repository}')
        return self

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        """Run Snakemake where snaketune is installed as in these tests: the code under test, from the repository."""
        status, said = snakemake(["--cores", "1", *arguments], self.folder, apart=self.is_path)
        assert not (check and status), said[-6000:]
        assert check or status, "it ended well"
        return said

    def snakemake_with(self, site: Path, *arguments: str) -> str:
        """Run Snakemake with the packages of a folder, and no other snaketune."""
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(
            "import os, sys\nsys.path = [path for path in sys.path "
            f"if path == {str(site)!r} or not os.path.exists(f'{{path}}/snaketune')]\n",
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "snakemake", "--cores", "1", *arguments]
        return run(*command, folder=self.folder, environment=os.environ | {"PYTHONPATH": str(site)}).stdout

    def copy(self) -> Path:
        """The copy of the package that jobs import."""
        (copy,) = (self.folder / ".snakemake/snaketune").iterdir()
        return copy


def imported_from(folder: Path) -> bool:
    """Whether a job has imported the package in a folder, by what Python keeps of what it compiles."""
    return any(folder.glob("snaketune/corpus/__pycache__/corpus.*.pyc"))


@pytest.fixture
def user(fresh, repository, tmp_path, monkeypatch) -> User:
    for name, value in {
        "XDG_CACHE_HOME": f"{tmp_path}/cache",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository.parents[1]}/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "SNAKEMAKE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return User(fresh, repository)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("path", "git+file")), "github"]
)
def test_a_module_runs_and_then_has_nothing_to_do(kind, user):
    user.write(
        {
            "path": f'"{user.repository}/workflow/Snakefile"',
            "git+file": f'"git+file://{user.repository}/workflow/Snakefile@v1"',
            "github": GITHUB,
        }[kind]
    )
    assert rules_in(user.snakemake("--dry-run")) >= {"corpus", "tokenizer", "sft", "dpo", "eval", "report"}
    assert not (user.folder / CORPUS).exists()
    user.snakemake(CORPUS)
    assert json.loads((user.folder / CORPUS).read_text(encoding="utf-8"))["payload"]
    assert imported_from(user.repository / "workflow" if kind == "path" else user.copy())
    assert "Nothing to be done" in user.snakemake(CORPUS)


@pytest.mark.slow
def test_a_module_runs_with_the_package_that_pip_installs(user, installed, tmp_path):
    shutil.copytree(installed, tmp_path / "site")
    assert " report: at most " in user.write(GITHUB).snakemake_with(tmp_path / "site", "--dry-run")
    # All that belongs to it.
    for name in ("report/templates/index.html.jinja", "tokenization/chat_templates/chatml.jinja"):
        assert (user.copy() / "snaketune" / name).is_file()


def with_results_of(finished: Project, user: User) -> None:
    """Copy what a clone has made of the same data and config."""
    for name in ("results", ".snakemake"):
        shutil.copytree(finished.folder / name, user.folder / name, symlinks=True)


def test_results_of_a_clone_are_current_in_a_module_and_the_default_template_comes_with_the_package(user, finished):
    with_results_of(finished, user)
    # The same text as in the file that the micro project names.
    user.project.config["tokenizers"]["small"].pop("chat_template")
    user.project.write_config()
    # By its own triggers Snakemake would look up what has input files of other names.
    times_alone = (TOKENIZER, "--rerun-triggers", "mtime")
    assert "Nothing to be done" in user.write(GITHUB).snakemake(*times_alone)
    user.project.config["tokenizers"]["small"]["chat_template"] = "data/chatml.jinja"
    user.project.write_config()
    said = user.snakemake(*times_alone)
    assert "Nothing to be done" in said
    assert "note: by its other triggers" not in said
    assert "note: by its other triggers" in user.snakemake(TOKENIZER)


@pytest.mark.parametrize("path", ["workflow/Snakefile", "Snakefile"])
def test_rules_may_be_renamed_and_the_default_target_is_all_of_them(user, path):
    user.write(GITHUB.replace("workflow/Snakefile", path), "use rule * from snaketune as snaketune_*")
    planned = user.snakemake("--dry-run")
    assert {"snaketune_corpus", "snaketune_sft", "snaketune_report"} <= rules_in(planned)
    assert re.search(r"^snaketune_all +1$", planned, re.MULTILINE)
    # If only some rules are used, none is the default.
    user.write(GITHUB.replace("workflow/Snakefile", path), "use rule corpus from snaketune")
    assert rules_in(user.snakemake("--dry-run", CORPUS)) == {"corpus"}


def test_a_renamed_rule_that_is_forced_takes_what_is_made_of_it_along(user, finished):
    with_results_of(finished, user)
    user.write(GITHUB, "use rule * from snaketune as snaketune_*")
    planned = user.snakemake("--dry-run", "--forcerun", "snaketune_corpus", "--", TOKENIZER)
    assert rules_in(planned) == {"snaketune_corpus", "snaketune_tokenizer"}


def test_a_rule_of_the_users_own_is_made_of_results(user):
    user.write(
        GITHUB,
        f"""use rule * from snaketune
onstart:
    snaketune.onstart()
onsuccess:
    snaketune.onsuccess()
    print("called")
rule lines:
    default_target: True
    input:
        "{CORPUS}",
    output:
        "lines.txt",
    shell:
        "wc -l {{input}} > {{output}}"
""",
    )
    said = user.snakemake()
    assert rules_in(said) == {"corpus", "lines"} and "called" in said
    assert (user.folder / "lines.txt").is_file()
    assert "Nothing to be done" in user.snakemake()


def test_a_rule_of_the_users_own_that_makes_a_file_is_seen_though_the_result_made_of_it_is_current(user):
    shutil.copy(user.folder / "data/chat.jsonl", user.folder / "downloaded.jsonl")
    user.write(
        GITHUB,
        """use rule * from snaketune
rule copy:
    input:
        "downloaded.jsonl",
    output:
        "data/chat.jsonl",
    shell:
        "cp {input} {output}"
""",
    ).snakemake(CORPUS)
    assert rules_in(user.snakemake("--dry-run", "--rerun-triggers", "mtime", "--", CORPUS)) == set()
    (user.folder / "downloaded.jsonl").write_text("{}\n", encoding="utf-8")
    assert "copy" in rules_in(user.snakemake("--dry-run", "--rerun-triggers", "mtime", "--", CORPUS))


@pytest.mark.parametrize("moves", ['prefix: "elsewhere"', 'replace_prefix: {"results": "elsewhere"}'])
def test_paths_that_would_move_are_refused(user, moves):
    said = user.write(GITHUB, config=f"config\n    {moves}").snakemake("--dry-run", check=False)
    assert "`prefix` and `replace_prefix` would change the paths of rules only" in said


def test_the_config_that_a_module_is_given_is_all_that_counts(user):
    (user.folder / "config").mkdir()
    (user.folder / "config/config.yaml").write_text("corpora: !wrong {}\n", encoding="utf-8")
    assert "sft" in rules_in(user.write(GITHUB).snakemake("--dry-run"))
    # Without one, Snakemake would take the default one's place in the working directory.
    assert "found !wrong" in user.write(GITHUB, config="None").snakemake("--dry-run", check=False)
    said = user.snakemake("--dry-run", "--configfile", "config.yaml", check=False)
    assert "a `module` statement doesn't pass it on" in said


def test_files_that_the_users_snakefile_reads_are_checked(user):
    with (user.folder / "config.yaml").open("a", encoding="utf-8") as file:
        file.write("eval: {}\n")
    lines = (user.folder / "config.yaml").read_text(encoding="utf-8").count("\n")
    said = user.write(GITHUB).snakemake("--dry-run", check=False)
    assert f"config.yaml, line {lines}: the key 'eval' occurs twice" in said


def test_code_that_came_with_a_project_of_others_is_replaced_before_it_runs(user, tmp_path):
    """The name of the copy can be computed by anyone who has the package."""
    user.write(GITHUB).snakemake("--dry-run")
    name, mark = user.copy().name, tmp_path / "HACKED"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    for folder in (user.copy(), user.folder / "results/.package" / name):
        (folder / "snaketune/stages/__pycache__").mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
        (folder / "snaketune/__init__.py").write_text(code, encoding="utf-8")
    user.snakemake("--dry-run")
    user.snakemake(CORPUS)
    assert not mark.exists() and not (user.copy() / "sitecustomize.py").exists()


def remove_module(copy: Path) -> None:
    (copy / "snaketune/errors.py").unlink()


def link_outside(copy: Path) -> None:
    (copy / "snaketune/__pycache__").rmdir()
    (copy / "snaketune/__pycache__").symlink_to(copy.with_name("outside"))


def write_below(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").touch()


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda copy: None, True),
        # Without the hash of its source, Python doesn't compare it with the source.
        (lambda copy: (copy / "snaketune/__pycache__/errors.cpython-311.pyc").write_bytes(b"compiled"), True),
        (lambda copy: (copy / "snaketune/__pycache__/linked.pyc").symlink_to("/etc/passwd"), False),
        (lambda copy: (copy / "snaketune/errors.py").write_text("1"), False),
        (remove_module, False),
        (lambda copy: (copy / "snaketune/errors.so").touch(), False),
        (lambda copy: (copy / "snaketune/errors.pyc").touch(), False),
        (lambda copy: (copy / "torch.py").touch(), False),
        (lambda copy: (copy / "snaketune/errors").symlink_to(copy / "elsewhere"), False),
        (lambda copy: (copy / "__pycache__").symlink_to(copy / "snaketune/__pycache__"), False),
        (lambda copy: (copy / "snaketune/__pycache__").rmdir(), True),
        (lambda copy: write_below(copy / "snaketune/__pycache__/torch"), True),
        # Nothing outside of the copy is removed.
        (link_outside, False),
    ],
)
def test_a_copy_of_the_package_holds_its_files_and_nothing_else(tmp_path, change, kept):
    (package := tmp_path / "copy/snaketune").mkdir(parents=True)
    (package / "errors.py").touch()
    (outside := tmp_path / "outside").mkdir()
    (outside / "letter.txt").touch()
    files = files_of(package)
    (package / "__pycache__").mkdir()
    change(tmp_path / "copy")
    assert is_copy(tmp_path / "copy", files) == kept
    assert not kept or not [*package.glob("__pycache__/*")]
    assert (outside / "letter.txt").is_file()


def test_without_the_package_the_error_names_what_to_install(user, tmp_path):
    said = user.write(GITHUB).snakemake_with(tmp_path / "site", "--dry-run")
    assert "isn't installed here: pip install git+https://github.com/someone/snaketune@v1" in said


def test_a_package_of_another_revision_is_refused(user, tmp_path):
    package = shutil.copytree(ROOT / "workflow/snaketune", tmp_path / "site/snaketune")
    (package / "errors.py").write_text("# other\n", encoding="utf-8")
    (package / "packing/plan.py").unlink()
    (package / "packing/planned_before.py").touch()
    user.write(f'gitfile("{user.repository}", path="workflow/Snakefile", tag="v1")')
    said = user.snakemake_with(tmp_path / "site", "--dry-run")
    assert "3 files differ (first errors.py); install that revision: pip install --force-reinstall --no-deps" in said
    assert f"--no-deps git+file://{user.repository}@v1" in said


def test_two_revisions_in_one_workflow_are_refused(user, tmp_path):
    copy_code(tmp_path / "code")
    user.write(
        GITHUB,
        f"""use rule * from snaketune
module other:
    snakefile: "{tmp_path}/code/workflow/Snakefile"
    config: config
use rule * from other as other_*
""",
    )
    assert "a workflow can use only one revision of snaketune" in user.snakemake("--dry-run", check=False)


@pytest.mark.slow
def test_jobs_in_conda_environments_find_the_package_and_nothing_else_of_where_it_is_installed(
    user, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", f"{SHIMS}/conda/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CONDA_CHANNEL_INDEX", str(write_channel(tmp_path / "channel")))
    said = user.write(GITHUB).snakemake("--sdm=conda", CORPUS)
    (activated,) = re.findall(r"Activating conda environment: (\S+)", said)
    environment = user.folder / activated
    pins = (ROOT / "envs/data.yaml").read_text(encoding="utf-8")
    # git hands a file on without its last newline.
    assert (environment / "environment.yaml").read_text(encoding="utf-8") == pins.rstrip()
    assert (environment / "jobs").read_text(encoding="utf-8").startswith("-m snaketune corpus")
    assert imported_from(user.copy()) and [path.name for path in user.copy().iterdir()] == ["snaketune"]


@pytest.mark.slow
def test_jobs_in_an_image_find_the_package_in_the_working_directory(user, monkeypatch):
    monkeypatch.setenv("PATH", f"{SHIMS}:{os.environ['PATH']}")
    user.write(GITHUB)
    assert f"{user.folder}/envs/snaketune.sif doesn't exist" in user.snakemake("--sdm=apptainer", CORPUS, check=False)
    python = user.folder / "envs/snaketune.sif/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    user.snakemake("--sdm=apptainer", CORPUS)
    assert imported_from(user.copy())


def test_snakedeploy_writes_a_workflow_that_plans(user):
    tool = shutil.which("snakedeploy")
    if tool is None:
        pytest.skip("snakedeploy isn't installed")
    done = run(
        tool, "deploy-workflow", "https://github.com/someone/snaketune", "deployed", "--tag", "v1", folder=user.folder
    )
    assert done.returncode == 0, done.stdout
    deployed = user.folder / "deployed"
    shutil.copytree(user.folder / "data", deployed / "data")
    shutil.copy(user.folder / "config.yaml", deployed / "config")
    user.folder = deployed
    assert rules_in(user.snakemake("--dry-run")) >= {"corpus", "sft", "dpo", "report"}
