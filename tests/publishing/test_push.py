"""Pushes, against a stand-in for the Hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import describe_files, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.publishing.push import models_asked_for
from snaketune.stages.cache.code_digest import PACKAGE_FOLDER

from .hub import TOKEN, Hub, running
from .invented import files_of, write_handed_on

ROOT = Path(__file__).parents[2]
PUSH = {"model": "dpo:demo", "repository": "owner/name"}
NAMES = {"README.md", *files_of("dpo")}


@pytest.fixture
def hub():
    with running() as hub:
        yield hub


@pytest.fixture
def handed_on(tmp_path) -> Path:
    write_handed_on(tmp_path)
    return tmp_path


def started(hub: Hub, folder: Path, *arguments: str, token: str | None = TOKEN, **push) -> subprocess.Popen:
    """`python -m snaketune push` in `folder`, with what is told of `push` besides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    # Nothing of this user: neither a token nor a cache. Uploads by LFS, since Xet is no protocol to stand in for.
    told = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": str(PACKAGE_FOLDER.parent),
    }
    models = json.dumps({"demo": PUSH | push})
    return subprocess.Popen(
        [sys.executable, "-m", "snaketune", "push", "--models", models, *arguments],
        cwd=folder, env=kept | told | ({"HF_TOKEN": token} if token else {}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def pushed(hub: Hub, folder: Path, *arguments: str, status: int = 0, **told) -> str:
    """All that a push says."""
    process = started(hub, folder, *arguments, **told)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == status, said
    assert TOKEN not in said
    return said


def test_a_model_and_its_card_are_one_commit_in_a_private_repository(hub, handed_on):
    said = pushed(hub, handed_on)
    repository = hub.repositories["owner/name"]
    assert repository.private
    assert set(repository.branches["main"]) == NAMES
    assert len(repository.commits) == 1
    assert b"weights of dpo" in hub.objects.values()
    assert f"pushed, {hub.endpoint}/owner/name/commit/{repository.sha}" in said


def test_pushed_again_nothing_new_is_sent_and_what_changed_is(hub, handed_on):
    pushed(hub, handed_on)
    before, uploads = dict(hub.repositories["owner/name"].branches["main"]), list(hub.uploads)
    assert "nothing new" in pushed(hub, handed_on)
    assert len(hub.repositories["owner/name"].commits) == 1
    assert hub.uploads == uploads
    replace(handed_on, "tokenizer.json", "[1]")
    pushed(hub, handed_on)
    after = hub.repositories["owner/name"].branches["main"]
    # The card has its digest.
    assert {name for name in NAMES if after[name] != before[name]} == {"tokenizer.json"}
    assert len(hub.uploads) == len(uploads) + 1


def replace(folder: Path, name: str, content: str) -> None:
    """Another result with other content of one file, whose card is up to date."""
    manifest, model = folder / "results/dpo/demo/manifest.json", folder / "results/dpo/demo/model"
    card = folder / "results/card/dpo-demo/manifest.json"
    (model / name).write_text(content)
    before = digest_file(manifest)
    write_manifest(manifest, json.loads(manifest.read_text()) | {"payload": describe_files(model)})
    said = json.loads(card.read_text())
    said["inputs"]["manifests"] = [
        digest_file(manifest) if one == before else one for one in said["inputs"]["manifests"]
    ]
    write_manifest(card, said)


def test_killed_in_the_middle_it_completes_when_it_runs_again(hub, handed_on):
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
    # What had come wasn't sent again.
    assert len(hub.uploads) == len(set(hub.uploads)) == 2


def test_a_dry_run_lists_and_sends_nothing(hub, handed_on):
    said = pushed(hub, handed_on, "--dry-run", token=None)
    assert "dpo:demo to owner/name (private, branch main)" in said
    weights = handed_on / "results/dpo/demo/model/model.safetensors"
    assert f"14  {digest_file(weights)}  model.safetensors" in said
    assert "nothing was sent" in said
    assert not hub.repositories


def test_another_branch_and_a_public_repository_where_they_are_asked_for(hub, handed_on):
    pushed(hub, handed_on, branch="v1", private=False)
    repository = hub.repositories["owner/name"]
    assert not repository.private
    assert (set(repository.branches["main"]), set(repository.branches["v1"])) == (set(), NAMES)


def test_a_public_repository_gets_nothing_private(hub, handed_on):
    pushed(hub, handed_on, private=False, branch="v1")
    said = pushed(hub, handed_on, status=1)
    assert "owner/name is there and public" in said
    assert hub.repositories["owner/name"].branches["main"] == {}


def test_weights_of_the_model_before_do_not_stay_and_other_files_do(hub, handed_on):
    pushed(hub, handed_on)
    files = hub.repositories["owner/name"].branches["main"]
    files |= {"model-00001-of-00002.safetensors": "0", "model.safetensors.index.json": "0", "notes.md": "0"}
    said = pushed(hub, handed_on)
    assert (
        "weights that were there before are gone: model-00001-of-00002.safetensors, model.safetensors.index.json"
        in said
    )
    assert set(hub.repositories["owner/name"].branches["main"]) == NAMES | {"notes.md"}


@pytest.mark.parametrize("token", ["hf_WrongWrongWrongWrongWrongWrong", "no-token-by-its-looks"])
def test_a_wrong_token_is_refused_in_a_sentence_without_it(hub, handed_on, token):
    said = pushed(hub, handed_on, status=1, token=token)
    assert "the Hub doesn't take the token in HF_TOKEN" in said
    assert token not in said
    assert "Traceback" not in said
    assert not hub.repositories


def test_without_a_token_nothing_is_asked_of_anybody(hub, handed_on):
    (handed_on / "hf").mkdir()
    # What `hf auth login` leaves isn't taken.
    (handed_on / "hf/token").write_text(TOKEN)
    assert "HF_TOKEN isn't set" in pushed(hub, handed_on, status=1, token=None)
    assert not hub.repositories


def spoil(name: str, content: str):
    return lambda folder: (folder / "results" / name).write_text(content)


def take_the_manifest_of_another(folder: Path) -> None:
    """As after a training whose card wasn't written yet."""
    path = folder / "results/dpo/demo/manifest.json"
    write_manifest(path, json.loads(path.read_text()) | {"fingerprint": "0" * 32})


REFUSED = {
    "a file that nobody described": (spoil("dpo/demo/model/.env", "x"), "has .env, which"),
    "a link that nobody described": (
        lambda folder: (folder / "results/dpo/demo/model/x.json").symlink_to("/etc/passwd"), "has x.json, which",
    ),
    "a file that changed": (spoil("dpo/demo/model/model.safetensors", "others"), "model.safetensors is damaged"),
    "a card that changed": (spoil("card/dpo-demo/card/README.md", "x"), "README.md is damaged"),
    "no model": (lambda folder: (folder / "results/dpo/demo/manifest.json").unlink(), "manifest.json doesn't exist"),
    "a card of another result": (take_the_manifest_of_another, "is of another result of dpo:demo"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_as_its_manifest_says_is_not_pushed(hub, handed_on, what):
    change, said = REFUSED[what]
    change(handed_on)
    assert said in pushed(hub, handed_on, status=1)
    assert not hub.repositories


@pytest.mark.parametrize(
    ("names", "config", "said"),
    [
        ([], "no.yaml", "no.yaml isn't there"),
        ([], "config/config.yaml", "config/config.yaml has no `push:`"),
    ],
)
def test_by_hand_a_config_says_what_is_pushed(names, config, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SnaketuneError, match=said):
        models_asked_for(names, Path(config), None)


def test_some_of_a_config_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    config["push"] = {"one": PUSH, "other": PUSH | {"repository": "owner/other"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert list(models_asked_for([], file, None)) == ["one", "other"]
    (other,) = models_asked_for(["other"], file, None).values()
    assert (other.repository, other.private, other.branch) == ("owner/other", True, "main")
    with pytest.raises(SnaketuneError, match="there is no 'others' under `push:`; did you mean 'other'"):
        models_asked_for(["others"], file, None)
