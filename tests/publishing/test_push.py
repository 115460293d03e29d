"""Pushes to a local stand-in for the Hub."""

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from snaketune.__main__ import main
from snaketune.artifacts.manifest import describe_files, write_manifest
from snaketune.config.workflow import Push
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file
from snaketune.publishing.push import push, requested_models
from snaketune.stages.cache.code_digest import PACKAGE_FOLDER

from .hub import TOKEN, Hub, running
from .invented import files_of, write_handed_on

ROOT = Path(__file__).parents[2]
PUSH = {"model": "dpo:demo", "repository": "owner/name"}
NAMES = {"README.md", "ro-crate-metadata.json", *files_of("dpo")}


@pytest.fixture
def hub():
    with running() as hub:
        yield hub


@pytest.fixture
def handed_on(tmp_path) -> Path:
    write_handed_on(tmp_path)
    return tmp_path


def models_of(push: dict) -> tuple[str, str]:
    return "--models", json.dumps({"demo": PUSH | push})


def started(hub: Hub, folder: Path) -> subprocess.Popen:
    """Start `python -m snaketune push` in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    # Without the user's token and cache. Uploads use LFS, since the stand-in doesn't support Xet.
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(PACKAGE_FOLDER.parent),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "snaketune", "push", *models_of({})],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def pushed(hub: Hub, folder: Path, status: int = 0, token: str | None = TOKEN, **push) -> str:
    """Run a push in `folder` in this process, with the entries `push` in its config section; return its output."""
    output = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
            patch.delenv(name)
        if token:
            patch.setenv("HF_TOKEN", token)
        # Of the variables that `started` sets, which are read at the import.
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "hf/token"))
        assert main(["push", *models_of(push)]) == status, output.getvalue()
    assert TOKEN not in output.getvalue()
    return output.getvalue()


def test_a_model_and_its_card_are_one_commit_in_a_private_repository(hub, handed_on):
    output = pushed(hub, handed_on)
    repository = hub.repositories["owner/name"]
    assert repository.private
    assert set(repository.branches["main"]) == NAMES
    assert len(repository.commits) == 1
    assert b"weights of dpo" in hub.objects.values()
    assert f"pushed, {hub.endpoint}/owner/name/commit/{repository.sha}" in output


def test_a_second_push_sends_only_changed_files(hub, handed_on):
    pushed(hub, handed_on)
    before, uploads = dict(hub.repositories["owner/name"].branches["main"]), list(hub.uploads)
    assert "nothing new" in pushed(hub, handed_on)
    assert len(hub.repositories["owner/name"].commits) == 1
    assert hub.uploads == uploads
    replace(handed_on, "tokenizer.json", "[1]")
    pushed(hub, handed_on)
    after = hub.repositories["owner/name"].branches["main"]
    # README.md is unchanged: its manifest was updated, not its text. The crate has the file's digest.
    changed = {name for name in NAMES if after[name] != before[name]}
    assert changed == {"tokenizer.json", "ro-crate-metadata.json"}
    assert len(hub.uploads) == len(uploads) + 1


def replace(folder: Path, name: str, content: str) -> None:
    """Replace the content of one file, with manifest and card up to date."""
    manifest, model = folder / "results/dpo/demo/manifest.json", folder / "results/dpo/demo/model"
    card = folder / "results/card/dpo-demo/manifest.json"
    (model / name).write_text(content)
    before = digest_file(manifest)
    write_manifest(manifest, json.loads(manifest.read_text()) | {"payload": describe_files(model)})
    entries = json.loads(card.read_text())
    entries["inputs"]["manifests"] = [
        digest_file(manifest) if one == before else one for one in entries["inputs"]["manifests"]
    ]
    write_manifest(card, entries)


def test_a_killed_push_completes_when_run_again(hub, handed_on):
    hub.hold.clear()
    process = started(hub, handed_on)
    assert hub.uploading.wait(60)
    process.kill()
    process.communicate()
    hub.hold.set()
    assert len(hub.uploads) == 1
    assert hub.repositories["owner/name"].branches["main"] == {}
    assert "pushed, " in pushed(hub, handed_on)
    assert set(hub.repositories["owner/name"].branches["main"]) == NAMES
    # The uploaded file wasn't sent again.
    assert len(hub.uploads) == len(set(hub.uploads)) == 2


def test_a_dry_run_lists_and_sends_nothing(handed_on, monkeypatch, capsys):
    monkeypatch.chdir(handed_on)
    push({"demo": Push.model_validate(PUSH)}, dry_run=True)
    output = capsys.readouterr().out
    assert "dpo:demo to owner/name (private, branch main)" in output
    weights = handed_on / "results/dpo/demo/model/model.safetensors"
    assert f"14  {digest_file(weights)}  model.safetensors" in output
    assert "nothing was sent" in output


def test_branch_and_public_repository_can_be_configured(hub, handed_on):
    pushed(hub, handed_on, branch="v1", private=False)
    repository = hub.repositories["owner/name"]
    assert not repository.private
    assert (set(repository.branches["main"]), set(repository.branches["v1"])) == (set(), NAMES)


def test_a_private_model_is_not_pushed_to_a_public_repository(hub, handed_on):
    pushed(hub, handed_on, private=False, branch="v1")
    output = pushed(hub, handed_on, status=1)
    assert "owner/name exists and is public" in output
    assert hub.repositories["owner/name"].branches["main"] == {}


def test_weights_of_the_previous_model_are_deleted_and_other_files_are_not(hub, handed_on):
    pushed(hub, handed_on)
    files = hub.repositories["owner/name"].branches["main"]
    files |= {"model-00001-of-00002.safetensors": "0", "model.safetensors.index.json": "0", "notes.md": "0"}
    output = pushed(hub, handed_on)
    assert (
        "deleted weights of the previous model: model-00001-of-00002.safetensors, model.safetensors.index.json"
        in output
    )
    assert set(hub.repositories["owner/name"].branches["main"]) == NAMES | {"notes.md"}


@pytest.mark.parametrize(
    "token", ["hf_WrongWrongWrongWrongWrongWrong", pytest.param("no-token-by-its-looks", marks=pytest.mark.slow)]
)
def test_a_wrong_token_is_refused_without_printing_it(hub, handed_on, token):
    output = pushed(hub, handed_on, status=1, token=token)
    assert "the Hub rejects the token in HF_TOKEN" in output
    assert token not in output
    assert "Traceback" not in output
    assert not hub.repositories


def test_without_a_token_no_request_is_sent(hub, handed_on):
    (handed_on / "hf").mkdir()
    # A token stored by `hf auth login` isn't used.
    (handed_on / "hf/token").write_text(TOKEN)
    assert "HF_TOKEN isn't set" in pushed(hub, handed_on, status=1, token=None)
    assert not hub.repositories


def spoil(name: str, content: str):
    return lambda folder: (folder / "results" / name).write_text(content)


def change_the_manifest(folder: Path) -> None:
    """The state after a training whose card hasn't been written yet."""
    path = folder / "results/dpo/demo/manifest.json"
    write_manifest(path, json.loads(path.read_text()) | {"fingerprint": "0" * 32})


REFUSED = {
    "a file that the manifest does not describe": (spoil("dpo/demo/model/.env", "x"), "has .env, not in results/dpo/demo/m"),
    "a link that the manifest does not describe": (
        lambda folder: (folder / "results/dpo/demo/model/x.json").symlink_to("/etc/passwd"), "has x.json, not in results/dpo",
    ),
    "a file that changed": (spoil("dpo/demo/model/model.safetensors", "others"), "model.safetensors is damaged"),
    "a card that changed": (spoil("card/dpo-demo/card/README.md", "x"), "README.md is damaged"),
    "no model": (lambda folder: (folder / "results/dpo/demo/manifest.json").unlink(), "manifest.json doesn't exist"),
    "a card of another result": (change_the_manifest, "is of another result of dpo:demo"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_result_that_differs_from_its_manifest_is_not_pushed(handed_on, monkeypatch, what):
    change, message = REFUSED[what]
    change(handed_on)
    monkeypatch.chdir(handed_on)
    # Before it would need a token.
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(SnaketuneError, match=re.escape(message)):
        push({"demo": Push.model_validate(PUSH)}, dry_run=False)


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        ([], "no.yaml", "no.yaml doesn't exist"),
        ([], "config/config.yaml", "config/config.yaml has no `push:`"),
    ],
)
def test_a_config_without_push_is_refused(names, config, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SnaketuneError, match=message):
        requested_models(names, Path(config), None)


def test_entries_can_be_requested_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config["push"] = {"one": PUSH, "other": PUSH | {"repository": "owner/other"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert list(requested_models([], file, None)) == ["one", "other"]
    (other,) = requested_models(["other"], file, None).values()
    assert (other.repository, other.private, other.branch) == ("owner/other", True, "main")
    with pytest.raises(SnaketuneError, match="there is no 'others' under `push:`; did you mean 'other'"):
        requested_models(["others"], file, None)
