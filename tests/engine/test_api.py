"""The engine's trainers, called as TRL's: the same losses, resume, adapters, held-out rows, and what they refuse."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from snaketune.engine import PackedDPOTrainer, PackedSFTTrainer, pack_conversations, pack_pairs
from snaketune.engine.features import Options
from snaketune.errors import SnaketuneError
from tests.models.conftest import tiny_model

ROOT = Path(__file__).parents[2]
WORDS = [chr(97 + n) for n in range(20)]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}> {% if turn.role == 'assistant' %}{% generation %}{{ turn.content }} <eos>"
    "{% endgeneration %} {% else %}{{ turn.content }} <eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
LOOP = {
    "num_train_epochs": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "bf16": False, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    assert wrapped("a b")["input_ids"] == [5, 6]
    return wrapped


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def text(drawn: random.Random, words: int) -> str:
    return " ".join(drawn.choice(WORDS) for _ in range(words)) + " "


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def pairs(chat: bool = False) -> Dataset:
    """Two pairs per prompt."""
    drawn, rows = random.Random(0), []
    for _ in range(8):
        prompt = text(drawn, 5)
        for _ in range(2):
            chosen, rejected = text(drawn, 4), text(drawn, drawn.randrange(3, 7))
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    if chat:
        rows = [
            {"prompt": turns(row["prompt"])} | {name: turns("", row[name])[1:] for name in ("chosen", "rejected")}
            for row in rows
        ]
    return Dataset.from_list(rows)


def conversations() -> Dataset:
    drawn = random.Random(1)
    rows = [{"prompt": text(drawn, 5), "completion": text(drawn, drawn.randrange(3, 9))} for _ in range(20)]
    return Dataset.from_list(rows)


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def dpo_config(path: Path, rows: int = 100, **settings) -> DPOConfig:
    return DPOConfig(output_dir=str(path), per_device_train_batch_size=rows, **LOOP | settings)


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.5}, {"loss_type": ["ipo", "sft"], "loss_weights": [0.7, 0.3]}, {"ld_alpha": 0.5}],
)
@pytest.mark.parametrize("chat", [False, True])
def test_dpo_learns_what_trl_learns(tmp_path, folder, tokenizer, chat, settings):
    """All pairs are in one step, so that their order doesn't count."""
    dataset = pairs(chat)
    theirs = DPOTrainer(
        model=folder,
        args=dpo_config(tmp_path, max_length=None, **settings),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    rows = pack_pairs(dataset, tokenizer, length=64)
    assert rows.has_prefixes and len(rows) < len(dataset) / 2
    ours = PackedDPOTrainer(model=folder, args=dpo_config(tmp_path, **settings), train_dataset=rows)
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-4)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_learns_what_trl_learns(tmp_path, tokenizer, folder, loss_type):
    dataset = conversations()
    args = {"output_dir": str(tmp_path), "per_device_train_batch_size": 100, "loss_type": loss_type} | LOOP
    theirs = SFTTrainer(
        model=folder, args=SFTConfig(max_length=None, **args), train_dataset=dataset, processing_class=tokenizer
    )
    rows = pack_conversations(dataset, tokenizer, length=64)
    ours = PackedSFTTrainer(model=folder, args=SFTConfig(**args), train_dataset=rows)
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-4)


def test_a_conversation_is_tokenized_by_its_template(tokenizer):
    dataset = [{"messages": turns("a b", "c", "d", "e f")}]
    whole = pack_conversations(dataset, tokenizer, length=32)[0]
    ids = tokenizer.apply_chat_template(dataset[0]["messages"], return_dict=True)["input_ids"]
    assert whole["input_ids"][: len(ids)].tolist() == ids
    assert (whole["labels"] != -100).sum() == len(ids) - 1
    assistant = pack_conversations(dataset, tokenizer, length=32, assistant_only_loss=True)[0]
    learned = assistant["input_ids"][assistant["labels"] != -100]
    assert tokenizer.decode(learned) == "c <eos> e f <eos>"


def test_ids_need_no_tokenizer(tmp_path, folder):
    with_labels = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [9, 10]}]
    rows = pack_conversations(with_labels, length=16)
    assert len(rows) == 1 and sorted(rows[0]["labels"][rows[0]["labels"] != -100].tolist()) == [7, 8, 10]
    triples = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [7, 9]}]
    packed = pack_pairs(triples, length=16)
    # The prompt and the token that both completions begin with are stored once.
    assert packed.tokens == 5


def test_a_resumed_training_is_an_undisturbed_one(tmp_path, folder, tokenizer):
    rows = pack_pairs(pairs(), tokenizer, length=32)
    settings = {"rows": 2, "save_strategy": "steps", "save_steps": 5}
    straight = PackedDPOTrainer(model=folder, args=dpo_config(tmp_path / "a", **settings), train_dataset=rows)
    whole = losses(straight)
    assert len(whole) > 6
    first = PackedDPOTrainer(model=folder, args=dpo_config(tmp_path / "b", **settings), train_dataset=rows)
    first.add_callback(Stop(5))
    first.train()
    # A later save was killed, and another tool has written something else.
    (tmp_path / "b/checkpoint-9").mkdir()
    (tmp_path / "b/checkpoint-5-merged").mkdir()
    again = PackedDPOTrainer(model=folder, args=dpo_config(tmp_path / "b", **settings), train_dataset=rows)
    again.train(resume_from_checkpoint=True)
    with pytest.raises(SnaketuneError, match="a trainer trains once"):
        again.train()
    with pytest.raises(SnaketuneError, match=r"checkpoint-9/complete is missing"):
        PackedDPOTrainer(model=folder, args=dpo_config(tmp_path / "b", **settings), train_dataset=rows).train(
            resume_from_checkpoint=str(tmp_path / "b/checkpoint-9")
        )
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == whole
    for one, other in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Stop:
    """Ends a training after a step, like a kill after its checkpoint."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step

    def __getattr__(self, name: str):
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def test_adapters_held_out_rows_and_a_saved_model(tmp_path, folder, tokenizer):
    dataset = pairs()
    rows = pack_pairs(dataset, tokenizer, length=32)
    held_out = pack_pairs(dataset.select(range(4)), tokenizer, length=32)
    args = dpo_config(tmp_path, rows=4, eval_strategy="steps", eval_steps=2, gradient_checkpointing=True)
    trainer = PackedDPOTrainer(
        model=folder,
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        options=Options(ema=0.5),
    )
    first = losses(trainer)[0]
    assert first == pytest.approx(np.log(2), abs=1e-4)
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in measured][:3] == [0, 2, 4]
    assert measured[-1]["eval_accuracy"] >= measured[0]["eval_accuracy"]
    trainer.save_model(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["r"] == 4 and (tmp_path / "adapter/tokenizer.json").is_file()
    # The average of the weights is the result, and rows that are passed stay as they are.
    averaged = trainer.average.tensors
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert averaged and not rows.documents.values["reference"].any()
    latest = {name.replace(".default", ""): tensor for name, tensor in averaged.items()}
    assert not all(torch.equal(saved[name], latest[name]) for name in saved)
    sft = PackedSFTTrainer(
        model=tiny_model("llama"),
        args=TrainingArguments(output_dir=str(tmp_path / "sft"), per_device_train_batch_size=4, **LOOP),
        train_dataset=pack_conversations(conversations(), tokenizer, length=32),
        options=Options(muon=True),
    )
    sft.train()
    sft.save_model(tmp_path / "sft/model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sft/model")
    for one, other in zip(sft.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)


REFUSED = [
    ({"fp16": True}, "fp16"),
    ({"packing": True}, "packing"),
    ({"max_length": 9}, "max_length"),
    ({"max_steps": 3}, "max_steps"),
    ({"loss_type": "unknown"}, "loss_type"),
    ({"save_total_limit": 2}, "save_total_limit"),
    ({"metric_for_best_model": "loss"}, "metric_for_best_model"),
    ({"save_strategy": "best"}, "save_strategy"),
]


@pytest.mark.parametrize(("settings", "key"), REFUSED)
def test_an_argument_without_effect_is_refused_by_name(tmp_path, folder, tokenizer, settings, key):
    args = SFTConfig(output_dir=str(tmp_path), **LOOP)
    for name, value in settings.items():
        setattr(args, name, value)
    rows = pack_conversations(conversations(), tokenizer, length=32)
    with pytest.raises(SnaketuneError, match=rf"^args\.{key}: found"):
        PackedSFTTrainer(model=folder, args=args, train_dataset=rows)


def test_rows_and_models_of_another_kind_are_refused(tmp_path, folder, tokenizer, monkeypatch):
    of_pairs, of_turns = (
        pack_pairs(pairs(), tokenizer, length=32),
        pack_conversations(conversations(), tokenizer, length=32),
    )
    args = dpo_config(tmp_path)
    with pytest.raises(SnaketuneError, match="train_dataset: expected rows of pack_conversations, found pairs"):
        PackedSFTTrainer(model=folder, args=args, train_dataset=of_pairs)
    with pytest.raises(SnaketuneError, match="train_dataset: expected rows of pack_pairs, found conversations"):
        PackedDPOTrainer(model=folder, args=args, train_dataset=of_turns)
    with pytest.raises(SnaketuneError, match="found Dataset"):
        PackedDPOTrainer(model=folder, args=args, train_dataset=pairs())
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(SnaketuneError, match="found one with adapters"):
        PackedDPOTrainer(model=adapted, args=args, train_dataset=of_pairs)
    measured = dpo_config(tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(SnaketuneError, match="it needs an eval_dataset"):
        PackedDPOTrainer(model=folder, args=measured, train_dataset=of_pairs)
    with pytest.raises(SnaketuneError, match="overflow: found 'split'"):
        pack_pairs(pairs(), tokenizer, length=32, overflow="split")
    with pytest.raises(SnaketuneError, match="overflow: found 'x', expected drop, truncate, split or raise"):
        pack_conversations([{"text": "a"}], tokenizer, overflow="x")
    with pytest.raises(SnaketuneError, match="length: found 0"):
        pack_pairs(pairs(), tokenizer, length=0)
    with pytest.raises(SnaketuneError, match="row 0: its texts need a tokenizer"):
        pack_pairs(pairs(), length=32)
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(SnaketuneError, match="row 1 can't be tokenized: "):
        pack_pairs([pair, pair | {"prompt": 1}], tokenizer)
    with pytest.raises(SnaketuneError, match=r"row 0: .*'prompt', 'chosen' \(null\), 'rejected'"):
        pack_pairs([pair | {"chosen": None}], tokenizer)
    with pytest.raises(SnaketuneError, match="row 0 can't be tokenized: "):
        pack_conversations([{"messages": []}], tokenizer)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SnaketuneError, match="accelerate's mixed precision is bf16"):
        PackedDPOTrainer(model=folder, args=args, train_dataset=of_pairs)


@pytest.mark.parametrize(
    ("dataset", "named"),
    [([{"question": "a"}], "row 0: expected messages"), ([], "no row"), ([{"input_ids": [5] * 40}], "packing.length")],
)
def test_rows_that_cannot_be_packed_are_named(tokenizer, dataset, named):
    with pytest.raises(SnaketuneError, match=named):
        pack_conversations(dataset, tokenizer, length=32)


@pytest.mark.parametrize("script", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_the_examples_run_where_there_is_no_snakemake(tmp_path, folder, script):
    dataset = conversations() if script == "sft" else pairs()
    dataset.to_json(str(tmp_path / "rows.jsonl"))
    without = (
        "import runpy, sys; sys.modules['snakemake'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print(*(name for name in sys.modules if name.startswith('snaketune.')))"
    )
    command = [sys.executable, "-c", without, ROOT / f"examples/{script}.py", folder, tmp_path / "rows.jsonl", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packages = {name.split(".")[1] for name in done.stdout.splitlines()[-1].split()}
    assert packages <= {"engine", "errors", "files", "patterns", "progress", "suggestions"}
    made = tmp_path / {"sft": "model/model.safetensors", "dpo": "adapter/adapter_model.safetensors"}[script]
    assert made.is_file()
