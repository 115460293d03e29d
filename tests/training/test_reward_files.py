"""The published folder of a reward model gives the rewards that were trained and evaluated."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.evaluations import ExactMatch
from snaketune.config.generation import Generation
from snaketune.config.training_runs import Training
from snaketune.errors import SnaketuneError
from snaketune.evaluation.model_scores import build as evaluate
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import EvalSpec, RewardSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training import pipeline
from snaketune.training.prepared import TrainingRun
from snaketune.training.prepared_reward import check_padding, prepare_reward
from snaketune.training.reward_files import add_tokenizer, text_after_turn, without_end
from tests.models.conftest import CPU
from tests.packing import chain
from tests.packing.chain import rows_of
from tests.tokenization.small_tokenizers import CHATML, MISTRAL, PHI3

from .executed import executed

PAIRS, HELD_OUT = 24, 8


def start(folder: Path, tokenizer: Artifact) -> Artifact:
    """The result of an SFT run: a model with its tokenizer."""
    shutil.copytree(tokenizer.folder, folder)
    chat = ChatTokenizer.load(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": chat.pad_id, "eos_token_id": chat.stop_ids[0], "bos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=chat.vocab_size, initializer_range=0.2, **sizes, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Artifact(folder / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


@pytest.fixture
def published(tmp_path, tokenizer) -> tuple[Artifact, Artifact]:
    """A trained reward model, and its pairs."""
    corpus = chain.corpus(tmp_path / "corpus", "preference", rows_of("preferences", PAIRS), held_out=HELD_OUT)
    pack = chain.pack(tmp_path / "packs", corpus, tokenizer, "preference", length=512)
    training = Training(epochs=1, batch_rows=2, micro_batch_rows=2, learning_rate=0.01)
    spec = RewardSpec(training=training, lora=None, quantization=None, trust_remote_code=False)
    work = WorkFolder(tmp_path / "work")
    work.start()
    run = TrainingRun(spec=spec, operation=executed(training, log_steps=1), work=work, compute=CPU)
    before = start(tmp_path / "start", tokenizer)
    pipeline.train(prepare_reward(run, (before,), pack))
    add_tokenizer(before, work.payload)
    facts = {"payload": describe_files(work.payload), "records": {}}
    return Artifact(tmp_path / "reward.json", facts, work.payload), pack


def loaded_rewards(folder: Path) -> np.ndarray:
    """The rewards of the held-out pairs, as anybody computes them who loads the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rewards = []
    for row in rows_of("preferences", PAIRS)[-HELD_OUT:]:
        for completion in (row["chosen"], row["rejected"]):
            ids = tokenizer.apply_chat_template(row["prompt"] + completion, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                rewards.append(model(**ids).logits.item())
    return np.array(rewards).reshape(-1, 2)


def test_a_loaded_model_gives_the_rewards_that_are_evaluated(published, tmp_path, tokenizer):
    model, pack = published
    assert not (model.folder / "generation_config.json").exists()
    work = WorkFolder(tmp_path / "eval")
    work.start()
    spec = EvalSpec(
        base=None, trust_remote_code=False, conversations=(), preferences=("pairs",), generation=Generation(),
        exact_match=ExactMatch(), tasks=None, samples=1, judged=0, rewards=True,
    )  # fmt: skip
    inputs = {"corpora": [], "ref_logps": [], "base": [], "tasks": [], "task_data": []}
    operation = executed(Training(micro_batch_rows=1, learning_rate=1.0))
    evaluate(spec, work, model=[model], tokenizer=tokenizer, packs=[pack], operation=operation, **inputs)
    table = read_table(work.payload / "rewards.arrow")
    order = [int(pair) - (PAIRS - HELD_OUT) for pair in table["id"].to_pylist()]
    expected_P2 = loaded_rewards(model.folder)[order]
    found_P2 = np.stack([table["chosen_reward"].to_numpy(), table["rejected_reward"].to_numpy()], 1)
    np.testing.assert_allclose(found_P2, expected_P2, rtol=1e-4, atol=1e-4)
    assert expected_P2.std() > 0.1
    scores = json.loads((work.payload / "scores.json").read_text())["preferences"]["pairs"]
    margin_P = expected_P2[:, 0] - expected_P2[:, 1]
    assert scores["pairs"] == HELD_OUT
    assert scores["reward_accuracy"] == pytest.approx((margin_P > 0).mean(), abs=1e-4)
    assert scores["reward_margin"] == pytest.approx(margin_P.mean(), abs=1e-3)
    assert scores["reward_accuracy_interval"][0] <= scores["reward_accuracy"] <= scores["reward_accuracy_interval"][1]
    for key in ("by_margin", "calibration"):
        assert sum(group["pairs"] for group in scores[key]) == HELD_OUT
    sizes = [(group["from"], group["to"]) for group in scores["by_margin"]]
    assert sizes == sorted(sizes) and sizes[-1][1] == pytest.approx(np.abs(margin_P).max(), abs=1e-3)


@pytest.mark.parametrize("template", [CHATML, PHI3, MISTRAL])
def test_a_template_without_its_end_writes_all_else_as_before(template, tokenizer):
    plain = AutoTokenizer.from_pretrained(tokenizer.folder)
    plain.chat_template = text = template.read_text(encoding="utf-8")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\n"}]
    before = [plain.apply_chat_template(turns[:n], tokenize=False, add_generation_prompt=n == 1) for n in (1, 2)]
    plain.chat_template = without_end(text, "\n")
    after = [plain.apply_chat_template(turns[:n], tokenize=False, add_generation_prompt=n == 1) for n in (1, 2)]
    assert after == [before[0].removesuffix("\n"), before[1].removesuffix("\n")]


def test_what_a_template_writes_after_a_turn_is_found(tokenizer):
    chat = ChatTokenizer.load(tokenizer.folder)
    assert text_after_turn(chat) == "\n"


def test_padding_that_ends_turns_is_refused(tokenizer, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer.folder, folder)
    check_padding(ChatTokenizer.load(folder))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": config["eos_token"]}))
    with pytest.raises(SnaketuneError, match=r"pads with '<.im_end.>', which ends turns.*Set a pad_token"):
        check_padding(ChatTokenizer.load(folder))


def test_pairs_without_ratings_are_refused_where_margins_are_asked_for(published, tmp_path, tokenizer):
    _, pack = published
    training = Training(epochs=1, batch_rows=2, micro_batch_rows=2, learning_rate=0.01)
    spec = RewardSpec(training=training, lora=None, quantization=None, trust_remote_code=False, margin=True)
    work = WorkFolder(tmp_path / "other")
    run = TrainingRun(spec=spec, operation=executed(training), work=work, compute=CPU)
    with pytest.raises(SnaketuneError, match=r"reward.margin: 16 of 16 pairs have no ratings, such as .*remove margin"):
        prepare_reward(run, (replace(pack, folder=tmp_path / "start"),), pack)
