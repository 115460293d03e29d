"""Push models to the Hub: `python -m snaketune push`, which `snakemake push` calls.

Only the files that a manifest describes are uploaded, the card, and the RO-Crate (`publishing.crate`). All files of a model are
one commit, so a repository has either the complete new model or the previous one. Files that were uploaded before a push was
killed, or that haven't changed, aren't sent again. The token is read from HF_TOKEN and never written or printed.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from snaketune.config.load import load
from snaketune.config.secrets import HIDDEN, without_secrets
from snaketune.config.workflow import Push
from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file
from snaketune.publishing.cards.card import CARD
from snaketune.publishing.results import Files
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import RESULTS, Job, result_at
from snaketune.suggestions import unknown

TOKEN = "HF_TOKEN"
# Loaders read all weight files in a folder, so those of the previous model must be deleted.
WEIGHTS = (".safetensors", ".safetensors.index.json")
# Snakemake writes this file into output folders.
SNAKEMAKE_FILE = ".snakemake_timestamp"


def requested_models(names: list[str], config: Path, section: str | None) -> dict[str, Push]:
    """The entries of `push:` by name.

    Args:
        names: Names of the requested entries; empty for all.
        config: The config file.
        section: The section `push` as JSON, which replaces that of the file.
    Raises:
        SnaketuneError: If the config is invalid, or has no such entry.
    """
    if section is None:
        check_file(config)
        if not config.is_file():
            raise SnaketuneError(f"{config} doesn't exist; name a config with --configfile")
        targets = load(yaml.safe_load(config.read_text(encoding="utf-8")))[0].push
    else:
        targets = TypeAdapter(dict[str, Push]).validate_json(section)
    if not targets:
        raise SnaketuneError(f"{config} has no `push:`, so there is nothing to push")
    if unknown_names := [name for name in names if name not in targets]:
        raise SnaketuneError(f"there is no {unknown_names[0]!r} under `push:`{unknown(unknown_names[0], targets)}")
    return {name: push for name, push in targets.items() if name in (names or targets)}


def as_json(models: dict[str, Push]) -> str:
    """The section `push` as JSON, for `requested_models`."""
    return json.dumps({name: push.model_dump() for name, push in models.items()}, sort_keys=True)


def pushed_jobs(graph: JobGraph) -> list[Job]:
    """The jobs of the models that `push:` names and of their cards. Raises SnaketuneError if it names none."""
    if not graph.config.push:
        raise SnaketuneError("the config has no `push:`, so there is nothing to push (docs/publishing.md)")
    names = [push.model.split(":") for push in graph.config.push.values()]
    return [graph.job(*key) for kind, run in names for key in ((kind, run), ("card", f"{kind}-{run}"))]


def push(models: dict[str, Push], *, dry_run: bool) -> None:
    """Push each model with its card and its crate, or only list the files with `dry_run`.

    Raises:
        SnaketuneError: If a result is damaged or incomplete, there is no token, or the Hub refuses.
    """
    uploads = {name: _files_of(push.model, RESULTS / "push" / name) for name, push in models.items()}
    for name, push in models.items():
        visibility = "private" if push.private else "public"
        print(f"push.{name}: {push.model} to {push.repository} ({visibility}, branch {push.branch})")
        files, _ = uploads[name]
        total = 0
        for file, (path, digest) in files.items():
            size = path.stat().st_size
            total += size
            print(f"{size:>16,}  {digest}  {file}")
        print(f"{total:>16,}  in {len(files)} files", flush=True)
    if dry_run:
        print("nothing was sent", flush=True)
        return
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise SnaketuneError(
            f"{TOKEN} isn't set: set it in the environment to a Hub token with write access (a stored login isn't used)"
        )
    for name, push in models.items():
        with _readable_errors(name, push, token):
            print(f"push.{name}: {_send(push, *uploads[name], token)}", flush=True)


def _files_of(model: str, folder: Path) -> tuple[Files, str]:
    """The files of a model (`sft:NAME`, `dpo:NAME` or `reward:NAME`), with card and crate, and the fingerprint of its training.

    Args:
        folder: The crate is written there.
    Raises:
        SnaketuneError: If a file is missing or changed, the card is of another result, or there are files that no manifest has.
    """
    kind, name = model.split(":")
    trained = result_at(RESULTS / kind / name / "manifest.json")
    card = result_at(RESULTS / "card" / f"{kind}-{name}" / "manifest.json")
    if digest_file(trained.manifest_path) not in card.manifest["inputs"]["manifests"]:
        raise SnaketuneError(
            f"{card.manifest_path} is of another result of {model}; run: snakemake {card.manifest_path}"
        )
    described = {*trained.manifest["payload"], *trained.manifest["records"], SNAKEMAKE_FILE}
    present = {path.relative_to(trained.folder).as_posix() for path in trained.folder.rglob("*") if not path.is_dir()}
    if others := sorted(present - described):
        raise SnaketuneError(
            f"{trained.folder} has {', '.join(others[:5])}, not in {trained.manifest_path}; move these files elsewhere"
        )
    owner = dict(sorted((dict.fromkeys(trained.manifest["payload"], trained) | {CARD: card}).items()))
    files = {file: (result.file(file), result.manifest["payload"][file]["digest"]) for file, result in owner.items()}
    # It isn't needed to plan a push.
    from snaketune.publishing.crate import CRATE, write_crate

    crate = write_crate(card.manifest_path, files, folder)
    return files | {CRATE: (crate, digest_file(crate))}, trained.manifest["fingerprint"]


def _send(push: Push, files: Files, fingerprint: str, token: str) -> str:
    """Create the repository and commit the files. Return what was done, as a sentence."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=token, library_name="snaketune")
    api.create_repo(push.repository, private=push.private, exist_ok=True)
    if push.private and not api.model_info(push.repository).private:
        raise SnaketuneError(
            f"{push.repository} exists and is public; make it private, name another repository, or set private: false"
        )
    if push.branch != "main":
        api.create_branch(push.repository, branch=push.branch, exist_ok=True)
    remote = api.model_info(push.repository, revision=push.branch)
    remote_files = {file.rfilename for file in remote.siblings or ()}
    stale = sorted(file for file in remote_files - files.keys() if file.endswith(WEIGHTS))
    done = api.create_commit(
        push.repository,
        [
            *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=path) for file, (path, _) in files.items()),
            *(CommitOperationDelete(path_in_repo=file) for file in stale),
        ],
        commit_message=f"{push.model}, snaketune {fingerprint[:8]}",
        revision=push.branch,
    )
    if done.oid == remote.sha:
        return f"nothing new; {done.commit_url} is up to date"
    deleted = f"; deleted weights of the previous model: {', '.join(stale)}" if stale else ""
    return f"pushed, {done.commit_url}{deleted}"


@contextmanager
def _readable_errors(name: str, push: Push, token: str) -> Iterator[None]:
    """Turn errors of the Hub and its client into one sentence without the token."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except SnaketuneError as error:
        raise SnaketuneError(f"push.{name}: {error}") from None
    except (HTTPError, HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        # The HTTP error of an upload is the cause of the error that names the file.
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        status = getattr(response, "status_code", None)
        message = without_secrets(" ".join(str(error).split()).replace(token, HIDDEN))
        action = {
            401: f"the Hub rejects the token in {TOKEN}; see https://huggingface.co/settings/tokens",
            403: f"the token in {TOKEN} has no write access to {push.repository}",
        }.get(status or 0, "push again; files that were uploaded aren't sent twice")
        raise SnaketuneError(f"push.{name}: {message}; {action}") from None
