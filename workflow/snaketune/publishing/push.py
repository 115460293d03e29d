"""Models to the Hub: `python -m snaketune push`, which `snakemake push` calls.

All files of a model are one commit, so that a repository holds a whole model or the one before. What was uploaded when a push
was killed, or hasn't changed since, isn't sent again. The token is HF_TOKEN's, and is neither written nor said.
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
from snaketune.config.publishing import Push
from snaketune.config.secrets import HIDDEN, without_secrets
from snaketune.config.suggestions import unknown
from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError
from snaketune.publishing.upload_files import Package, package_of
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job

TOKEN = "HF_TOKEN"
# Of these a loader takes whatever lies there: those of the model before must not stay beside the new ones.
WEIGHTS = (".safetensors", ".safetensors.index.json")


def models_asked_for(names: list[str], config: Path, told: str | None) -> dict[str, Push]:
    """By name, what `push:` has.

    Args:
        names: of those that are wanted; none for all.
        config: the file that has it.
        told: the section as JSON, in the place of the file's.
    Raises:
        SnaketuneError: the config is wrong, or has no such entry.
    """
    if told is None:
        check_file(config)
        if not config.is_file():
            raise SnaketuneError(f"{config} isn't there; name a config with --configfile")
        found = load(yaml.safe_load(config.read_text(encoding="utf-8")))[0].push
    else:
        found = TypeAdapter(dict[str, Push]).validate_json(told)
    if not found:
        raise SnaketuneError(f"{config} has no `push:`, so nothing is to be pushed")
    if lacking := [name for name in names if name not in found]:
        raise SnaketuneError(f"there is no {lacking[0]!r} under `push:`{unknown(lacking[0], found)}")
    return {name: push for name, push in found.items() if name in (names or found)}


def as_json(models: dict[str, Push]) -> str:
    """`push:` as one text, for `models_asked_for`."""
    return json.dumps({name: push.model_dump() for name, push in models.items()}, sort_keys=True)


def pushed_jobs(graph: JobGraph) -> list[Job]:
    """The jobs that make the models which `push:` names, and their cards; SnaketuneError if it names none."""
    if not graph.config.push:
        raise SnaketuneError("the config has no `push:`, so nothing is to be pushed (docs/publishing.md)")
    names = [push.model.split(":") for push in graph.config.push.values()]
    return [graph.job(*one) for kind, run in names for one in ((kind, run), ("card", f"{kind}-{run}"))]


def push(models: dict[str, Push], *, dry_run: bool) -> None:
    """Push each model with its card, or only tell what would be sent.

    Raises:
        SnaketuneError: a result isn't as it should be, there is no token, or the Hub refuses.
    """
    packages = {name: package_of(push.model) for name, push in models.items()}
    for name, push in models.items():
        _tell(name, push, packages[name])
    if dry_run:
        print("nothing was sent", flush=True)
        return
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise SnaketuneError(
            f"{TOKEN} isn't set: the Hub takes a model with a token that may write, from the environment alone"
        )
    for name, push in models.items():
        with _plain(name, push, token):
            print(f"push.{name}: {_send(push, packages[name], token)}", flush=True)


def _tell(name: str, push: Push, package: Package) -> None:
    seen = "private" if push.private else "public"
    print(f"push.{name}: {push.model} to {push.repository} ({seen}, branch {push.branch})")
    for file, about in package.files.items():
        print(f"{about.bytes:>16,}  {about.digest}  {file}")
    print(f"{package.bytes:>16,}  in {len(package.files)} files", flush=True)


def _send(push: Push, package: Package, token: str) -> str:
    """What came of it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=token, library_name="snaketune")
    api.create_repo(push.repository, private=push.private, exist_ok=True)
    if push.private and not api.model_info(push.repository).private:
        raise SnaketuneError(
            f"{push.repository} is there and public; make it private, name another repository, or set private: false"
        )
    if push.branch != "main":
        api.create_branch(push.repository, branch=push.branch, exist_ok=True)
    before = api.model_info(push.repository, revision=push.branch)
    there = {file.rfilename for file in before.siblings or ()}
    old = sorted(file for file in there - package.files.keys() if file.endswith(WEIGHTS))
    operations = [
        *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=about.path) for file, about in package.files.items()),
        *(CommitOperationDelete(path_in_repo=file) for file in old),
    ]
    done = api.create_commit(
        push.repository,
        operations,
        commit_message=f"{push.model}, snaketune {package.fingerprint[:8]}",
        revision=push.branch,
    )
    if done.oid == before.sha:
        return f"nothing new; {done.commit_url} has all of it"
    return f"pushed, {done.commit_url}" + (
        f"; weights that were there before are gone: {', '.join(old)}" if old else ""
    )


@contextmanager
def _plain(name: str, push: Push, token: str) -> Iterator[None]:
    """What the Hub and its client say, as a sentence; without the token, whatever it looks like."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except SnaketuneError as error:
        raise SnaketuneError(f"push.{name}: {error}") from None
    except (HTTPError, HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
        # An upload's own error stands behind the one that names the file.
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        status = getattr(response, "status_code", None)
        said = without_secrets(" ".join(str(error).split()).replace(token, HIDDEN))
        do = {
            401: f"the Hub doesn't take the token in {TOKEN}; see https://huggingface.co/settings/tokens",
            403: f"the token in {TOKEN} may not write to {push.repository}",
        }.get(status, "push again, and what was uploaded isn't sent twice")
        raise SnaketuneError(f"push.{name}: {said}; {do}") from None
