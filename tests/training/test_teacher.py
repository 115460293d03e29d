"""A teacher's tokens as an artifact: right for every supervised token, resumed, in parts, by row; and trainings on them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from snaketune.artifacts.manifest import Artifact, write_manifest
from snaketune.config.distillation import DistillLoss
from snaketune.config.operation import Execution
from snaketune.engine.distillation import TeacherRows
from snaketune.engine.model import logprobs
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.engine.packing.segments import layout_of
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError
from snaketune.evaluation.agreement import teacher_agreement
from snaketune.models.adapter_stack import AdapterStack
from snaketune.packing.reader import open_rows
from snaketune.stages.specs import TeacherPassSpec, TeacherSpec
from snaketune.tables import read_table
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.pipeline import make_trainer
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.reference import frozen_model, teacher_rows
from snaketune.training.reference.teacher_file import open_teacher
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain, test_turn_trees
from tests.packing.chain import started
from tests.packing.test_turn_trees import reasoning_tokenizer  # noqa: F401
from tests.tokenization.small_tokenizers import messages

from .executed import executed
from .pipeline_runs import Interrupted, copy_after, spec, train
from .test_ref_pass import FAMILIES, model_in, tiny_of

K = 8
SPEC = TeacherSpec(
    precision="auto", frozen_weights=True, quantization=None, trust_remote_code=False, k=K, temperature=1.0
)


def rows_of(count: int, changed: int | None = None) -> list[dict]:
    return [
        {"id": str(n), "messages": messages(*(f"cat {n}", f"ton {n}{' hat' * (n == changed)}") * (1 + n % 2))}
        for n in range(count)
    ]


def packed(folder: Path, tokenizer: Artifact, rows: list[dict] | None = None, **settings) -> Artifact:
    corpus = chain.corpus(folder / "corpus", "sft", rows or rows_of(20), held_out=4)
    return chain.pack(folder, corpus, tokenizer, "sft", **({"length": 96} | settings))


def taught(folder: Path, pack: Artifact, model: Artifact, tokenizer: Artifact, spec: TeacherSpec = SPEC, **operation):
    """The files of the teacher's result, and its outcome. Args: folder: what `results/.work` is to a run."""
    work = started(folder / "teacher/one")
    execution = Execution(**operation) if operation else None
    outcome = teacher_rows.build(spec, work, pack=pack, tokenizer=tokenizer, model=[model], operation=execution)
    return {path.name: path.read_bytes() for path in work.payload.iterdir()}, outcome


def artifact_of(folder: Path, pack: Artifact, outcome) -> Artifact:
    payload = folder / "teacher/one/payload.partial"
    about = outcome.about | {
        "inputs": {"pack": [pack.content]},
        "payload": chain.describe_files(payload),
        "records": {},
    }
    return Artifact(folder / "manifest.json", about, payload)


def exact(folder: Path, tokenizer: Artifact, family: str = "llama", seed: int = 0) -> Artifact:
    """A model whose embedding has a row for each token of the tokenizer, and no more."""
    model = model_in(folder, tokenizer, family, seed)
    loaded = tiny_of(model)
    loaded.resize_token_embeddings(ChatTokenizer.load(tokenizer.folder).vocab_size)
    loaded.save_pretrained(model.folder)
    return replace(model, manifest=model.manifest | {"payload": chain.describe_files(model.folder)})


def supervised(row: dict) -> list[tuple[torch.Tensor, np.ndarray]]:
    """The ids of each sequence of a row, and at which of them a token of its own segment is supervised."""
    found, layout = [], layout_of([row])
    for positions, _ in layout.sequences():
        segment = layout.document_of[positions[-1]]
        inner = (row["labels"][positions] != -100) & (layout.document_of[positions] == segment)
        inner[0] = False
        found.append((torch.from_numpy(row["input_ids"][positions].astype(np.int64)), inner))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supervised_token_has_the_teachers_most_likely_tokens(tmp_path, tokenizer, family):
    pack, model = packed(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer, family)
    temperature, vocabulary = 2.0, ChatTokenizer.load(tokenizer.folder).vocab_size
    warm = SPEC.model_copy(update={"temperature": temperature})
    _, outcome = taught(tmp_path / "work", pack, model, tokenizer, warm)
    loaded, checked, losses = tiny_of(model), 0, []
    for split in ("train", "held_out"):
        rows = open_rows(pack, split)
        rows.teacher = TeacherRows(
            read_table(tmp_path / f"work/teacher/one/payload.partial/{split}.arrow").to_batches(), K
        )
        for row in rows:
            expected = []
            for ids, inner in supervised(row):
                with torch.no_grad():
                    logits = loaded(ids[None], use_cache=False).logits[0].float()
                expected.append((logits / temperature).log_softmax(-1)[:-1][inner[1:]])
                if split == "train":
                    losses.append(cross_entropy(logits[:-1], ids[1:], reduction="none")[inner[1:]])
            expected_NV = torch.cat(expected)
            ids_Nk = torch.from_numpy(row["teacher_ids"]).long()
            logps_NO = torch.from_numpy(row["teacher_logps"]).float()
            assert (
                len(ids_Nk) == len(expected_NV)
                and int(ids_Nk.max(initial=0) if len(ids_Nk) == 0 else ids_Nk.max()) < vocabulary
            )
            torch.testing.assert_close(logps_NO[:, :-1], expected_NV.gather(1, ids_Nk), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(
                logps_NO[:, :-1], expected_NV[:, :vocabulary].topk(K).values, rtol=1e-3, atol=1e-3
            )
            rest_N = 1 - expected_NV.gather(1, ids_Nk).exp().sum(1)
            torch.testing.assert_close(logps_NO[:, -1].exp(), rest_N, rtol=2e-3, atol=1e-4)
            checked += len(ids_Nk)
    assert checked == sum(outcome.counts["tokens"].values()) > 100
    assert outcome.about["losses"]["train"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


def test_the_tokens_of_trees_are_those_of_their_sequences(tmp_path, reasoning_tokenizer):  # noqa: F811
    made = [{"id": str(n), "messages": test_turn_trees.conversation(1 + n % 4, n)} for n in range(10)]
    pack = test_turn_trees.pack(tmp_path, made, reasoning_tokenizer)
    model = exact(tmp_path / "model", reasoning_tokenizer)
    taught(tmp_path / "work", pack, model, reasoning_tokenizer)
    rows, loaded, checked = open_rows(pack, "train"), tiny_of(model), 0
    assert rows.has_prefixes
    rows.teacher = TeacherRows(read_table(tmp_path / "work/teacher/one/payload.partial/train.arrow").to_batches(), K)
    for row in rows:
        by_position, layout = {}, layout_of([row])
        for positions, _ in layout.sequences():
            ids = torch.from_numpy(row["input_ids"][positions].astype(np.int64))
            with torch.no_grad():
                best = loaded(ids[None], use_cache=False).logits[0].argmax(-1)
            by_position |= {int(at): int(best[n]) for n, at in enumerate(positions[1:])}
        targets = np.flatnonzero((row["labels"] != -100) & (layout.parents >= 0))
        assert row["teacher_ids"][:, 0].tolist() == [by_position[int(at)] for at in targets]
        checked += len(targets)
    assert checked > 50


def test_killed_passes_parts_and_edited_rows_give_the_bytes_of_one_pass(tmp_path, tokenizer, small_steps, monkeypatch):
    torch.set_num_threads(1)
    pack, model = packed(tmp_path / "pack", tokenizer), model_in(tmp_path / "model", tokenizer)
    straight, cold = taught(tmp_path / "straight", pack, model, tokenizer)
    computed, calls = logprobs.packed_values, iter(range(3))

    def limited(*arguments):
        if next(calls, None) is None:
            raise Interrupted
        return computed(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "packed_values", limited)
        with pytest.raises(Interrupted):
            taught(tmp_path / "killed", pack, model, tokenizer)
    resumed, outcome = taught(tmp_path / "killed", pack, model, tokenizer)
    assert resumed == straight
    assert 0 < outcome.run["tokens_computed"] < cold.run["tokens_computed"] == sum(cold.counts["tokens"].values())
    # Another row computes itself, also in rows of another length.
    for settings in ({}, {"length": 160}):
        edited = packed(tmp_path / f"edited{settings}", tokenizer, rows_of(20, changed=3), **settings)
        warm, again = taught(tmp_path / "straight", edited, model, tokenizer)
        assert warm == taught(tmp_path / f"cold{settings}", edited, model, tokenizer)[0]
        assert again.run["tokens_computed"] <= 0.2 * cold.run["tokens_computed"]
    # Another k computes all.
    fewer = SPEC.model_copy(update={"k": 4})
    assert taught(tmp_path / "straight", pack, model, tokenizer, fewer)[1].run["tokens_computed"] > 100
    for part in (1, 2, 3):
        work = started(tmp_path / f"parts/teacher_pass/one/{part}-of-3")
        part_spec = TeacherPassSpec(**dict(SPEC), part=part, parts=3)
        result = teacher_rows.build(part_spec, work, pack=pack, tokenizer=tokenizer, model=[model])
        inputs = {"pack": [pack.content], "model": [model.content], "base_layers": []}
        manifest = {
            "stage": "teacher_pass",
            "spec": part_spec.model_dump(mode="json"),
            "inputs": inputs,
            "counts": result.counts,
        }
        manifest |= result.about | {"payload": chain.describe_files(work.payload), "records": {}}
        work.payload.rename(work.payload.with_name("tokens"))
        write_manifest(work.payload.with_name("manifest.json"), manifest)
    gathered, of_parts = taught(
        tmp_path / "gathered", pack, model, tokenizer, parts=str(work.payload.parent.parent / "*-of-3/manifest.json")
    )
    assert gathered == straight and of_parts.counts == cold.counts
    assert of_parts.about["losses"] == pytest.approx(cold.about["losses"])


def test_a_teacher_whose_layers_are_on_several_devices_has_the_same_tokens(tmp_path, tokenizer, monkeypatch):
    """As on several GPUs, by accelerate's hooks: one layer is on the CPU, one on the disk."""
    pack, model = packed(tmp_path / "pack", tokenizer), model_in(tmp_path / "model", tokenizer)
    taught(tmp_path / "straight", pack, model, tokenizer)
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    devices = {"model.layers.1": "disk"} | dict.fromkeys(names, "cpu")
    monkeypatch.setattr(frozen_model, "device_map_of", lambda compute: devices)
    loaded, load = [], AdapterStack.load
    monkeypatch.setattr(AdapterStack, "load", lambda *arguments: loaded.append(load(*arguments)) or loaded[-1])
    _, outcome = taught(tmp_path / "spread", pack, model, tokenizer)
    assert loaded[0].hf_device_map == devices and outcome.run["tokens_computed"] > 100
    for split in ("train", "held_out"):
        tables = [
            read_table(tmp_path / f"{name}/teacher/one/payload.partial/{split}.arrow")
            for name in ("straight", "spread")
        ]
        assert tables[0]["ids"].equals(tables[1]["ids"])
        logps = [np.concatenate([row.values.to_numpy() for row in table["logps"].combine_chunks()]) for table in tables]
        np.testing.assert_allclose(*logps, rtol=2e-3)


def test_a_teacher_with_other_tokens_is_refused_with_the_first_difference(tmp_path, tokenizer):
    pack, model = packed(tmp_path, tokenizer), model_in(tmp_path / "model", tokenizer)
    description = json.loads((model.folder / "tokenizer.json").read_text())
    vocab = description["model"]["vocab"]
    (one, first), (other, second) = sorted(vocab.items(), key=lambda pair: pair[1])[40:42]
    vocab[one], vocab[other] = second, first
    (model.folder / "tokenizer.json").write_text(json.dumps(description))
    model = replace(model, manifest=model.manifest | {"payload": chain.describe_files(model.folder)})
    with pytest.raises(
        SnaketuneError, match=rf"teacher: 2 of \d+ tokens are different .* for instance {first}, which is"
    ):
        taught(tmp_path / "work", pack, model, tokenizer)


def trained_rows(folder: Path, tokenizer: Artifact, model: Artifact, spec: TeacherSpec = SPEC) -> PackedRows:
    pack = packed(folder / "pack", tokenizer)
    _, outcome = taught(folder / "work", pack, model, tokenizer, spec)
    rows = open_rows(pack, "train")
    rows.teacher = open_teacher(artifact_of(folder / "work", pack, outcome), pack, "train", rows, spec.temperature)
    with pytest.raises(SnaketuneError, match="isn't of the rows of"):
        open_teacher(artifact_of(folder / "work", pack, outcome), pack, "train", rows, spec.temperature + 1)
    return rows


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_with_k_of_the_vocabulary_the_loss_is_that_of_the_whole_distributions(tmp_path, tokenizer, family):
    """Of a plain head, and of one whose logits are capped."""
    model = exact(tmp_path / "model", tokenizer, family, seed=1)
    teacher_of, student, plain = (
        tiny_of(model),
        *(tiny_of(exact(tmp_path / f"student{n}", tokenizer, family)) for n in (1, 2)),
    )
    vocabulary = teacher_of.config.vocab_size
    rows = trained_rows(tmp_path, tokenizer, model, SPEC.model_copy(update={"k": vocabulary}))
    self_test(student, [rows], CPU, training=True)
    distill = DistillLoss(weight=0.25, loss="forward_kl")
    made = spec().model_copy(update={"distill": distill})
    run = TrainingRun(spec=made, operation=executed(made.training), work=chain.started(tmp_path / "run"), compute=CPU)
    trainer = make_trainer(PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=None), student, CPU)
    batch = trainer._collate_items([EqualTokens(rows)[item] for item in range(2)])
    loss = trainer.batch_loss(student, batch, trainer._get_num_items_in_batch([batch], CPU.device))
    nlls, kls = [], []
    for row in (rows[0], rows[1]):
        for ids, inner in supervised(row):
            with torch.no_grad():
                log_p = teacher_of(ids[None]).logits[0, :-1][inner[1:]].log_softmax(-1)
            logits = plain(ids[None]).logits[0, :-1][inner[1:]]
            nlls.append(cross_entropy(logits, ids[1:][inner[1:]], reduction="none"))
            kls.append(kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1))
    expected = 0.75 * torch.cat(nlls).mean() + 0.25 * torch.cat(kls).mean()
    # 16-bit logarithms are what remains; tests/engine/test_distillation.py is without them.
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert torch.cat(kls).mean() > 1e-4
    gradients = (
        torch.autograd.grad(total, list(one.parameters())) for total, one in ((loss, student), (expected, plain))
    )
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)


def test_distilled_runs_resume_exactly_and_micro_batches_change_nothing(tmp_path, tokenizer, monkeypatch):
    model = exact(tmp_path / "model", tokenizer, seed=1)
    rows = trained_rows(tmp_path, tokenizer, model)

    def weights_of(name: str, micro_batch_rows: int = 2, **further) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        settings = {"epochs": 3, "batch_rows": 4, "micro_batch_rows": micro_batch_rows, "learning_rate": 0.01}
        made = spec(**settings).model_copy(update={"distill": DistillLoss()} | further)
        size = teacher_vocabulary
        train(tmp_path / name, rows, made, model=lambda: tiny_model("llama", vocab_size=size), every=1)
        return load_file(tmp_path / name / "payload.partial/model.safetensors")

    teacher_vocabulary = tiny_of(model).config.vocab_size
    copy_after(2, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight, resumed = weights_of("straight"), weights_of("resumed")
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]
    for name, whole in weights_of("whole", micro_batch_rows=4).items():
        torch.testing.assert_close(whole, straight[name], rtol=1e-3, atol=1e-5)
    for loss in ("reverse_kl", "jsd"):
        other = weights_of(loss, distill=DistillLoss(loss=loss))
        assert [name for name in straight if not torch.equal(other[name], straight[name])]


def test_a_model_agrees_with_itself_and_parts_from_another(tmp_path, tokenizer):
    model = exact(tmp_path / "model", tokenizer, seed=1)
    rows = trained_rows(tmp_path, tokenizer, model)
    chat, itself = ChatTokenizer.load(tokenizer.folder), tiny_of(model)
    other = tiny_of(exact(tmp_path / "other", tokenizer, seed=5))
    found = []
    for one in (itself, other):
        self_test(one, [rows], CPU, training=False)
        found.append(teacher_agreement(one, rows, 1.0, CPU, chat))
    same, apart = found
    assert same["agreement"] == 1.0 and same["kl"] < 1e-4 and same["parting"] == []
    assert apart["agreement"] < 0.9 and apart["kl"] > 10 * same["kl"]
    assert sum(one["count"] for one in apart["parting"]) <= (1 - apart["agreement"]) * apart["tokens"] + 0.5
    assert apart["agreement_interval"][0] <= apart["agreement"] <= apart["agreement_interval"][1]
    # The text before an example is of the example's own conversation.
    assert all(one["after"] and one["after"].count("<|im_start|>") <= 4 for one in apart["parting"])
