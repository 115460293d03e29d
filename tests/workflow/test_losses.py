"""Losses of every kind, end to end: of pairs, of pairs without a reference, of single completions; and one that ends early."""

import json

import pytest

from snaketune.tables import read_table

pytestmark = pytest.mark.workflow

TRAINING = {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.002}


@pytest.mark.slow
def test_losses_share_what_they_have_in_common_and_none_has_what_it_does_not_need(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    rows = [json.loads(line) for line in project.read("data/preferences.jsonl").splitlines()]
    marked = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for number, row in enumerate(rows)
        for side in (("chosen",) if number % 3 == 0 else ("chosen", "rejected"))
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in marked)
    (project.folder / "data/marked.jsonl").write_text(text, encoding="utf-8")
    project.config["corpora"]["marked"] = {
        "kind": "unpaired",
        "sources": [{"files": ["data/marked.jsonl"]}],
        # Held out like the pairs, so that none of their held-out prompts is trained on here.
        "held_out": 0.2,
    }
    run = project.config["dpo"].pop("run") | {"training": TRAINING}
    project.config["dpo"] = {
        "pairs": run | {"grid": {"loss": ["orpo"]}},
        "tails": run | {"loss": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, "ld_alpha": 0.5},
        "hopeless": run | {"stop_if": {"margin_below": 50, "window": 2}, "operation": {"log_steps": 100}},
        "marked": run | {"loss": "kto", "corpus": "marked", "desirable_weight": 0.7},
    }
    project.config["eval"]["both"]["models"] = ["dpo:pairs-lossorpo", "dpo:marked"]
    project.cores = 2
    project.snakemake()

    def result(name: str) -> tuple[dict, dict]:
        return tuple(json.loads(project.read(f"results/dpo/{name}/{file}.json")) for file in ("manifest", "run"))

    for name in ("pairs-lossorpo", "tails", "hopeless", "marked"):
        manifest, run = result(name)
        free = name == "pairs-lossorpo"
        assert bool(manifest["inputs"].get("ref_logps")) != free
        last = run["history"][-1]
        assert ("kl" in last) != free and {"margin", "chosen_logp", "rejected_tokens"} <= last.keys()
        assert {actual["kind"] for actual in run["warnings"]} <= {"collapse", "only_rejected", "length"}
        assert manifest["counts"]["pairs"] > 20
    # One pass for those that have pairs and a reference in common, one of single completions.
    made = [json.loads(path.read_text()) for path in project.folder.glob("results/ref_logps/*/manifest.json")]
    # That of the finished project is there too.
    assert len([one for one in made if one["spec"]["token_logps"]]) == 1
    assert len({str(one["inputs"]) for one in made}) == 2
    manifest, run = result("hopeless")
    assert manifest["stopped"] == run["stopped"] == {"step": 2, "reason": manifest["stopped"]["reason"]}
    assert manifest["counts"]["steps"] == 2 and [entry["step"] for entry in run["history"]] == [1, 2]
    # Half of the completions, each beside another one's.
    manifest, run = result("marked")
    packed = read_table(next(project.folder.glob("results/pack/marked-*/shards/documents.arrow")))
    labels = packed["label"].to_pylist()
    assert 0 < sum(labels) < len(labels) == len(packed)
    assert "accuracy" not in run["history"][-1] and run["history"][0]["loss"] == pytest.approx(
        0.5 * (0.7 * 2 / 3 + 1 / 3), rel=0.35
    )
    scores = json.loads(project.read("results/eval/both/dpo-pairs-lossorpo/scores/scores.json"))
    assert scores["preferences"]["pairs"]["reward_accuracy"] is None
    assert scores["preferences"]["pairs"]["logp_accuracy"] is not None
