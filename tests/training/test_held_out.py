"""Held-out rows that are measured while a training runs: one curve however often it was killed, and no trace in its weights."""

import os
import shutil
import signal
from functools import partial

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from snaketune.config.held_out import Evaluate
from snaketune.config.lora import Lora
from snaketune.engine import features
from snaketune.engine import held_out as measuring
from snaketune.engine.measurements import SamplePrompts
from snaketune.engine.model import packing_support
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.logprobs import all_pair_logprobs
from snaketune.engine.model.selftest import self_test
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.evaluation.held_out import held_out_loss
from snaketune.packing.reader import open_rows
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.launch.worker_endings import Preempted
from snaketune.training.prepared_sft import prepare_sft
from tests.models.conftest import CPU, VOCABULARY
from tests.packing import chain
from tests.training.sft_runs import ROWS, sft_run

from .pipeline_runs import Interrupted, copy_after, held_out_pack, pack, spec, stop_after, train
from .preference_runs import Trained

EVERY = Evaluate(every=2, samples=0)
# The learning rate is so high that the loss of held-out rows soon rises.
# A step per epoch of `few` rows: the held-out loss falls for half of the steps and then rises by a third, on any processor.
OVERFIT = {"epochs": 12, "learning_rate": 0.05, "schedule": "constant", "evaluate": EVERY}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("rows"), rows=12)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("few"), rows=4)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return held_out_pack(tmp_path_factory.mktemp("held"), rows=5, documents=(12, 9))


@pytest.fixture
def handlers():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def points(outcome):
    return outcome.run["held_out"]["points"]


def weights(folder):
    return load_file(folder / "payload.partial/model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loss_of(folder, rows):
    """The loss that an evaluation finds for a training's result."""
    model = AutoModelForCausalLM.from_pretrained(folder / "payload.partial", dtype=torch.float32)
    self_test(model, [rows], CPU, training=False)
    return held_out_loss(model, rows, CPU, "held-out")[0]["held_out_loss"]


def test_the_last_point_is_the_loss_that_an_evaluation_finds(tmp_path, rows, held_out):
    outcome = train(tmp_path, rows, spec(), held_out=held_out, evaluate=EVERY)
    # Nine steps.
    assert [point["step"] for point in points(outcome)] == [0, 2, 4, 6, 8, 9]
    assert points(outcome)[-1]["loss"] == pytest.approx(loss_of(tmp_path, held_out), abs=1e-5)
    assert points(outcome)[0]["loss"] > points(outcome)[-1]["loss"]
    assert outcome.run["held_out"]["rows"] == outcome.run["held_out"]["of_rows"] == 5


def test_each_source_has_its_own_loss(tmp_path, rows, held_out):
    outcome = train(tmp_path, rows, spec(), held_out=held_out, evaluate=EVERY)
    last = points(outcome)[-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "payload.partial", dtype=torch.float32)
    self_test(model, [held_out], CPU, training=False)
    documents = held_out_loss(model, held_out, CPU, "held-out")[1].to_pylist()
    for source in (0, 1):
        # The two documents of each row are of two sources.
        own = [document for document in documents if document["document"] % 2 == source]
        expected = sum(document["loss_nats"] for document in own) / sum(document["tokens"] for document in own)
        assert last[f"sources.{source}/loss"] == pytest.approx(expected, abs=1e-5)


def test_measuring_leaves_no_trace_in_the_weights(tmp_path, rows, held_out):
    # Dropout draws random numbers, in training alone.
    made = spec(epochs=2, lora=Lora(rank=2, dropout=0.3))
    train(tmp_path / "blind", rows, made)
    measured = train(tmp_path / "measured", rows, made, held_out=held_out, evaluate=Evaluate(every=1, samples=0))
    assert len(points(measured)) == 7
    assert same(weights(tmp_path / "blind"), weights(tmp_path / "measured"))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma2", {"attn_logit_softcapping": 0.05}), ("gemma3_text", {"sliding_window": 4}), ("gpt_oss", {})],
)
def test_measuring_leaves_caps_windows_and_sinks_of_attention(tmp_path, monkeypatch, rows, held_out, family, settings):
    """Whether the held-out rows can be measured is found out by another model of the family."""
    monkeypatch.setattr(packing_support, "_DRY_RUNS", {})
    config = tiny_config(family, vocab_size=VOCABULARY, **settings)
    for name, measured in (("blind", None), ("measured", held_out)):
        load = partial(tiny_model, config)
        train(tmp_path / name, rows, spec(epochs=1), load, config=config, held_out=measured, evaluate=EVERY)
    assert same(weights(tmp_path / "blind"), weights(tmp_path / "measured"))


@pytest.mark.parametrize("every", [2, 3])
def test_a_resumed_training_has_one_curve(tmp_path, monkeypatch, rows, held_out, every):
    """Killed after the second checkpoint, at a step that is measured or at one that isn't."""
    settings = {"held_out": held_out, "evaluate": EVERY, "every": every}
    copy_after(2, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight = train(tmp_path / "straight", rows, spec(), **settings)
    assert points(train(tmp_path / "resumed", rows, spec(), **settings)) == points(straight)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


@pytest.mark.parametrize("when", ["while it measures", "before"])
def test_a_measurement_that_sigterm_cuts_short_is_repeated(
    tmp_path, monkeypatch, capsys, rows, held_out, handlers, when
):
    settings = {"held_out": held_out, "evaluate": EVERY, "every": 100}
    straight = train(tmp_path / "straight", rows, spec(), **settings)
    method = "held_out_metrics" if when == "while it measures" else "batch_loss"
    original, calls = getattr(SftTrainer, method), []

    def terminated(*arguments):
        calls.append(1)
        # The third measurement, after step 4; or its second micro-batch.
        if len(calls) == (3 if method == "held_out_metrics" else 8):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SftTrainer, method, terminated)
        with pytest.raises(Preempted, match="stopped after step 4, with a checkpoint"):
            train(tmp_path / "resumed", rows, spec(), **settings)
    assert "step 4/9  held out" not in capsys.readouterr().out.rpartition("resuming")[2].partition("straight")[2]
    resumed = train(tmp_path / "resumed", rows, spec(), **settings)
    assert "step 4/9  held out" in capsys.readouterr().out
    assert points(resumed) == points(straight)
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


def test_the_best_weights_are_kept_however_often_it_was_killed(tmp_path, monkeypatch, capsys, few, held_out):
    made, settings = spec(**OVERFIT, keep="best"), {"held_out": held_out, "evaluate": EVERY, "every": 3}
    straight = train(tmp_path / "straight", few, made, **settings)
    kept, losses = straight.about["kept"], [point["loss"] for point in points(straight)]
    assert kept["value"] == min(losses) < losses[-1] and 0 < kept["step"] < 12
    assert f"kept: the weights of step {kept['step']}, with the best held-out loss" in capsys.readouterr().out
    assert loss_of(tmp_path / "straight", held_out) == pytest.approx(kept["value"], abs=1e-5)
    last = train(tmp_path / "last", few, spec(**OVERFIT), **settings)
    assert "kept" not in last.about and not same(weights(tmp_path / "straight"), weights(tmp_path / "last"))

    best_is_marked, original = [], measuring.mark_complete

    def marked(folder, check_held):
        original(folder, check_held)
        best_is_marked.append(folder.name)
        if len(best_is_marked) == kills:
            raise Interrupted

    # Killed right after each set of best weights is complete, before or between checkpoints.
    for kills in range(1, 1 + len({min(losses[: n + 1]) for n in range(len(losses))})):
        best_is_marked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(measuring, "mark_complete", marked)
            with pytest.raises(Interrupted):
                train(tmp_path / f"killed-{kills}", few, made, **settings)
        again = train(tmp_path / f"killed-{kills}", few, made, **settings)
        assert again.about == straight.about and points(again) == points(straight)
        assert same(weights(tmp_path / f"killed-{kills}"), weights(tmp_path / "straight"))


def test_best_weights_are_kept_until_a_checkpoint_that_needs_others_is_complete(
    tmp_path, monkeypatch, capsys, few, held_out
):
    made, settings = spec(**OVERFIT, keep="best"), {"held_out": held_out, "evaluate": EVERY, "every": 2}
    marked, original = [], features.mark_complete

    def killed_at_the_second(folder, check_held):
        marked.append(folder)
        if len(marked) == 2:
            raise Interrupted
        original(folder, check_held)

    with monkeypatch.context() as patch:
        patch.setattr(features, "mark_complete", killed_at_the_second)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed", few, made, **settings)
    capsys.readouterr()
    again = train(tmp_path / "resumed", few, made, **settings)
    assert "resuming from" in capsys.readouterr().out
    assert again.about == train(tmp_path / "straight", few, made, **settings).about


def test_without_the_best_weights_a_checkpoint_isnt_used(tmp_path, monkeypatch, capsys, few, held_out):
    made, settings = spec(**OVERFIT, keep="best"), {"held_out": held_out, "evaluate": EVERY, "every": 3}
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed", few, made, **settings)
    assert list((tmp_path / "resumed/state/best").iterdir())
    shutil.rmtree(tmp_path / "resumed/state/best")
    outcome = train(tmp_path / "resumed", few, made, **settings)
    assert "the weights of its best measurement are missing or damaged" in capsys.readouterr().out
    assert outcome.run["steps_of_this_process"] == 12


def test_it_stops_where_held_out_rows_rise(tmp_path, monkeypatch, capsys, few, held_out):
    made = spec(**OVERFIT, stop_if={"held_out_rises": 2})
    settings = {"held_out": held_out, "evaluate": EVERY, "every": 3}
    copy_after(1, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight = train(tmp_path / "straight", few, made, **settings)
    losses = [point["loss"] for point in points(straight)]
    stopped = straight.about["stopped"]
    assert stopped["step"] == straight.counts["steps"] == points(straight)[-1]["step"] < 12
    assert losses.index(min(losses)) == len(losses) - 3
    assert f"stopped early, after step {stopped['step']}: held-out loss" in capsys.readouterr().out
    resumed = train(tmp_path / "resumed", few, made, **settings)
    assert (resumed.about, points(resumed)) == (straight.about, points(straight))
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


def test_pairs_have_the_metrics_of_an_evaluation(tmp_path):
    trained = Trained(tmp_path)
    outcome, work = trained.train("run", {"loss": "sigmoid"}, evaluate=EVERY)
    first, last = points(outcome)[0], points(outcome)[-1]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-4) and first["margin"] == pytest.approx(0.0, abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(work.payload, dtype=torch.float32)
    evaluated = open_rows(trained.packed, "train")
    self_test(model, [evaluated], CPU, training=False)
    sums, counts = all_pair_logprobs(model, evaluated, CPU, "pairs")
    assert last["chosen_logp_per_token"] == pytest.approx(float(sums[:, 0].sum() / counts[:, 0].sum()), abs=1e-4)
    # Each source has its own metrics, which together are those of all pairs.
    assert {"sources.0/margin", "sources.1/margin"} <= last.keys()
    assert min(last[f"sources.{n}/margin"] for n in (0, 1)) <= last["margin"]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("sigmoid", marks=pytest.mark.slow),
        pytest.param("simpo", marks=pytest.mark.slow),
        "aot",
        {"sigmoid": 1.0, "sft": 0.5},
        "kto",
    ],
)
def test_every_loss_is_measured_without_a_trace(tmp_path, loss):
    kind = "unpaired" if loss == "kto" else "preference"
    trained = Trained(tmp_path, kind)
    _, blind = trained.train("blind", {"loss": loss})
    outcome, measured = trained.train("measured", {"loss": loss}, evaluate=Evaluate(every=1, samples=0))
    assert len(points(outcome)) == 10
    assert same(*(load_file(work.payload / "model.safetensors") for work in (blind, measured)))
    # Measured on its own pairs, what a training minimizes falls.
    assert points(outcome)[-1]["loss"] < points(outcome)[0]["loss"]


def test_the_best_margin_is_kept(tmp_path):
    outcome, _ = Trained(tmp_path).train("run", {"loss": "sigmoid"}, evaluate=EVERY, keep="best", metric="margin")
    margins = {point["step"]: point["margin"] for point in points(outcome)}
    assert outcome.about["kept"] == {
        "metric": "margin",
        "step": max(margins, key=margins.get),
        "value": max(margins.values()),
    }


def test_a_metric_that_the_held_out_rows_do_not_have_ends_at_the_first_measurement(tmp_path):
    trained = Trained(tmp_path, "unpaired")
    with pytest.raises(SnaketuneError, match=r"training\.metric: accuracy isn't defined .* unpaired ones no accuracy"):
        trained.train("run", {"loss": "kto"}, evaluate=EVERY, keep="best", metric="accuracy")


def test_held_out_conversations_that_branch_are_measured_if_no_other_does(tmp_path, rows, capsys):
    trees = held_out_pack(tmp_path / "trees", rows=5, documents=(12, 9), prefix=6)
    assert trees.has_prefixes and not rows.has_prefixes
    settings = {"held_out": trees, "evaluate": EVERY}
    outcome = train(tmp_path / "best", rows, spec(keep="best", evaluate=EVERY), **settings)
    assert len(points(outcome)) > 1 and "aren't measured" not in capsys.readouterr().out
    # The same training as without them.
    train(tmp_path / "blind", rows, spec())
    train(tmp_path / "measured", rows, spec(), **settings)
    assert same(weights(tmp_path / "blind"), weights(tmp_path / "measured"))


def test_selection_without_held_out_rows_is_refused(tmp_path, rows):
    with pytest.raises(SnaketuneError, match=r"training.keep and training.stop_if need held-out rows"):
        train(tmp_path, rows, spec(**OVERFIT, keep="best"), evaluate=EVERY)


@pytest.mark.parametrize("family", ["llama", "lfm2", "bloom"])
def test_held_out_prompts_are_answered_as_transformers_would(tmp_path, tokenizer, family):
    """Packed attention, layers with a state, and documents that run separately."""
    run = sft_run(tmp_path)
    corpus = chain.corpus(tmp_path / "corpus", "sft", ROWS, held_out=4)
    packed = chain.pack(tmp_path, corpus, tokenizer, "sft", length=64)
    prepared = prepare_sft(run, packed, tokenizer)
    vocabulary = prepared.initial.load(torch.float32, None).config.vocab_size
    config = tiny_config(family)
    config.vocab_size = vocabulary
    model = tiny_model(config)
    compute = self_test(model, [prepared.rows], CPU, training=True).compute
    answers = SamplePrompts(prepared.held_out, partial(ChatTokenizer.load, tokenizer.folder)).answers(model, 2, compute)
    assert len(answers) == 2
    chat = ChatTokenizer.load(tokenizer.folder)
    use_own_attention(model)
    for answer in answers:
        (row,) = [row for row in ROWS if row["messages"][0]["content"] in answer["prompt"]]
        assert answer["expected"].strip() == row["messages"][1]["content"]
        ids = torch.from_numpy(chat.encode_prompt(row["messages"][:1]).astype("int64"))[None]
        greedy = {"do_sample": False, "use_cache": False, "max_new_tokens": 48, "eos_token_id": list(chat.stop_ids)}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=chat.pad_id, **greedy)
        assert answer["answer"] == chat.decode(out[0, ids.shape[1] :].tolist())
