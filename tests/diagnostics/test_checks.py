"""Each check of a finished training passes on what is right, and fails where what it guards is broken."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.families.tiny import tiny_config
from benchmarks.families.tiny import tiny_model as family_model

from snaketune.config.lora import Lora
from snaketune.diagnostics import verified_training
from snaketune.diagnostics.checks import gradients, recomputed, sequences, turns, weights
from snaketune.diagnostics.checks.check import attempted, judged
from snaketune.diagnostics.verified import as_text
from snaketune.engine.model import kernels
from snaketune.engine.model.adapters import load_adapter, merge, save_adapter
from snaketune.engine.model.selftest import self_test
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.evaluation.held_out import held_out_loss, held_out_preferences
from snaketune.models.lora import add_lora
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.reference.logps_table import read_ref_logps
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import tokenizer_artifact
from tests.training import pipeline_runs
from tests.training.executed import executed, loss_of, made_by
from tests.training.preference_runs import packed_pairs, referenced


def texts(count: int = 3) -> list[sequences.Sequence]:
    random = np.random.default_rng(0)
    ids = [random.integers(4, VOCABULARY, 12) for _ in range(count)]
    return [sequences.Sequence(ids=one, labels=one, own=0) for one in ids]


def training(folder: Path, rows, trainer=SftTrainer, load=lambda *_: tiny_model("llama")) -> PreparedTraining:
    spec = pipeline_runs.spec()
    work = WorkFolder(folder)
    work.start()
    run = TrainingRun(spec=spec, operation=executed(spec.training), work=work, compute=CPU)
    initial, loss = made_by(load), loss_of(spec)
    return PreparedTraining(trainer_class=trainer, rows=rows, run=run, initial=initial, held_out=rows, loss=loss)


# packed = alone


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_next"])
def test_packed_rows_equal_their_documents_in_loss_and_gradients(tmp_path, family):
    rows = pipeline_runs.pack(tmp_path, rows=3)
    model = family_model(tiny_config(family)) if family != "llama" else tiny_model("llama")
    compute = self_test(model, [rows], CPU, training=True).compute
    check = gradients.packed_equals_alone(model, [rows[0], rows[2]], compute)
    assert check.status == "passed" and check.figure < 1e-4, check


def test_pairs_equal_their_sequences(tmp_path):
    rows = open_rows(packed_pairs(tmp_path, 3), "train")
    model = tiny_model("llama")
    compute = self_test(model, [rows], CPU, training=True).compute
    assert gradients.packed_equals_alone(model, [rows[number] for number in range(3)], compute).status == "passed"


def test_a_mask_that_leaks_fails(tmp_path, monkeypatch):
    rows = pipeline_runs.pack(tmp_path, rows=3)
    model = tiny_model("llama")
    compute = self_test(model, [rows], CPU, training=True).compute

    def leaking(query, key, value, segments, options):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(kernels.KERNELS, "sdpa", leaking)
    check = gradients.packed_equals_alone(model, [rows[0]], compute)
    assert check.status == "failed" and "gradients by" in check.reason


# micro-batch 1 = all


class OwnMean(SftTrainer):
    """Divides the loss of a micro-batch by its own tokens."""

    def batch_loss(self, model, batch, totals):
        return super().batch_loss(model, batch, torch.tensor([len(batch["targets"])]))


def test_micro_batches_add_up_to_the_step_and_a_mean_of_each_fails(tmp_path):
    # Rows of different numbers of supervised tokens.
    rows = pipeline_runs.pack(tmp_path / "pack", rows=8, supervised=lambda row: row != 3)
    assert gradients.micro_batches_equal(training(tmp_path / "right", rows), 8).status == "passed"
    check = gradients.micro_batches_equal(training(tmp_path / "wrong", rows, OwnMean), 8)
    assert check.status == "failed"


# merged = base + adapter


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def adapted(request, tmp_path_factory):
    """A base, its trained adapter, and the merged weights."""
    folder = tmp_path_factory.mktemp("adapted") / "adapter"
    model = add_lora(tiny_model(request.param), Lora(rank=2))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(model, folder, base=None, grown=False)
    return SimpleNamespace(family=request.param, adapter=folder, saved=merge(model, torch.float32).eval())


def check_merged(adapted, saved, dtype=torch.float32):
    base = tiny_model(adapted.family)
    return weights.merged_equals_base_and_adapter(base, adapted.adapter, saved, dtype, texts())


def test_a_merge_is_base_plus_adapter(adapted):
    assert check_merged(adapted, adapted.saved).status == "passed"
    rounded = copy.deepcopy(adapted.saved).to(torch.bfloat16).float()
    assert check_merged(adapted, rounded, torch.bfloat16).status == "passed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_that_drops_an_expert_or_a_layer_fails(adapted, dtype):
    saved, base = copy.deepcopy(adapted.saved), dict(tiny_model(adapted.family).named_parameters())
    part = "experts.gate_up_proj" if adapted.family == "mixtral" else "q_proj.weight"
    name = next(name for name, _ in saved.named_parameters() if name.endswith(part))
    with torch.no_grad():
        weight = dict(saved.named_parameters())[name]
        index = (slice(1, 2),) if adapted.family == "mixtral" else ()
        weight[index] = base[name][index]
    check = check_merged(adapted, saved.to(dtype).float(), dtype)
    assert check.status == "failed" and name in check.reason


def test_an_adapter_that_was_merged_twice_fails(adapted):
    twice = merge(load_adapter(copy.deepcopy(adapted.saved), adapted.adapter), torch.float32)
    assert check_merged(adapted, twice).status == "failed"


# saved = in memory


def test_saved_weights_measure_as_at_the_end_and_a_changed_one_fails(tmp_path):
    rows = pipeline_runs.pack(tmp_path / "pack", rows=8)
    held_out = pipeline_runs.held_out_pack(tmp_path / "held_out", rows=6)
    made = pipeline_runs.spec(epochs=1)
    evaluate = {"every": 1, "rows": 4, "samples": 0}
    outcome = pipeline_runs.train(tmp_path / "work", rows, made, held_out=held_out, evaluate=evaluate)
    model = tiny_model("llama").from_pretrained(tmp_path / "work/payload.partial")

    def check(loaded):
        again = replace(training(tmp_path / "again", rows, load=lambda *_: copy.deepcopy(loaded)), held_out=held_out)
        return weights.saved_equals_trained(again, outcome.run, torch.float32)

    result = check(model)
    assert result.status == "passed" and "4 rows" in result.compares
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] += 0.5
    assert check(model).status == "failed"
    assert weights.saved_equals_trained(training(tmp_path / "none", rows), {}, torch.float32).status == "not checked"


# bfloat16 = float32, GGUF = Hugging Face


def test_a_rounded_model_computes_the_same_and_a_coarser_one_fails():
    model, rounded = tiny_model("llama"), tiny_model("llama").to(torch.bfloat16)
    assert weights.bfloat16_equals_float32(model, rounded, texts()).status == "passed"
    assert weights.gguf_equals_hugging_face(model, rounded, texts(), 0.05).status == "passed"
    with torch.no_grad():
        for weight in rounded.parameters():
            # To two bits of mantissa.
            weight.copy_((weight.float() * 4).round() / 4)
    assert weights.bfloat16_equals_float32(model, rounded, texts()).status == "failed"
    assert weights.gguf_equals_hugging_face(model, rounded, texts(), 0.05).status == "failed"


# Turns


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_artifact(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module", params=["sft", "preference"])
def conversations(request, tmp_path_factory, tokenizer) -> list[turns.Conversation]:
    folder, kind = tmp_path_factory.mktemp("turns"), request.param
    rows = chain.rows_of("chat" if kind == "sft" else "preferences", 30)
    corpus = chain.corpus(folder / "corpus", kind, rows)
    pack = chain.pack(folder / "pack", corpus, tokenizer, kind)
    packed, listed = open_rows(pack, "train"), list(documents(pack, "train"))
    found = turns.conversations_in(
        packed, list(range(len(packed))), listed, read_table(corpus.file("train-00000.arrow")).to_pylist()
    )
    assert len(found) == len(listed)
    return found


def test_what_precedes_an_answer_is_what_generate_is_given_and_another_template_fails(
    conversations, tokenizer, tmp_path
):
    check = turns.prompts_are_those_of_generate(ChatTokenizer.load(tokenizer.folder), conversations)
    assert check.status == "passed" and check.figure == 0
    other = shutil.copytree(tokenizer.folder, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text("Be brief. " + template.read_text(encoding="utf-8"), encoding="utf-8")
    check = turns.prompts_are_those_of_generate(ChatTokenizer.load(other), conversations)
    assert check.status == "failed" and check.figure == 1 and "first in" in check.reason


def test_what_is_supervised_decodes_to_the_answer_and_a_shifted_mask_fails(conversations, tokenizer):
    chat = ChatTokenizer.load(tokenizer.folder)
    assert turns.supervised_is_the_answer(chat, conversations).status == "passed"

    def shifted(sequence: sequences.Sequence) -> sequences.Sequence:
        return replace(sequence, labels=np.roll(sequence.labels, 2))

    wrong = [replace(one, sequences=[shifted(sequence) for sequence in one.sequences]) for one in conversations]
    assert turns.supervised_is_the_answer(chat, wrong).status == "failed"


class KnowsNext(torch.nn.Module):
    """A model that gives the next token of its input a logit."""

    def __init__(self, logit: float):
        super().__init__()
        self.weight, self.logit = torch.nn.Parameter(torch.zeros(1)), logit

    def forward(self, input_ids, use_cache):
        following = F.one_hot(input_ids.roll(-1, 1), 2000).float() * self.logit
        return SimpleNamespace(logits=following)


def test_a_learned_end_of_turn_passes_and_an_unlearned_or_untrained_one_fails(conversations, tokenizer):
    stop_ids = ChatTokenizer.load(tokenizer.folder).stop_ids
    held_out = [sequence for one in conversations for sequence in one.sequences]
    assert turns.end_of_turn_is_learned(KnowsNext(20.0), stop_ids, held_out).status == "passed"
    assert turns.end_of_turn_is_learned(KnowsNext(0.0), stop_ids, held_out).status == "failed"
    # As with a template that doesn't end turns.
    endless = [replace(one, labels=np.where(np.isin(one.ids, stop_ids), -100, one.labels)) for one in held_out]
    check = turns.end_of_turn_is_learned(KnowsNext(20.0), stop_ids, endless)
    assert check.status == "failed" and check.reason == "no supervised answer ends with a token that ends generation"


# Reference and evaluation


def test_a_stored_reference_is_that_of_the_model_and_one_of_another_fails(tmp_path):
    packed, model = packed_pairs(tmp_path / "pairs", 6), tiny_model("llama")
    rows, listed = open_rows(packed, "train"), list(documents(packed, "train"))
    stored = read_ref_logps(referenced(tmp_path / "pairs/logps", packed, model), "train")
    ids = [[document["id"] for document in listed if document["row"] == row] for row in (1, 4)]

    def check(of):
        return recomputed.reference_equals_recomputed(of, rows, [1, 4], ids, stored, "float32", None)

    result = check(tiny_model("llama"))
    assert result.status == "passed" and f"{len(ids[0]) + len(ids[1])} pairs" in result.compares
    with torch.no_grad():
        other = tiny_model("llama")
        other.model.norm.weight *= 1.05
    assert check(other).status == "failed"
    stored[ids[0][0]] = replace(stored[ids[0][0]], tokens=(1, 1))
    assert check(tiny_model("llama")).status == "failed"


def test_a_stored_evaluation_is_that_of_the_model_and_one_of_another_fails(tmp_path):
    pipeline_runs.pack(tmp_path / "pack", rows=6)
    chat, pairs = pipeline_runs.read_pack(tmp_path), packed_pairs(tmp_path / "pairs", 3)
    model = tiny_model("llama")
    rows = [open_rows(chat, "train"), open_rows(pairs, "train")]
    self_test(model, rows, CPU, training=False)
    tables = [held_out_loss(model, rows[0], CPU, "chat")[1]]
    tables.append(_pairs_table(model, rows[1], pairs))
    evaluated = [
        (one, list(documents(pack, "train")), table.to_pylist())
        for one, pack, table in zip(rows, (chat, pairs), tables)
    ]

    def check(of, count=4):
        return recomputed.evaluation_equals_recomputed(of, evaluated, count, "float32", None)

    result = check(tiny_model("llama"))
    assert result.status == "passed" and "12 texts" in result.compares
    with torch.no_grad():
        other = tiny_model("llama")
        other.lm_head.weight *= 1.05
    assert check(other).status == "failed"


def _pairs_table(model, rows, pairs):
    # As if its rows were held out.
    table = read_table(pairs.file("documents.arrow"))
    listed = [row | {"split": "held_out"} for row in table.to_pylist()]
    of_pack = SimpleNamespace(file=lambda name: listed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("snaketune.evaluation.held_out.documents", lambda pack, split: iter(listed))
        return held_out_preferences(model, rows, of_pack, CPU, "pairs", {})[1]


# Results


def test_what_cant_be_checked_is_listed_with_the_reason_and_other_errors_are_ours():
    def refused():
        raise SnaketuneError("there is no reference")

    def full():
        raise torch.OutOfMemoryError

    assert attempted("a", "b", refused).reason == "there is no reference"
    assert attempted("a", "b", full).reason == "memory ran out; lower verify.rows"
    with pytest.raises(ZeroDivisionError):
        attempted("a", "b", lambda: 1 / 0)


def test_what_a_training_lacks_is_the_reason(monkeypatch):
    nothing = SimpleNamespace(spec=SimpleNamespace(gguf_type=None), gguf=[], ref_logps=[], evaluation=[])
    for check in (verified_training.gguf, verified_training.reference, verified_training.evaluation):
        assert attempted("a", "b", lambda check=check: check(nothing)).status == "not checked"
    monkeypatch.setattr(verified_training.importlib.util, "find_spec", lambda name: None)
    made = SimpleNamespace(spec=SimpleNamespace(gguf_type="f16"), gguf=["made"])
    result = attempted("a", "b", lambda: verified_training.gguf(made))
    assert result.reason == "reading a GGUF file needs the package gguf; install it with pip"


def test_a_figure_that_isnt_a_number_fails():
    check = judged("a", "b", float("nan"), 1.0)
    assert (check.status, check.figure, check.reason) == ("failed", None, "the figure is nan")
    assert judged("a", "b", 0.5, 0.1, at_least=True).status == "passed"
    lines = as_text([vars(check), vars(judged("longer", "b", 0.0, 1e-3))]).splitlines()
    assert lines[1].startswith("! failed  a ") and lines[2].split() == ["passed", "longer", "0", "≤", "0.001", "b"]
