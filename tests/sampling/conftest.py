"""A sample."""

from pathlib import Path

import pyarrow as pa
import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.sampling.tables import PROMPT_SCHEMA, PROMPTS, RESPONSE_SCHEMA, RESPONSES
from snaketune.tables import write_table

TEXTS = ("Answer: 7", "Answer: 1,200", "no", "Answer: cat")
ANSWERS = ("7.0", "1200", None)


def artifact(folder: Path) -> Artifact:
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


@pytest.fixture
def samples(tmp_path) -> Artifact:
    """Three prompts, the last without an answer, with four responses each."""
    folder = tmp_path / "sample/responses"
    folder.mkdir(parents=True)
    prompts = [
        {
            "id": f"p{n}",
            "turn": 1,
            "corpus": "chat",
            "messages": [{"role": "user", "content": f"Q{n}"}],
            "answer": answer,
        }
        for n, answer in enumerate(ANSWERS)
    ]
    rows = [
        {
            "id": f"p{n}",
            "turn": 1,
            "index": index,
            "text": f"<think>x</think>{text}",
            "content": text,
            "tokens": [1, 2],
            "answer": answer,
        }
        for n, answer in enumerate(ANSWERS)
        for index, text in enumerate(TEXTS)
    ]
    write_table(folder / PROMPTS, pa.Table.from_pylist(prompts, schema=PROMPT_SCHEMA))
    write_table(folder / RESPONSES, pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA))
    return artifact(folder)
