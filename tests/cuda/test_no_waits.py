"""Between two log lines, the host never synchronizes with its device: no code reads the value of a tensor.

Counted on real tensors on the CPU, where the same operations count: `bool(tensor)`, `.item()`, `.tolist()`, boolean masks,
`nonzero` and similar ones, and copies to the host.
"""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from snaketune.config.lora import Lora
from snaketune.engine.features import TrainingFeatures
from tests.cuda import standin
from tests.training.pipeline_runs import pack, spec, train
from tests.training.preference_runs import Trained

from .conftest import VARLEN

SYNCHRONIZING = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "repeat_interleave", "argwhere", "nonzero_static",
}  # fmt: skip
INDEXES = {"index", "index_put", "index_put_"}


class Waits(TorchDispatchMode):
    """Records operations that synchronize with the device, while `counts` is true."""

    def __init__(self):
        super().__init__()
        self.counts, self.records = False, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        masks = name in INDEXES and any(one is not None and one.dtype == torch.bool for one in arguments[1])
        if self.counts and (name in SYNCHRONIZING or masks):
            stack = traceback.extract_stack()
            # Excluded: the stand-in, since the real kernel doesn't synchronize; and collation, which runs on the host.
            if not any(frame.filename == standin.__file__ or frame.name == "collate" for frame in stack):
                own = [
                    f"{frame.filename.split('/')[-1]}:{frame.lineno}"
                    for frame in stack
                    if "/torch/" not in frame.filename
                ]
                self.records.append((name, own[-3:]))
        return function(*arguments, **keywords or {})


@pytest.fixture
def waits(monkeypatch):
    """Record in each step except the first, which logs a line, and the last."""
    mode, init = Waits(), TrainingFeatures.__init__

    class Counting(TrainerCallback):
        steps = 0

        def on_step_begin(self, args, state, control, **_):
            mode.counts = 0 < state.global_step < state.max_steps - 1
            self.steps += mode.counts

        def on_log(self, args, state, control, **_):
            mode.counts = False

    counting = Counting()

    def build(self, **arguments):
        init(self, **arguments)
        self.add_callback(counting)

    monkeypatch.setattr(TrainingFeatures, "__init__", build)
    yield mode
    assert counting.steps >= 3


LORA = Lora(rank=2, dropout=0.1)
SLOW = pytest.mark.slow
OTHERS = [(LORA, "simpo"), (None, {"ipo": 1.0, "sft": 0.1})]


@pytest.mark.parametrize(("lora", "checkpointing"), [(None, True), (LORA, False)])
def test_sft(tmp_path, calls, waits, lora, checkpointing):
    training = spec(lora, epochs=1, gradient_checkpointing=checkpointing)
    with waits:
        train(tmp_path / "work", pack(tmp_path / "pack"), training, "qwen2", compute=VARLEN, every=1000, log_steps=1000)
    assert waits.records == []


@pytest.mark.parametrize(
    ("lora", "loss"),
    [(LORA, "sigmoid"), (None, "aot"), *(pytest.param(*case, marks=SLOW) for case in OTHERS)],
    ids=str,
)
def test_dpo(tmp_path, calls, waits, lora, loss):
    pairs = Trained(tmp_path, rows=24, family="qwen2", compute=VARLEN, frozen=bool(lora))
    with waits:
        pairs.train("work", {"loss": loss}, lora=lora, micro_batch_rows=2, every=1000, log_steps=1000, epochs=1)
    assert waits.records == []
