"""A small tokenizer of the demo's texts."""

from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tables import write_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.vocabulary import build
from tests.packing.chain import ROOT, rows_of


@pytest.fixture(scope="package")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A small tokenizer, trained by the workflow's own stage on the demo's texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    rows = folder / "rows"
    rows.mkdir()
    write_table(rows / "train-00000.arrow", pa.table({"messages": [row["messages"] for row in rows_of("chat", 300)]}))
    corpus = Artifact(folder / "manifest.json", {"payload": describe_files(rows), "records": {}}, rows)
    work = WorkFolder(folder / "work")
    work.start()
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=0.9995, split_digits=True)
    template = ROOT / "resources/chat_templates/chatml.jinja"
    build(spec, work, corpora=[corpus], chat_template=[template], base=[])
    return work.payload


@pytest.fixture(scope="package")
def chat(tokenizer_folder) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_folder)
