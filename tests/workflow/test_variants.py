"""The other ways to train, end to end: LoRA on a local model with its own tokenizer, raw rows on TRL's trainer, LoRA DPO."""

import json
import shutil

import pytest
from safetensors.numpy import load_file

from snaketune.artifacts.manifest import content_digest

pytestmark = pytest.mark.workflow


@pytest.fixture
def variants(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    # Jobs side by side.
    project.cores = 2
    shutil.copytree(project.folder / "results/sft/run/model", project.folder / "base")
    training = {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 0.01}
    project.config["tokenizers"]["adopted"] = {"adopt": "base"}
    project.config["sft"] = {
        "lora": {
            "base": {"path": "base", "rope": {"type": "yarn", "factor": 2}},
            "corpus": "chat",
            "tokenizer": "adopted",
            "packing": {"length": 256},
            "lora": {"rank": 4},
            # Adapters of so small a model learn slowly, and overshoot at the rate that suits all weights.
            "training": training | {"epochs": 3, "learning_rate": 0.003, "gradient_checkpointing": True},
        },
        # Goes on from it, and is an adapter alone.
        "more": {
            "use_base": "sft:lora",
            "corpus": "chat",
            "tokenizer": "adopted",
            "packing": {"length": 256},
            "lora": {"rank": 2, "dora": True, "modules_to_save": ["embed_tokens"], "merge": False},
            "training": training | {"learning_rate": 0.001},
        },
        "raw": {
            "base": {"path": "base"},
            "corpus": "chat",
            "tokenizer": "adopted",
            "packing": {"length": 256, "strategy": "none"},
            "training": training | {"batch_rows": 32, "micro_batch_rows": 16},
        },
        "lengths": {
            "base": {"path": "base"},
            "corpus": "chat",
            "tokenizer": "adopted",
            "packing": {"length": [64, 256], "overflow": "split"},
            "training": training,
            "operation": {"load_in_memory": True},
        },
    }
    project.config["dpo"] = {
        "lora": {
            "from": "more",
            "corpus": "pairs",
            "packing": {"length": 256},
            "loss": "ipo",
            "lora": {"rank": 2, "merge": False},
            "training": training,
        }
    }
    models = ["base:lora", "sft:lora", "base:more", "sft:raw", "sft:lengths", "dpo:lora"]
    project.config["eval"]["both"] |= {"models": models}
    return project


@pytest.mark.slow
def test_lora_raw_rows_and_rows_of_two_lengths_train_and_are_evaluated(variants):
    said = variants.snakemake()
    assert "Traceback" not in said
    read = {
        name: json.loads(variants.read(f"results/{name}/manifest.json"))
        for name in ("sft/lora", "sft/more", "sft/raw", "sft/lengths", "dpo/lora")
    }
    assert read["sft/raw"]["trainer"] == "trl"
    assert read["sft/lora"]["trainable_parameters"] < read["sft/lora"]["parameters"] / 3
    # Adapters are merged: the published folders are complete models, with the adapter beside.
    base = load_file(variants.folder / "base/model.safetensors")
    for name in ("sft/lora", "sft/raw", "sft/lengths"):
        manifest = read[name]
        weights = load_file(variants.folder / f"results/{name}/model/model.safetensors")
        assert weights.keys() == base.keys(), name
        assert any((weights[key] != base[key]).any() for key in base), name
        assert ("adapter/adapter_model.safetensors" in manifest["payload"]) == name.endswith("lora")
        assert not [file for file in manifest["payload"] if file.endswith((".bin", ".pt", ".pth", ".pkl"))]
    # Two that are adapters alone, on the first, which is whole.
    for name, below in (("sft/more", []), ("dpo/lora", [read["sft/lora"]])):
        payload = read[name]["payload"]
        assert [file for file in payload if file.endswith(".safetensors")] == ["adapter/adapter_model.safetensors"]
        adapter = json.loads(variants.read(f"results/{name}/model/adapter/adapter_config.json"))
        assert adapter["base_model_name_or_path"] is None
        assert read[name]["inputs"]["base_layers"] == [content_digest(manifest) for manifest in below]
    on_base = json.loads(variants.read("results/sft/lora/model/adapter/adapter_config.json"))
    assert on_base["base_model_name_or_path"] == "base"
    # The scaled positions of the base are those of all that follow.
    positions = json.loads(variants.read("base/config.json"))["max_position_embeddings"]
    for name in ("sft/lora", "sft/more", "dpo/lora"):
        config = json.loads(variants.read(f"results/{name}/model/config.json"))
        assert (config["rope_parameters"]["rope_type"], config["max_position_embeddings"]) == ("yarn", 2 * positions)
    scores = json.loads(variants.read("results/eval/both/dpo-lora/scores/scores.json"))
    assert scores["preferences"]["pairs"]["pairs_with_reference"] > 0
    scores = [variants.read(f"results/eval/both/{model}/scores/scores.json") for model in ("base-more", "sft-lora")]
    assert scores[0] == scores[1]
    losses = {
        model: json.loads(variants.read(f"results/eval/both/{model}/scores/scores.json"))["conversations"]["chat"][
            "held_out_loss"
        ]
        for model in ("base-lora", "sft-lora", "sft-raw", "sft-lengths")
    }
    assert losses["sft-lora"] < losses["base-lora"]
    assert losses["sft-raw"] < losses["base-lora"]
    assert losses["sft-lengths"] < losses["base-lora"]
    # Four rows of 64 are an item like one of 256, and a step has four items.
    (pack,) = variants.folder.glob("results/pack/chat-adopted-256-*/shards/train-00001.arrow")
    rows = json.loads((pack.parents[1] / "manifest.json").read_text())["packing_metadata"]["rows_by_length"]
    assert read["sft/lengths"]["counts"]["steps"] == -(-(-(-rows["64"] // 4) + rows["256"]) // 4)

    # A change inside a local base model is noticed.
    config = variants.folder / "base/config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("\n}", ',\n  "note": "edited"\n}'), encoding="utf-8")
    assert {"sft", "dpo", "eval"} <= variants.stale()
