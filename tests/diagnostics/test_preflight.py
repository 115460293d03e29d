"""Preflight: each fault is made and detected; a sound run has no findings."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.families.tiny import tiny_config

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Pretrained, RopeScaling
from snaketune.config.lora import Lora, Quantization
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Learning
from snaketune.diagnostics import family_checks, preflight, run_checks
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import SftSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training.preflight_record import read_preflight_findings
from tests.packing.chain import rows_of

from .conftest import SMALL, Family, tiny_model


def keys(findings: list[dict[str, str]]) -> list[str]:
    return [one["key"] for one in findings]


def test_a_sound_run_has_no_findings(family):
    assert family.findings() == []


def test_a_race_on_few_held_out_rows_stops_before_anything_trains(family):
    family.settings["raced"] = True
    assert family.findings() == []
    counts = family.pack.manifest["counts"]
    few = family.pack.manifest | {"counts": counts | {"held_out": counts["held_out"] | {"kept": 19}}}
    family.pack = Artifact(family.pack.manifest_path, few, family.pack.folder)
    with pytest.raises(
        SnaketuneError, match=r"sft\.demo\.race: .* 19 held-out ones, and 20 are needed.*raise the corpus"
    ):
        family.findings()


def test_dropped_tokens_are_reported_with_a_sufficient_length(tmp_path):
    (result,) = Family(tmp_path, length=64).findings()
    assert result["key"] == "sft.demo.packing.length" and result["severity"] == "warns"
    assert "of the tokens" in result["found"] and "would keep 99%" in result["do"]


def test_rows_with_few_supervised_tokens_are_reported(family):
    counts = family.pack.manifest["counts"]
    for supervised, severity in ((0, "stops"), (counts["train"]["tokens"] // 100, "warns")):
        train = counts["train"] | {"supervised_tokens": supervised}
        (result,) = run_checks.check_dropped_tokens("sft.demo", family.pack.manifest | {"counts": {"train": train}})
        assert result.key == "sft.demo.packing.train_on" and preflight.as_json(result)["severity"] == severity


def test_a_token_that_pads_and_ends_a_turn_is_reported(family, tmp_path):
    folder = shutil.copytree(family.tokenizer.folder, tmp_path / "own/tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["pad_token"] = config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    manifest = family.tokenizer.manifest | {"payload": {}}
    family.tokenizer = Artifact(tmp_path / "own/manifest.json", manifest, folder)
    assert [one["found"] for one in family.findings() if "both pads and ends" in one["found"]]


def test_held_out_rows_that_another_corpus_trains_on_are_counted(family):
    rows = rows_of("chat", 80)
    new = [
        {**row, "messages": [{**row["messages"][0], "content": row["id"]}, *row["messages"][1:]]} for row in rows[:15]
    ]
    family.evaluated = [family.corpus_of("other", [*rows[:10], *new[:5], *rows[10:15], *new[5:]])]
    (result,) = family.findings()
    assert result["key"] == "corpora.chat.decontamination" and result["severity"] == "warns"
    assert "5 of the 20 held-out prompts of other are trained on in chat" in result["found"]


def test_a_run_stops_if_most_held_out_rows_are_trained_on(family):
    family.evaluated = [family.corpus_of("other", rows_of("chat", 30))]
    with pytest.raises(SnaketuneError, match=r"corpora\.chat\.decontamination: 20 of the 20 held-out prompts of other"):
        family.findings()


@pytest.mark.parametrize("answers", [0, 1])
def test_exact_match_of_rows_without_a_checkable_answer_stops_before_anything_trains(family, answers):
    """Columns are known when they are read."""
    family.evaluated = [family.corpus, family.corpus_of("more", rows_of("chat", 80), answers=answers)]
    family.exact_match = ("chat", "more")
    if answers:
        assert family.findings() == []
    else:
        said = r"eval\.demo\.exact_match: none of the 40 held-out rows of chat and more has a checkable answer.*corpora\.chat\."
        with pytest.raises(SnaketuneError, match=said):
            family.findings()


@pytest.mark.parametrize(
    ("base", "lora", "rate", "expected"),
    [
        (SMALL, None, 3e-3, False),
        (SMALL, None, 0.1, True),
        (SMALL, None, 1e-10, True),
        (Pretrained(path="."), None, 2e-5, False),
        (Pretrained(path="."), None, 1e-3, True),
        (Pretrained(path="."), Lora(), 2e-4, False),
        (Pretrained(path="."), Lora(), 1e-2, True),
    ],
)
def test_implausible_learning_rates_are_reported(family, base, lora, rate, expected):
    sft = SftSpec(
        base=None, training=Learning(learning_rate=rate, batch_rows=2, epochs=5), lora=lora, quantization=None
    )
    run = SimpleNamespace(key="sft.demo", kind="sft", run=sft)
    result = run_checks.check_hyperparameters(run, isinstance(base, Pretrained), family.pack.manifest)
    assert (["sft.demo.training.learning_rate"] if expected else []) == [one.key for one in result]


def test_a_batch_size_with_too_few_steps_is_reported(family):
    family.run["batch_rows"] = 64
    assert "sft.demo.training.batch_rows" in keys(family.findings())


def test_all_findings_that_stop_a_run_are_in_one_error(family, monkeypatch):
    family.base = Pretrained(path=str(tiny_model(family.folder)))
    family.settings = {"lora": Lora(), "quantization": Quantization()}
    monkeypatch.setattr(family_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    # A result of the demo in the working directory would count as this run's.
    monkeypatch.chdir(family.folder)
    with pytest.raises(SnaketuneError) as stopped:
        family.findings()
    assert "sft.demo.quantization: 4-bit weights" in str(stopped.value)
    assert "the disk of" in str(stopped.value) and "clean_work" in str(stopped.value)


def test_sequences_beyond_the_positions_of_the_model_are_reported(family):
    longest = open_rows(family.pack, "train").longest[0]
    path = str(tiny_model(family.folder, max_position_embeddings=longest // 2, pad_token_id=0, eos_token_id=None))
    family.run["learning_rate"] = 1e-5
    family.base = Pretrained(path=path)
    [note] = family.findings()
    assert (note["key"], note["severity"]) == ("sft.demo.packing.length", "warns")
    assert f"the longest sequence has {longest} tokens, but the model was made for {longest // 2}" in note["found"]
    family.base = Pretrained(path=path, rope=RopeScaling(type="yarn", factor=3))
    assert family.findings() == []
    family.base = Pretrained(path=path, rope=RopeScaling(type="yarn", factor=1.5))
    with pytest.raises(SnaketuneError, match=r"sft\.demo\.packing\.length: .* with base\.rope; .* or raise the factor"):
        family.findings()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        # A few more tokens, as a template adds.
        ({"vocab_size": 399}, None),
        ({"vocab_size": 300}, "has 400 tokens, but the base only 300: the others start untrained"),
        ({"vocab_size": 32_000}, "has 400 tokens, but the base 32,000"),
        ({"eos_token_id": 300}, "the base's end-of-text token 300 is the word"),
        ({"eos_token_id": [300, 100_000]}, "the base's end-of-text token 300 is the word"),
        ({"eos_token_id": None}, None),
    ],
)
def test_a_tokenizer_of_another_model_is_reported(family, changes, says):
    from transformers import LlamaConfig

    chat = ChatTokenizer.load(family.tokenizer.folder)
    config = LlamaConfig(**{"vocab_size": chat.vocab_size, "eos_token_id": chat.eos_id} | changes)
    result = list(run_checks.check_tokenizer_match("sft.demo", chat, config))
    assert [one.certain for one in result] == [False] * bool(says)
    assert not says or (says in result[0].problem and result[0].key == "sft.demo.tokenizer")


def test_room_for_the_result_but_not_for_checkpoints_is_a_warning(family, monkeypatch):
    monkeypatch.setattr(family_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    (result,) = family.findings()
    assert result["severity"] == "warns" and "checkpoints" in result["found"]


def test_room_for_a_result_that_is_there_already_is_only_missed(monkeypatch, tmp_path):
    """Another run of its family is added, and the disk is nearly full of what has been made."""
    monkeypatch.setattr(family_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    run = SimpleNamespace(
        key="sft.demo", run=SimpleNamespace(lora=None, training=SimpleNamespace(keep="last", average=None))
    )
    planned = SimpleNamespace(parameters=100, trained=100)
    (result,) = family_checks.check_disk_space(run, planned, 2, tmp_path)
    assert result.certain and "its result takes" in result.problem
    made = tmp_path / "sft/demo/manifest.json"
    made.parent.mkdir(parents=True)
    made.touch()
    (result,) = family_checks.check_disk_space(run, planned, 2, tmp_path)
    assert not result.certain
    # In half precision, half of it.
    monkeypatch.setattr(family_checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=300))
    assert [one.certain for one in family_checks.check_disk_space(run, planned, 4, tmp_path / "elsewhere")] == [True]
    assert [one.certain for one in family_checks.check_disk_space(run, planned, 2, tmp_path / "elsewhere")] == [False]


def test_the_hub_check_distinguishes_missing_models_missing_revisions_and_no_answer(monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    answer: list[Any] = []

    def model_info(self, path, **_):
        if isinstance(answer[0], type):
            raise answer[0].__new__(answer[0])
        gated = "gated" in path and "auto"
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in answer[0]], gated=gated)

    def auth_check(self, path):
        raise errors.GatedRepoError.__new__(errors.GatedRepoError)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", auth_check)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raises(errors.LocalEntryNotFoundError("not here")))
    base = Pretrained(path="owner/model", revision="v1")
    said = {}
    for what in (
        errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError, ConnectionError,
        ("pytorch_model.bin",), ("model.safetensors",),
    ):  # fmt: skip
        answer[:] = [what]
        result = list(family_checks.check_hub("sft.demo.base", base))
        assert {one.key for one in result} <= {"sft.demo.base.path"}
        # One that doesn't answer now may do so in a minute.
        assert all(one.certain == (what is not ConnectionError) for one in result)
        said[str(what)] = [one.problem for one in result]
    missing, revision, gated, silent, pickled, sound = said.values()
    assert "no model 'owner/model'" in missing[0] and "no revision 'v1'" in revision[0] and "gated" in gated[0]
    assert "can't be reached (ConnectionError)" in silent[0] and "no safetensors" in pickled[0] and sound == []
    # The page of a gated model is public.
    (gated,) = family_checks.check_hub("sft.demo.base", Pretrained(path="owner/gated"))
    assert "gated" in gated.problem and gated.certain
    # Offline mode is configured, so the model certainly can't be downloaded.
    answer[:] = [errors.OfflineModeIsEnabled]
    assert [one.certain for one in family_checks.check_hub("dpo.demo.reference", base)] == [True]


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_a_training_records_the_findings_in_its_run_json(family, tmp_path):
    family.run["batch_rows"] = 64
    result = family.findings()
    work = WorkFolder(family.folder / "work")
    folder = tmp_path / "results/preflight/demo"
    shutil.copytree(work.payload, folder / "findings")
    manifest = folder / "manifest.json"
    from snaketune.artifacts.manifest import write_manifest

    write_manifest(manifest, {"stage": "preflight", "payload": describe_files(folder / "findings"), "records": {}})
    assert read_preflight_findings(Execution(preflight=str(manifest))) == result
    assert read_preflight_findings(Execution()) == []


@pytest.mark.parametrize(("family_name", "needs_reference", "refused"), [
    ("phimoe", True, True), ("phimoe", False, False), ("mixtral", True, False), ("llama", True, False),
])  # fmt: skip
def test_dpo_of_a_model_with_noise_in_training_is_refused(family, family_name, needs_reference, refused):
    config = tiny_config(family_name, vocab_size=400)
    config.save_pretrained(family.folder / "base")
    family.base = Pretrained(path=str(family.folder / "base"))
    family.run["learning_rate"] = 1e-6
    family.settings |= {"needs_reference": needs_reference}
    if refused:
        with pytest.raises(SnaketuneError, match=r"sft\.demo\.loss: phimoe draws random numbers in training.* simpo"):
            family.findings()
    else:
        assert not [one for one in family.findings() if "random" in one["found"]]


def test_runs_on_responses_of_the_family_are_checked_without_its_sft_runs(family, tmp_path):
    path = tmp_path / "missing"
    family.base = Pretrained(path=str(path))
    family.settings["kind"] = "preference"
    with pytest.raises(SnaketuneError) as error:
        family.findings()
    # The base model has been checked with the SFT runs.
    assert f"{path}" in str(error.value) and "sft.demo.base" not in str(error.value)


@pytest.mark.parametrize("family_name", ["llama", "granite"])
def test_a_reward_model_of_a_family_without_a_class_for_one_stops_before_anything_trains(family, family_name):
    tiny_config(family_name, vocab_size=400).save_pretrained(family.folder / "base")
    family.base = Pretrained(path=str(family.folder / "base"))
    family.run["learning_rate"] = 1e-5
    assert family.findings() == []
    family.settings["rewards"] = True
    if family_name == "llama":
        assert family.findings() == []
    else:
        with pytest.raises(SnaketuneError, match=r"sft\.demo: .*granite.*no sequence-classification class"):
            family.findings()


def test_layers_that_all_linear_does_not_reach_are_reported(family):
    tiny_config("gpt_oss", vocab_size=400).save_pretrained(family.folder / "base")
    family.base = Pretrained(path=str(family.folder / "base"))
    family.settings |= {"lora": Lora()}
    (found,) = (one for one in family.findings() if one["key"] == "sft.demo.lora.target_modules")
    assert "experts: peft adds no adapters" in found["found"] and "modules_to_save: [experts]" in found["do"]
