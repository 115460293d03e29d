"""Options of trainings that other libraries have: the same as theirs, and resumed exactly."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import AdamW, Muon
from transformers.integrations.neftune import neftune_post_forward_hook
from trl.models.activation_offloading import OffloadActivations

from snaketune.config.lora import Lora
from snaketune.config.training_runs import Sft
from snaketune.engine import trainer as trainer_module
from snaketune.engine.embedding_noise import EmbeddingNoise
from snaketune.engine.model.batches import collate
from snaketune.engine.model.parameters import train_only
from snaketune.engine.optimizers import MuonWithAdamW
from snaketune.errors import SnaketuneError
from snaketune.models.traced_model import trace_model
from snaketune.packing.reader import open_rows
from snaketune.training import pipeline, prepared
from snaketune.training.prepared_sft import prepare_sft
from tests.models.conftest import CPU, tiny_model

from .pipeline_runs import copy_after, pack, spec, train
from .sft_runs import packed_rows, raw_rows, sft_run

LAST_LAYER = r"model\.layers\.1\..*"
# Settings of training, adapters and loss.
OPTIONS = {
    "neftune": ({"neftune_noise_alpha": 5.0}, None, "nll"),
    "neftune, adapters": ({"neftune_noise_alpha": 5.0}, Lora(rank=4, modules_to_save=("embed_tokens",)), "nll"),
    "loraplus": ({}, Lora(rank=4, loraplus_lr_ratio=4.0), "nll"),
    "pissa": ({}, Lora(rank=4, init_lora_weights="pissa"), "nll"),
    "pissa, fast": ({}, Lora(rank=4, init_lora_weights="pissa_niter_4"), "nll"),
    "olora": ({}, Lora(rank=4, init_lora_weights="olora"), "nll"),
    "orthogonal": ({}, Lora(rank=4, init_lora_weights="orthogonal"), "nll"),
    "eva": ({"average": {"ema": 0.5}}, Lora(rank=4, init_lora_weights="eva"), "nll"),
    "trainable": ({"trainable": LAST_LAYER}, None, "nll"),
    "dft": ({}, None, "dft"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("rows"), rows=12)


def train_straight_and_resumed(folder, rows, made, monkeypatch) -> None:
    """Train in `folder / "straight"`, and from its first checkpoint again in `folder / "resumed"`."""
    copy_after(1, folder / "straight", folder / "resumed", monkeypatch)
    train(folder / "straight", rows, made)
    train(folder / "resumed", rows, made)


# Each way to initialize adapters is resumed alike.
LIKE_PISSA = {"pissa, fast", "olora", "orthogonal"}


@pytest.mark.parametrize(
    "option", [pytest.param(one, marks=pytest.mark.slow if one in LIKE_PISSA else []) for one in OPTIONS]
)
def test_an_option_resumes_exactly_and_matters(option, rows, tmp_path, monkeypatch):
    settings, lora, loss = OPTIONS[option]
    made = spec(lora, epochs=2, **settings).model_copy(update={"loss": loss})
    train_straight_and_resumed(tmp_path, rows, made, monkeypatch)
    plain = spec(lora and Lora(rank=4, modules_to_save=lora.modules_to_save), epochs=2)
    train(tmp_path / "plain", rows, plain)
    straight, resumed, other = (
        load_file(tmp_path / name / "payload.partial/model.safetensors") for name in ("straight", "resumed", "plain")
    )
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]
    assert [name for name in straight if not torch.equal(straight[name], other[name])]
    for path in (tmp_path / "straight/payload.partial").rglob("adapter_*"):
        assert path.read_bytes() == (tmp_path / "resumed" / path.relative_to(tmp_path / "straight")).read_bytes()


def test_no_step_of_a_warm_up_has_a_rate_of_zero(rows, tmp_path):
    """Two steps have the full rate, and the decay after them is transformers'."""
    outcome = train(tmp_path, rows, spec(epochs=5, warmup_fraction=0.2, learning_rate=1e-3, schedule="linear"))
    rates, warmup = (
        [entry["learning_rate"] for entry in outcome.run["history"]],
        math.ceil(0.2 * outcome.counts["steps"]),
    )
    steps = outcome.counts["steps"]
    assert warmup > 2 and len(rates) == steps
    rising = [(step + 1) / warmup for step in range(warmup)]
    falling = [(steps - step) / (steps - warmup) for step in range(warmup, steps)]
    assert rates == pytest.approx([1e-3 * share for share in rising + falling])


def test_rows_in_order_resume_exactly(rows, tmp_path, monkeypatch):
    in_order = copy(rows)
    in_order.order = "length"
    made = spec(epochs=2)
    train(tmp_path / "shuffled", rows, made)
    train_straight_and_resumed(tmp_path, in_order, made, monkeypatch)
    shuffled, straight, resumed = (
        (tmp_path / name / "payload.partial/model.safetensors").read_bytes()
        for name in ("shuffled", "straight", "resumed")
    )
    assert straight == resumed != shuffled


def test_offloaded_activations_change_nothing(rows, tmp_path, monkeypatch):
    """With torch's own offloading in the place of TRL's, which needs a GPU."""
    moved = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __enter__(self):
            moved.append(self)
            return super().__enter__()

    monkeypatch.setattr(trainer_module, "offloaded_activations", lambda model: Counted())
    for name, offloads, devices in (("kept", False, ("cpu",)), ("cpu", True, ("cuda",)), ("moved", True, ("cpu",))):
        monkeypatch.setattr(prepared, "OFFLOADING_DEVICES", devices)
        train(tmp_path / name, rows, spec(epochs=1), activation_offloading=offloads)
        assert len(moved) == (6 if name == "moved" else 0)
    results = [
        (tmp_path / name / "payload.partial/model.safetensors").read_bytes() for name in ("kept", "cpu", "moved")
    ]
    assert results[0] == results[1] == results[2]


def test_activations_are_offloaded_by_trl(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "Stream", lambda *_: None, raising=False)
    assert isinstance(trainer_module.offloaded_activations(tiny_model("llama")), OffloadActivations)


def test_dft_is_trls(tmp_path, tokenizer):
    """Each step has all conversations, so packed rows and TRL's own have the same ones."""
    curves = []
    for name, rows in (("packed", packed_rows(tmp_path / "rows", tokenizer)), ("trl", raw_rows(tmp_path / "trl"))):
        run = sft_run(tmp_path / name)
        count = 12 if name == "trl" else len(open_rows(rows, "train"))
        training = run.spec.training.model_copy(update={"batch_rows": count, "epochs": 4.0, "learning_rate": 0.05})
        operation = run.operation.model_copy(update={"micro_batch_rows": count})
        made = run.spec.model_copy(update={"loss": "dft", "training": training})
        run = replace(run, spec=made, operation=operation)
        history = pipeline.train(prepare_sft(run, rows, tokenizer)).run["history"]
        curves.append([entry["loss"] for entry in history])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    # Weighted by probabilities, the loss of a model that knows nothing is small.
    assert 0 < curves[0][0] < 0.5
    assert len(curves[0]) == 4


class Embeds(torch.nn.Module):
    """Calls its embedding as a packed forward pass does."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(97, 16)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, ids, segments):
        return self.embedding(ids)


def batch_of(*lengths: int):
    ids = torch.arange(sum(lengths)).numpy()
    row = {"input_ids": ids.astype("int32"), "labels": ids.astype("int32")}
    segments = {
        "segment_lengths": torch.tensor(lengths).numpy(),
        "prefix_lengths": torch.zeros(len(lengths)).long().numpy(),
    }
    return collate([row | segments], CPU.kernel)


def noise_of(model: Embeds, batch) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.as_tensor(batch["input_ids"])
    return (
        model(ids, segments=batch["segments"]) - torch.nn.functional.embedding(ids, model.embedding.weight)
    ).detach()


def test_noise_of_a_document_alone_is_that_of_transformers():
    model, theirs = Embeds(), Embeds()
    EmbeddingNoise(model, 5.0)
    theirs.embedding.neftune_noise_alpha = 5.0
    theirs.embedding.register_forward_hook(neftune_post_forward_hook)
    torch.testing.assert_close(noise_of(model, batch_of(24)), noise_of(theirs, batch_of(24)), rtol=1e-4, atol=1e-6)
    assert not noise_of(model.eval(), batch_of(24)).any()


def test_noise_of_a_packed_document_depends_on_its_own_length():
    model = Embeds()
    EmbeddingNoise(model, 5.0)
    noise_TH = noise_of(model, batch_of(4, 36))[0]
    for begin, end in ((0, 4), (4, 40)):
        most = 5.0 / math.sqrt((end - begin) * 16)
        largest = noise_TH[begin:end].abs().max()
        assert 0.9 * most < largest <= most * 1.0001


@pytest.mark.parametrize("embedding_too", [False, True])
def test_loraplus_steps_are_larger_for_b(rows, tmp_path, embedding_too):
    """The first step of Adam moves every weight by its learning rate."""
    whole = ("embed_tokens",) if embedding_too else ()
    lora = Lora(rank=4, loraplus_lr_ratio=8.0, merge=False, modules_to_save=whole)
    one_step = {"epochs": 1 / 3, "schedule": "constant", "learning_rate": 1e-3, "warmup_fraction": 0.0}
    train(tmp_path, rows, spec(lora, **one_step))
    adapter = load_file(tmp_path / "payload.partial/adapter/adapter_model.safetensors")
    for name, tensor in adapter.items():
        if "lora_B" in name:
            assert tensor.abs().max() == pytest.approx(8e-3, rel=1e-3)
    if embedding_too:
        before = tiny_model("llama").get_input_embeddings().weight.detach()
        (after,) = (tensor for name, tensor in adapter.items() if "embed_tokens" in name)
        assert (after - before).abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_muon_is_torchs_for_matrices_and_adamw_for_all_else():
    ours, theirs = tiny_model("mixtral"), tiny_model("mixtral")
    named = dict(theirs.named_parameters())
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    matrices = [one for name, one in named.items() if one.dim() == 2 and name not in ends]
    others = [one for name, one in named.items() if one.dim() != 2 or name in ends]
    assert any(one.dim() == 3 for one in others)
    decays = {name for name in named if "norm" not in name}
    optimizers = (
        MuonWithAdamW(ours, 0.01, (0.9, 0.99), 0.1, decays),
        Muon(matrices, 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(
            [
                {"params": [one for one in others if one.dim() > 1], "weight_decay": 0.1},
                {"params": [one for one in others if one.dim() == 1], "weight_decay": 0.0},
            ],
            0.01,
            (0.9, 0.99),
            fused=True,
        ),
    )
    for step in range(3):
        torch.manual_seed(step)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            # As schedules do.
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimizer.step()
    assert not [name for name, one in ours.named_parameters() if not torch.equal(one, named[name])]


def test_only_parameters_that_match_are_trained(rows, tmp_path):
    outcome = train(tmp_path, rows, spec(trainable=LAST_LAYER))
    before = tiny_model("llama").state_dict()
    after = load_file(tmp_path / "payload.partial/model.safetensors")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in after if name.startswith("model.layers.1.")}
    trained = sum(after[name].numel() for name in changed)
    assert outcome.about["trainable_parameters"] == trained < outcome.about["parameters"]
    traced = trace_model(tiny_model("llama").config, CPU, trainable=LAST_LAYER)
    assert sum(weight.numel for weight in traced.weights if weight.trained) == trained


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("layers.1", r"matches no full name .* examples of names: model\.embed"), ("(a|aa)+x", "matches no full name")],
)
def test_a_pattern_that_matches_no_parameter_is_refused(pattern, message):
    with pytest.raises(SnaketuneError, match=rf"training\.trainable: .*{message}"):
        train_only(tiny_model("llama"), pattern)


def test_eva_is_the_main_directions_of_the_inputs(rows, tmp_path, capsys):
    """The inputs of the first layer's q, k and v are its norm's outputs, of all tokens that aren't padding."""
    lora = Lora(rank=4, init_lora_weights="eva", merge=False)
    no_step = {"epochs": 1 / 3, "schedule": "constant", "learning_rate": 1e-12}
    train(tmp_path, rows, spec(lora, **no_step))
    assert "adapters initialized by EVA from" in capsys.readouterr().out
    adapter = load_file(tmp_path / "payload.partial/adapter/adapter_model.safetensors")
    (a,) = (one for name, one in adapter.items() if "layers.0.self_attn.q_proj.lora_A" in name)
    ids = torch.cat([torch.as_tensor(rows[row]["input_ids"][:28]) for row in range(len(rows))]).long()
    plain = tiny_model("llama").model
    with torch.no_grad():
        inputs = plain.layers[0].input_layernorm(plain.embed_tokens(ids))
    centered = inputs - inputs.mean(0)
    most = torch.linalg.svdvals(centered)[:4].square().sum()
    torch.testing.assert_close(a @ a.T, torch.eye(4), rtol=0, atol=1e-3)
    # peft's decomposition is incremental, row by row.
    assert 0.95 * most < (centered @ a.T).square().sum() < 1.0001 * most


@pytest.mark.parametrize(
    ("rank", "message"),
    [(20, r"eva needs documents of lora\.rank 20 tokens or more"), (16, r"eva's 16 directions don't converge")],
)
def test_eva_ends_without_directions(rows, tmp_path, rank, message):
    """The longest documents have 18 tokens, and the inputs of one of the layers have 8 dimensions."""
    lora = Lora(rank=rank, init_lora_weights="eva")
    with pytest.raises(SnaketuneError, match=message):
        train(tmp_path, rows, spec(lora), lambda: tiny_model("llama", hidden_size=16))


LORA = {"rank": 4}
RUN = {"base": {"path": "some/model"}, "corpus": "chat", "tokenizer": "own"}
REFUSED = [
    ({"lora": LORA | {"init_lora_weights": "pissa", "merge": False}}, r"pissa changes the base weights.*merge: true"),
    (
        {"lora": LORA | {"init_lora_weights": "olora"}, "quantization": {}},
        r"olora changes the base weights, which are in 4",
    ),
    ({"lora": LORA | {"init_lora_weights": "loftq"}}, r"'loftq' isn't supported: its adapters correct the error"),
    ({"lora": LORA | {"init_lora_weights": "corda"}}, r"'corda' isn't supported"),
    ({"lora": LORA | {"init_lora_weights": "pisa"}}, r"init_lora_weights"),
    ({"lora": {"rank": 3, "init_lora_weights": "orthogonal"}}, r"orthogonal needs an even rank, found 3"),
    ({"lora": LORA | {"init_lora_weights": "eva"}, "packing": {"strategy": "none"}}, r"eva reads packed rows"),
    (
        {"lora": LORA | {"init_lora_weights": "eva"}, "operation": {"gpus": 2, "launch": "fsdp"}},
        r"eva doesn't work with models sharded by fsdp",
    ),
    ({"lora": LORA | {"loraplus_lr_ratio": 4}, "training": {"optimizer": "muon"}}, r"loraplus_lr_ratio: muon scales"),
    ({"lora": LORA, "training": {"trainable": ".*"}}, r"training\.trainable: with lora only adapters are trained"),
    ({"training": {"trainable": "("}}, r"is not a regular expression"),
    (
        {"training": {"optimizer": "muon"}, "operation": {"gpus": 2, "launch": "deepspeed"}},
        r"muon doesn't work with models",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(settings, message):
    settings = RUN | settings
    settings["training"] = {"learning_rate": 0.01, "batch_rows": 4} | settings.get("training", {})
    with pytest.raises(ValueError, match=message):
        Sft.model_validate(settings)
