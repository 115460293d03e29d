"""Scores by a reward model are those that transformers computes for each conversation alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Pretrained
from snaketune.errors import SnaketuneError
from snaketune.sampling.reward_model import build
from snaketune.sampling.tables import SCORES
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import RateSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from tests.tokenization.small_tokenizers import train_in

from .conftest import TEXTS

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A reward model with its tokenizer."""
    folder = train_in(tmp_path / "model", "bpe")[0].payload
    save(folder)
    return folder


def save(folder: Path, kind=AutoModelForSequenceClassification, **more) -> None:
    chat = ChatTokenizer.load(folder)
    torch.manual_seed(0)
    ids = {"pad_token_id": chat.pad_id, "eos_token_id": chat.stop_ids[0], "bos_token_id": None}
    labels = {"num_labels": 1, "max_position_embeddings": 64, "initializer_range": 0.3}
    kind.from_config(LlamaConfig(vocab_size=chat.vocab_size, **SIZES, **(ids | labels | more))).save_pretrained(folder)


@pytest.fixture
def rated(tmp_path, samples, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(folder: Path, batch_size: int = 4):
        work = WorkFolder(tmp_path / f"results/.work/rate/{batch_size}")
        work.start()
        spec = RateSpec(base=Pretrained(path=str(folder)), batch_size=batch_size)
        outcome = build(spec, work, samples=samples, base=sorted(folder.glob("*.safetensors")))
        return outcome, read_table(work.payload / SCORES)["score"].to_pylist()

    return run


def alone(folder: Path) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for number in range(3):
        for text in TEXTS:
            turns = [{"role": "user", "content": f"Q{number}"}, {"role": "assistant", "content": text}]
            ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
            with torch.no_grad():
                found.append(model(input_ids=ids).logits.item())
    return found


def test_a_model_that_was_trained_here_scores_as_from_its_folder(folder, rated, tmp_path, samples):
    _, expected = rated(folder)
    facts = {"payload": describe_files(folder), "records": {}}
    trained = Artifact(tmp_path / "reward.json", facts, folder)
    work = WorkFolder(tmp_path / "results/.work/rate/trained")
    work.start()
    outcome = build(RateSpec(base=None, batch_size=4), work, samples=samples, model=[trained])
    assert read_table(work.payload / SCORES)["score"].to_pylist() == expected
    # Its scores are kept by its content, not by where it lies.
    assert outcome.run["responses_scored"] == 12


@pytest.mark.parametrize("batch_size", [1, 5])
def test_scores_are_those_of_each_conversation_alone(folder, rated, batch_size):
    outcome, scores = rated(folder, batch_size)
    expected = alone(folder)
    assert scores == pytest.approx(expected, abs=1e-5) and len(set(expected)) == 12
    assert outcome.counts == {"responses": 12, "scored": 12, "without": {}}
    again, same = rated(folder, batch_size)
    assert same == scores and again.run["responses_scored"] == 0


def test_a_model_without_a_padding_token_scores_one_at_a_time(folder, rated):
    save(folder, pad_token_id=None)
    _, scores = rated(folder)
    assert scores == pytest.approx(alone(folder), abs=1e-5)


def test_conversations_beyond_its_positions_have_no_score(folder, rated):
    lengths = sorted(
        len(AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, return_dict=True)["input_ids"])
        for turns in ([{"role": "user", "content": "Q0"}, {"role": "assistant", "content": text}] for text in TEXTS)
    )
    save(folder, max_position_embeddings=lengths[-1] - 1)
    outcome, scores = rated(folder)
    assert outcome.counts["without"] == {"longer than the reward model's positions": scores.count(None)}
    assert 0 < scores.count(None) < 12


def test_what_is_no_reward_model_is_refused(folder, rated):
    save(folder, num_labels=3)
    with pytest.raises(SnaketuneError, match=r"has 3 outputs; expected a reward model"):
        rated(folder)
    save(folder, AutoModelForCausalLM)
    with pytest.raises(SnaketuneError, match=r"lacks weights that its config.json needs.*score.weight"):
        rated(folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SnaketuneError, match="has no chat template"):
        rated(folder)
