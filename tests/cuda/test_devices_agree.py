"""Every forward pass of a training on fake CUDA tensors: no tensor of a batch stays on the host."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from snaketune.config.lora import Lora
from snaketune.engine import dpo as dpo_trainer
from snaketune.engine import trainer as trainer_module
from snaketune.engine.model.compiling import CompileChoice
from snaketune.engine.model.devices import Compute
from snaketune.engine.packing.rows import EqualTokens
from snaketune.engine.sft import SftTrainer
from snaketune.engine.trainer import PackedTrainer
from tests.training.pipeline_runs import pack, spec, train
from tests.training.preference_runs import Trained

from .conftest import GPU, VARLEN, to_fake_cuda

ON_GPU = Compute(device=GPU, dtype=torch.bfloat16, kernel="varlen")


class Copies(TorchDispatchMode):
    """Records copies between devices; a forward pass on a GPU should have none."""

    def __init__(self):
        super().__init__()
        self.copied: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        name = function.overloadpacket.__name__
        if name == "_to_copy" and keywords.get("device") not in (None, arguments[0].device):
            self.copied.append(f"{arguments[0].device} to {keywords['device']}")
        if name == "copy_" and arguments[0].device != arguments[1].device:
            self.copied.append(f"{arguments[1].device} to {arguments[0].device}")
        return function(*arguments, **keywords)


@pytest.fixture
def trainers(tmp_path, monkeypatch, calls):
    """Real trainers of a llama, built and self-tested on the CPU with the stand-in."""
    made = []

    def caught(trainer, *_):
        made.append(trainer)
        raise Made

    monkeypatch.setattr("snaketune.training.pipeline.fit", caught)

    def make(kind: str, lora: Lora | None = None) -> PackedTrainer:
        with pytest.raises(Made):
            if kind == "sft":
                train(tmp_path / "sft", pack(tmp_path / "pack"), spec(lora, compile=True), compute=VARLEN)
            else:
                pairs = Trained(tmp_path, family="qwen2", compute=VARLEN, frozen=bool(lora))
                pairs.train("dpo", {"loss": "sigmoid"}, lora=lora)
        return made.pop()

    return make


class Made(Exception):
    """Raised once the trainer is built, to stop the stage."""


def on_gpu(trainer: PackedTrainer, mode, monkeypatch) -> None:
    """Pretend that the process has a GPU and the model is on it. Batches are made of real tensors, on the host."""
    collate_items = trainer._collate_items

    def on_host(items):
        with unset_fake_temporarily():
            return collate_items(items)

    monkeypatch.setattr(trainer, "_collate_items", on_host)
    to_fake_cuda(trainer.model, mode)
    monkeypatch.setattr(TrainingArguments, "device", property(lambda _: GPU))
    trainer.compute = ON_GPU


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_sft_forwards_in_the_loop_and_in_compile(trainers, fake_cuda, monkeypatch, lora):
    trainer = trainers("sft", lora)
    on_gpu(trainer, fake_cuda, monkeypatch)
    seen = []
    monkeypatch.setattr(trainer_module, "choose_compilation", lambda *_: CompileChoice(compiled=True, reason="test"))
    monkeypatch.setattr(trainer_module, "compile_layers", lambda *_, **__: None)
    monkeypatch.setattr(trainer_module, "_check_compiled", lambda *losses: seen.extend(losses[:3]))
    with fake_cuda:
        trainer.compile()
        assert [loss.device for loss in seen] == [GPU] * 3
        in_loop(trainer)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_dpo_forwards_in_the_loop_and_its_check(trainers, fake_cuda, monkeypatch, lora):
    trainer = trainers("dpo", lora)
    on_gpu(trainer, fake_cuda, monkeypatch)
    seen = []
    monkeypatch.setattr(dpo_trainer, "check_policy_is_reference", lambda *losses, **_: seen.extend(losses[:3]))
    with fake_cuda:
        trainer.check_start()
        assert [tensor.device for tensor in seen] == [GPU] * 3
        in_loop(trainer)


def in_loop(trainer: PackedTrainer) -> None:
    """Check that a micro-batch is moved once, and nothing is copied between devices after that."""
    batch = trainer._prepare_inputs(trainer._collate_items([trainer.train_dataset[0], trainer.train_dataset[1]]))
    on_devices = {value.device for value in batch.values() if isinstance(value, torch.Tensor)}
    segments = [value for value in vars(batch["segments"]).values() if isinstance(value, torch.Tensor)]
    assert on_devices | {tensor.device for tensor in segments} == {GPU}
    assert segments
    totals = trainer._get_num_items_in_batch([batch], GPU)
    with Copies() as copies, trainer.as_in_training():
        loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=totals)
    assert loss.device == GPU
    assert copies.copied == []


def test_transformers_own_prepare_inputs_does_not_move_segments(fake_cuda, tmp_path, calls):
    """Without `PackedTrainer._prepare_inputs` these tests would fail."""
    rows = pack(tmp_path)
    batch = SftTrainer.collate(EqualTokens(rows)[0], "varlen")
    trainer = SimpleNamespace(args=SimpleNamespace(device=GPU), is_deepspeed_enabled=False)
    trainer._prepare_input = lambda data: Trainer._prepare_input(trainer, data)
    with fake_cuda:
        moved = Trainer._prepare_inputs(trainer, batch)
    assert (moved["input_ids"].device, moved["segments"].positions_T.device.type) == (GPU, "cpu")


def test_deepspeed_in_bfloat16_does_not_cast_a_batch(trainers, monkeypatch):
    trainer = trainers("dpo")
    batch = trainer._collate_items([trainer.train_dataset[0]])
    batch["reference"] = torch.full_like(batch["reference"], -351.37)
    trainer.is_deepspeed_enabled = True
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    # transformers' own `_prepare_inputs` casts it.
    assert Trainer._prepare_input(trainer, batch["reference"])[0, 0].item() == -352
    moved = trainer._prepare_inputs(batch)
    assert moved["reference"].dtype == torch.float32
    assert torch.equal(moved["reference"], batch["reference"])
