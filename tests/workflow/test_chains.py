"""A chain of runs with `lora.merge: false`, whose names sort in another order than they train in."""

import json

import pytest

pytestmark = pytest.mark.workflow


@pytest.mark.slow
def test_each_run_of_a_chain_of_adapters_starts_from_the_one_before(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    project.cores = 2
    rows = {"corpus": "chat", "tokenizer": project.config["sft"]["run"]["tokenizer"], "packing": {"length": 256}}
    learning = {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 0.003}
    # Too low to move a weight: what a run evaluates to is what it starts from.
    still = learning | {"learning_rate": 1e-30}
    lora = {"rank": 2, "merge": False}
    project.config["sft"] |= {
        "zeta": rows | {"use_base": "sft:run", "lora": lora, "training": learning},
        "beta": rows | {"use_base": "sft:zeta", "lora": lora, "training": learning},
        "alpha": rows | {"use_base": "sft:beta", "lora": lora, "training": still},
    }
    pairs = {"from": "alpha", "corpus": "pairs", "packing": {"length": 256}, "lora": lora, "training": still}
    project.config["dpo"] |= {
        "against": pairs | {"loss": "sigmoid", "beta": 0.1},
        "alone": pairs | {"loss": "simpo", "beta": 2.0},
    }
    unmoved = ["sft:alpha", "dpo:against", "dpo:alone"]
    models = ["sft:run", "sft:beta", *unmoved]
    del project.config["eval"]["both"]["exact_match"]
    project.config["eval"]["both"] |= {"models": models, "samples": 1, "generation": {"max_new_tokens": 1}}
    project.config["doctor"] = {"runs": ["sft:alpha"], "steps": 4}
    scores = {model: f"results/eval/both/{model.replace(':', '-')}/scores" for model in models}
    # Adapters put together in another order are refused, so a training that is timed had them in theirs.
    project.snakemake(*scores.values(), "results/timing/sft-alpha/baseline/1/measured")

    losses = {
        model: json.loads(project.read(f"{path}/scores.json"))["conversations"]["chat"]["held_out_loss"]
        for model, path in scores.items()
    }
    assert abs(losses["sft:beta"] - losses["sft:run"]) > 0.01
    assert {name: losses[name] for name in unmoved} == pytest.approx(
        dict.fromkeys(unmoved, losses["sft:beta"]), rel=1e-6
    )
