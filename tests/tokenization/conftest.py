"""One of each kind of tokenizer, for the whole session."""

import json

import pytest
from small_tokenizers import byte_level, metaspace, train_in, unigram

from snaketune.tokenization.chat import ChatTokenizer


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The work folder and outcome of the stage, by model."""
    return {kind: train_in(tmp_path_factory.mktemp(kind), kind) for kind in ("bpe", "unigram")}


@pytest.fixture(scope="session")
def chats(trained, tmp_path_factory) -> dict[str, ChatTokenizer]:
    """Tokenizers of all kinds, by name, without adoption: the pad token may be wrong, ids are right."""
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {f"trained-{kind}": work.payload for kind, (work, _) in trained.items()}
    folders["byte-level"] = byte_level(root / "byte-level")
    folders["metaspace"] = metaspace(root / "metaspace")
    folders["legacy"] = metaspace(root / "legacy", legacy=True)
    folders["unigram"] = unigram(root / "unigram")
    for name in ("metaspace", "legacy"):
        path = folders[name] / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<unk>"}))
    return {name: ChatTokenizer.load(folder) for name, folder in folders.items()} | {"folders": folders}
