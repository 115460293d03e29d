"""A small tokenizer, trained once."""

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from tests.tokenization.small_tokenizers import train_in


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("tokenizer")
    work, _ = train_in(folder, "bpe")
    return Artifact(folder / "manifest.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)
