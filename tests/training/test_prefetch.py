"""Prefetched batches are the same batches in the same order, and the thread has ended when a training ends."""

import threading

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from snaketune.artifacts.manifest import describe_files
from snaketune.config.lora import Lora
from snaketune.engine import features
from snaketune.engine.data_order import Prefetcher
from snaketune.engine.model.attention import KERNELS
from snaketune.engine.model.batches import Batch
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError

from .pipeline_runs import Interrupted, pack, spec, stop_after, train

CPU = torch.device("cpu")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.fixture
def overlapping(monkeypatch):
    """Prefetch as on a GPU."""
    prefetchers = []

    class Recorded(Prefetcher):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            prefetchers.append(self)

    monkeypatch.setattr(features, "overlaps", lambda device: True)
    monkeypatch.setattr(features, "Prefetcher", Recorded)
    yield prefetchers
    assert not threads()


def test_items_keep_their_order_and_an_error_follows_them():
    def source():
        yield from range(20)
        raise SnaketuneError("row 20 is no row")

    prefetcher = Prefetcher(source(), 3, CPU)
    assert [next(prefetcher) for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(SnaketuneError, match=r"^row 20 is no row$"):
            next(prefetcher)
    prefetcher.close()
    assert list(Prefetcher(iter(range(5)), 3, CPU)) == list(range(5))


def test_prefetch_is_bounded_and_close_ends_the_thread():
    requested, enough = [], threading.Event()

    def source():
        for number in range(1000):
            requested.append(number)
            # Two are in the queue, and the third has been collated.
            if number == 2:
                enough.set()
            yield number

    prefetcher = Prefetcher(source(), 2, CPU)
    assert enough.wait(30)
    assert next(prefetcher) == 0
    prefetcher.close()
    assert not threads()
    assert len(requested) <= 4


@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.3)])
def test_a_training_with_prefetch_is_the_same_also_when_resumed(tmp_path, monkeypatch, overlapping, lora):
    # Six steps an epoch of two micro-batches, the last one of one; checkpoints after the fourth and the eighth.
    rows, made = pack(tmp_path / "pack", rows=22), spec(epochs=2, lora=lora)
    with monkeypatch.context() as patch:
        patch.setattr(features, "overlaps", lambda device: False)
        alone = train(tmp_path / "alone", rows, made)
    assert not overlapping
    straight = train(tmp_path / "straight", rows, made)
    # One per epoch.
    assert len(overlapping) == 2
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed", rows, made)
    assert not threads()
    resumed = train(tmp_path / "resumed", rows, made)
    losses = [[entry["loss"] for entry in outcome.run["history"]] for outcome in (alone, straight, resumed)]
    assert losses[0] == losses[1] == losses[2]
    files = [describe_files(tmp_path / name / "payload.partial") for name in ("alone", "straight", "resumed")]
    assert "model.safetensors" in files[0]
    assert files[0] == files[1] == files[2]


def test_an_error_in_a_batch_ends_the_training_as_without_prefetch(tmp_path, overlapping):
    class Breaks(SftTrainer):
        @staticmethod
        def collate(rows, kernel, longest):
            raise SnaketuneError("row 3 of the batch: segments of 40 tokens, row of 32")

    with pytest.raises(SnaketuneError, match=r"^row 3 of the batch: segments of 40 tokens, row of 32$"):
        train(tmp_path / "work", pack(tmp_path / "pack", rows=8), spec(epochs=1), trainer=Breaks)
    assert overlapping


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_tensors_of_a_batch_are_pinned_and_copied_asynchronously(tmp_path, monkeypatch, kernel):
    """The data loader pins and accelerate copies; the GPU is simulated by a device of this machine."""
    rows = pack(tmp_path, rows=2)
    batch = Batch(SftTrainer.collate([rows[0], rows[1]], kernel))
    pinned, sent = [], []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, device, non_blocking=False):
        sent.append((tensor, torch.device(device).type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    copy = pin_memory(batch, "cuda")
    assert type(copy) is Batch
    assert copy.keys() == batch.keys()
    assert copy["segments"].layout is batch["segments"].layout
    moved = copy.to(torch.device("cuda", 0))
    # Only pinned tensors are copied.
    assert {id(tensor) for tensor, _, _ in sent} == {id(tensor) for tensor in pinned}
    assert len(sent) >= 5
    assert {(where, non_blocking) for _, where, non_blocking in sent} == {("cuda", True)}
    assert type(moved) is Batch
    assert moved["segments"].kernel == kernel
    sent.clear()
    batch.to("cpu")
    assert not any(non_blocking for _, _, non_blocking in sent)
