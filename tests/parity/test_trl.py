"""The packed engine's numbers against TRL's, on the same model and the same texts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.losses import PreferenceLoss
from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import pair_logprobs, token_losses
from snaketune.engine.model.selftest import self_test
from snaketune.engine.pair_logps import pair_logps
from snaketune.engine.preference_losses import loss_of
from snaketune.packing.reader import open_rows
from snaketune.tokenization.chat import ChatTokenizer
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain
from tests.packing.chain import rows_of

LENGTH = 256


def model_for(chat: ChatTokenizer, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = tiny_model("qwen2")
    model.resize_token_embeddings(chat.vocab_size, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def packed_batch(kind: str, rows: list[dict], tokenizer_folder: Path, folder: Path) -> tuple[dict, list[dict]]:
    """One batch with all rows, through real shards; and the packed rows."""
    payload = describe_files(tokenizer_folder)
    tokenizer = Artifact(folder / "tokenizer.json", {"payload": payload, "records": {}}, tokenizer_folder)
    corpus = chain.corpus(folder / "corpus", kind, rows, held_out=0)
    packed = open_rows(chain.pack(folder, corpus, tokenizer, kind, length=LENGTH), "train")
    made = [packed[r] for r in range(len(packed))]
    return collate(made, "sdpa"), made


def assert_gradients_close(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - expected[name]).abs().max()
        assert difference <= 1e-3 * expected[name].abs().max(), (name, difference)


def test_sft_loss_and_gradients_equal_trl(chat, tokenizer_folder, tmp_path):
    rows = rows_of("chat", 24)
    encoded = chat.encode([row["messages"] for row in rows])
    model = model_for(chat, seed=1)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=24, max_length=None, report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list(
            [
                {
                    "input_ids": one.ids.tolist(),
                    "labels": np.where(one.supervised, one.ids, -100).tolist(),
                }
                for one in encoded
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(tokenizer_folder),
    )  # fmt: skip
    theirs = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    theirs.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    self_test(model, [], CPU, training=True)
    batch, _ = packed_batch("sft", rows, tokenizer_folder, tmp_path / "packed")
    ours = token_losses(model, batch).mean()
    ours.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_gradients_close(model, gradients)


def trl_dpo_gradients(policy, reference, pairs, tokenizer, loss: str, folder: Path) -> tuple[torch.Tensor, dict]:
    """TRL's loss over the pairs, and its gradients."""
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(
            output_dir=str(folder), per_device_train_batch_size=len(pairs), max_length=None, beta=0.3, loss_type=[loss],
            report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        ),
        # As text, so that TRL ends a completion at its end-of-turn token, as the generation markers do here.
        train_dataset=Dataset.from_list(
            [
                {
                    "prompt": tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True),
                    "chosen": row["chosen"][0]["content"],
                    "rejected": row["rejected"][0]["content"],
                }
                for row in pairs
            ]
        ),
        processing_class=tokenizer,
    )  # fmt: skip
    policy.eval()
    policy.zero_grad()
    loss_value = trainer.compute_loss(policy, next(iter(trainer.get_train_dataloader())))
    loss_value.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    return loss_value.detach(), gradients


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("ipo", 0.0), ("sigmoid", 0.1)])
def test_dpo_loss_and_gradients_equal_trl_from_the_texts_on(chat, tokenizer_folder, tmp_path, loss, smoothing):
    pairs = rows_of("preferences", 9)
    # Some prompts come twice, and stand in their row once.
    pairs += [{**row, "id": f"{row['id']}x", "chosen": pairs[0]["chosen"]} for row in pairs[1:4]]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    policy, reference = model_for(chat, seed=1), model_for(chat, seed=2)
    theirs, gradients = trl_dpo_gradients(policy, reference, pairs, tokenizer, loss, tmp_path)
    if smoothing:
        # TRL has no smoothing in its sigmoid loss; it is the mixture with the loss on flipped labels.
        flipped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
        other, other_gradients = trl_dpo_gradients(policy, reference, flipped, tokenizer, loss, tmp_path)
        theirs = (1 - smoothing) * theirs + smoothing * other
        gradients = {k: (1 - smoothing) * v + smoothing * other_gradients[k] for k, v in gradients.items()}

    self_test(policy, [], CPU, training=True)
    self_test(reference, [], CPU, training=True)
    batch, rows = packed_batch("preference", pairs, tokenizer_folder, tmp_path / "packed")
    # Three rejected completions stand in two pairs.
    assert sum(len(row["segment_lengths"]) for row in rows) == 2 * len(pairs) - 3
    with torch.no_grad():
        reference_P2, _ = pair_logprobs(token_losses(reference, batch), batch)
    loss_settings = PreferenceLoss(loss=loss, beta=0.3, label_smoothing=smoothing)
    ours = loss_of(
        pair_logps(policy, batch | {"reference": reference_P2}, loss_settings),
        loss_settings,
        torch.tensor([len(pairs), 0, 0]),
    )
    ours.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_gradients_close(policy, gradients)
