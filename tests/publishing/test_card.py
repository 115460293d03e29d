"""Model cards: their content, and escaping of untrusted text."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import AutoConfig

from snaketune.errors import SnaketuneError
from snaketune.publishing.cards.card_text import CardResults, escaped
from snaketune.stages.specs import CorpusDescription

from . import invented
from .invented import CHAIN, HUB, LEARNING, card_of, spec_of, write_chain

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ALONE = {"base_dtype": "float32"}
SFT_ON_HUB = {"spec": CHAIN["sft/demo"]["spec"] | {"base": HUB}}
HOSTILE = (
    "a|b\n# <script>x</script> [l](javascript:1) ![i](http://x) **b** `c`\n---\nlicense: mit\n- x \u202e@y http://z"
)


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_hub_reads_base_datasets_license_and_scores(tmp_path):
    card = card_of(tmp_path, sft_demo=SFT_ON_HUB)
    data = ModelCard(card).data
    assert (data.base_model, data.license, data.library_name) == ("Qwen/Qwen2.5-0.5B", "mit", "transformers")
    assert (data.datasets, data.pipeline_tag, data.language) == (["open/votes"], "text-generation", None)
    assert data.tags == ["snaketune", "dpo", "sft"]
    assert {(one.dataset_type, one.metric_type): one.metric_value for one in data.eval_results} == {
        ("chat", "held_out_loss"): 0.23279,
        ("chat", "exact_match.share"): 0.95,
        ("open/votes", "logp_accuracy_per_token"): 0.9079,
        ("choice", "acc"): 0.75,
        ("choice", "exact_match,strict.v1"): 0.5,
    }
    assert head_of(card)["base_model_relation"] == "finetune"


def test_it_has_row_counts_and_licenses_of_the_data(tmp_path):
    card = card_of(tmp_path)
    chat, votes = card.split("### chat")[1].split("### votes")
    for line in (
        "| read | 9,000 |",
        "| malformed: not json | 7 |",
        "| dropped: duplicate | 12 |",
        "| kept for training | 8,061 |",
    ):
        assert line in chat
    assert "near duplicate" not in chat
    assert "License: not stated. From 2 local files." in chat
    assert "License: cc0-1.0. From [open/votes](https://huggingface.co/datasets/open/votes) (train, f00)." in votes
    assert "In rows of 512 tokens: 3 dropped (too long), 2 truncated; 76,326 tokens, 9,000 supervised." in votes


def test_scores_have_intervals_where_known(tmp_path):
    card = card_of(tmp_path)
    assert "| e | chat | exact match | 95% | \\[92%, 97%\\] |" in card
    assert "| e | chat | held-out loss, nats | 0.2328 |  |" in card
    assert "| e | choice | acc | 75% | \\[50%, 90%\\] |" in card
    assert "| e | choice | exact\\_match,strict.v1 | 50% |  |" in card
    assert "acc\\_norm" not in card


def test_checks_are_a_table_and_what_was_not_checked_is_named(tmp_path, monkeypatch):
    assert "## Checks" not in card_of(tmp_path / "without")
    checked = {"name": "packed = alone", "compares": "loss", "status": "passed", "figure": 2e-6, "tolerance": 1e-3}
    failed = checked | {"name": "supervised = answer", "status": "failed", "figure": 0.5, "tolerance": 0.0}
    none = {"figure": None, "tolerance": None, "reason": "`gguf:` has no file of it", "status": "not checked"}
    without = checked | {"name": "GGUF = Hugging Face", "compares": "logits; of texts"} | none
    checks = [{"at_least": False, "reason": ""} | check for check in (checked, failed, without)]
    files_of = invented.files_of
    files = {"verify.json": json.dumps({"checks": checks})}
    replayed = checked | {
        "name": "first steps = record",
        "figure": 0.0,
        "tolerance": 0.0,
        "at_least": False,
        "reason": "",
    }
    of_replay = {"verify.json": json.dumps({"checks": [replayed]})}
    by_stage = {"verification": files, "reproduction": of_replay}
    monkeypatch.setattr(invented, "files_of", lambda stage: by_stage.get(stage) or files_of(stage))
    more = {"verification/dpo-demo": {}, "reproduction/dpo-demo": {}}
    monkeypatch.setattr(invented, "CHAIN", invented.CHAIN | more)
    card = card_of(tmp_path / "with")
    assert "| packed = alone | 2.0e-06 | ≤ 0.001 | passed |" in card
    assert "| supervised = answer | 0.5 | ≤ 0 | failed |" in card
    assert "| first steps = record | 0 | ≤ 0 | passed |" in card
    assert "Not checked: GGUF = Hugging Face (\\`gguf:\\` has no file of it)." in card


def test_each_run_has_a_column_and_digests_are_from_the_manifest(tmp_path):
    card = card_of(tmp_path)
    assert "|  | sft:demo | dpo:demo |" in card
    assert "| beta |  | 0.2 |" in card
    assert "| steps | 2,082 | 76 |" in card
    assert "| 152,652 |" in next(line for line in card.splitlines() if line.startswith("| tokens trained |"))
    assert "label" not in card
    (digest,) = re.findall(r"\| model\.safetensors \| 14 \| (xxh3:\w+) \|", card)
    assert digest in (tmp_path / "results/dpo/demo/manifest.json").read_text()


def test_it_is_deterministic_and_has_no_time_host_or_path(tmp_path):
    card = card_of(tmp_path / "one")
    assert card == card_of(tmp_path / "two")
    for where in (str(tmp_path), "/home/me", "secret.jsonl"):
        assert where not in card


def test_paths_of_a_local_base_and_reference_are_not_disclosed(tmp_path):
    base = {"path": "/home/me/models/base", "revision": None, "trust_remote_code": False}
    card = card_of(
        tmp_path,
        sft_demo={"spec": CHAIN["sft/demo"]["spec"] | {"base": base}, "inputs": {"base": ["xxh3:0 config.json"]}},
        dpo_demo={"spec": CHAIN["dpo/demo"]["spec"] | {"reference": base}},
    )
    assert "A model from a local folder" in card
    assert "against base" in card
    assert "/home/me" not in card
    assert "base_model" not in head_of(card)


def test_a_reference_that_is_another_run_is_named(tmp_path):
    """As in a second round, whose reference is the model before the first."""
    spec = spec_of()
    trained, *others = spec.jobs
    trained = trained.model_copy(update={"made_from": trained.made_from | {"reference": ("sft/before",)}})
    changed = {"spec": CHAIN["dpo/demo"]["spec"] | {"reference": "result"}}
    card = card_of(tmp_path, spec.model_copy(update={"jobs": (trained, *others)}), dpo_demo=changed)
    assert "by preference optimization (sigmoid) against sft:before" in card


@pytest.mark.parametrize(("made_from", "named"), [({"model": ("sft/large",)}, "sft:large"), ({}, "large")])
def test_a_teacher_is_named(tmp_path, monkeypatch, made_from, named):
    """Another run, or a model in a local folder."""
    spec = {"base": {"path": "/home/me/large"}, "k": 32, "temperature": 1.0}
    monkeypatch.setitem(invented.CHAIN, "teacher/large-chat", {"spec": spec, "k": 16})
    monkeypatch.setitem(invented.MADE_FROM, "teacher/large-chat", made_from)
    taught = invented.MADE_FROM["sft/demo"] | {"teacher": ("teacher/large-chat",)}
    monkeypatch.setitem(invented.MADE_FROM, "sft/demo", taught)
    distill = {"weight": 0.8, "temperature": 1.0, "loss": "jsd"}
    card = card_of(tmp_path, sft_demo={"spec": CHAIN["sft/demo"]["spec"] | {"distill": distill}})
    assert f"trained by supervised fine-tuning towards the probabilities of {named}, then" in card
    assert re.search(r"\| distill.weight \|.* 0.8 \|", card)
    assert "distill.k" in card and "/home/me" not in card


def test_languages_are_listed_if_all_corpora_were_filtered_by_language(tmp_path):
    filtered = {
        name: CHAIN[name] | {"spec": CHAIN[name]["spec"] | {"cleaning": {"languages": ["en"]}}}
        for name in ("corpus/chat", "corpus/votes")
    }
    one = card_of(tmp_path / "one", corpus_chat=filtered["corpus/chat"])
    both = card_of(tmp_path / "both", corpus_chat=filtered["corpus/chat"], corpus_votes=filtered["corpus/votes"])
    assert "language" not in head_of(one)
    assert head_of(both)["language"] == ["en"]


@pytest.mark.parametrize(
    ("dpo", "sft", "base_model", "base"),
    [
        # On the SFT run's result, which has no name on the Hub.
        ({}, {}, "the result of `sft:demo`; set", 'BASE = "..."'),
        ({}, ALONE, "the result of `sft:demo`, an adapter itself, merged; set", 'BASE = "..."'),
        ({"continued": True}, ALONE, "the model that its training started from; set", 'BASE = "Qwen/Qwen2.5-0.5B"'),
        ({"continued": True}, ALONE, "the model that its training started from; set", 'revision="main")'),
    ],
)
def test_an_adapter_names_its_base(tmp_path, dpo, sft, base_model, base):
    lora = {"rank": 8, "merge": False}
    spec = CHAIN["dpo/demo"]["spec"] | {"lora": lora} | dpo
    card = card_of(tmp_path, dpo_demo={"spec": spec} | ALONE, sft_demo=SFT_ON_HUB | sft)
    assert f"Its base is {base_model}" in card
    assert base in card
    assert 'PeftModel.from_pretrained(model, MODEL, subfolder="adapter")' in card
    assert "| lora.rank |  | 8 |" in card
    head = head_of(card)
    assert (head["library_name"], head["base_model_relation"], head["tags"][-1]) == ("peft", "adapter", "lora")


def test_an_adapter_s_base_is_loaded_with_scaled_positions(tmp_path):
    """The code of the card, on a base and on an adapter's folder with their configs alone."""
    for name, rope in (
        ("base", {"max_position_embeddings": 32}),
        ("adapter", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    ):
        AutoConfig.for_model("llama", **rope).save_pretrained(tmp_path / name)
    base = {"spec": CHAIN["sft/demo"]["spec"] | {"base": HUB | {"rope": {"type": "yarn", "factor": 4.0}}}}
    spec = CHAIN["dpo/demo"]["spec"] | {"lora": {"merge": False}, "continued": True}
    card = card_of(tmp_path / "scaled", dpo_demo={"spec": spec} | ALONE, sft_demo=base | ALONE)
    code = card.split("```python\n")[1]
    assert 'AutoModelForCausalLM.from_pretrained(BASE, dtype="auto", config=config' in code
    lines = [line for line in code.splitlines() if line.startswith(("config =", "trained, text", "text."))]
    assert len(lines) == 3
    names = {"AutoConfig": AutoConfig, "BASE": str(tmp_path / "base"), "MODEL": str(tmp_path / "adapter")}
    exec("\n".join(lines).replace(', revision="main"', ""), names)
    assert names["config"].rope_parameters == YARN
    assert names["config"].max_position_embeddings == 128
    merged = card_of(tmp_path / "merged", dpo_demo={"spec": spec}, sft_demo=base)
    assert "AutoConfig" not in merged


def test_python_code_of_a_model_is_mentioned(tmp_path):
    card = card_of(tmp_path, dpo_demo={"spec": CHAIN["dpo/demo"]["spec"] | {"trust_remote_code": True}})
    assert "read it first" in card
    assert card.count("trust_remote_code=True") == 2


def test_a_reward_model_is_loaded_as_one_and_has_its_own_scores(tmp_path, monkeypatch):
    trained = {"training": LEARNING, "margin": False, "center_rewards_coefficient": 0.01}
    trained |= {"lora": None, "quantization": None, "trust_remote_code": False}
    kept = {job: about for job, about in CHAIN.items() if not job.endswith("dpo-demo") and job != "dpo/demo"}
    chain = {
        "reward/demo": {"spec": trained, "counts": {"steps": 76}},
        "eval/e/reward-demo": {"spec": {"rewards": True}},
    }
    measured = {
        "pairs": 200,
        "reward_accuracy": 0.91,
        "reward_accuracy_interval": [0.87, 0.94],
        "calibration_error": 0.05,
    }
    made_from = invented.MADE_FROM | {"reward/demo": invented.MADE_FROM["dpo/demo"]}
    monkeypatch.setattr(invented, "CHAIN", {"reward/demo": chain["reward/demo"]} | kept | chain)
    monkeypatch.setattr(invented, "MADE_FROM", made_from)
    monkeypatch.setattr(invented, "SCORES", {"conversations": {}, "preferences": {"votes": measured}})
    card = card_of(tmp_path, spec_of(model="reward:demo"))
    data = ModelCard(card).data
    assert (data.pipeline_tag, data.tags) == ("text-classification", ["snaketune", "reward", "sft"])
    assert {one.metric_type: one.metric_value for one in data.eval_results} == {
        "reward_accuracy": 0.91,
        "calibration_error": 0.05,
    }
    assert "trained by supervised fine-tuning, then as a reward model on pairs" in " ".join(card.split())
    assert "| e | votes | reward accuracy | 91% | \\[87%, 94%\\] |" in card
    assert "| center\\_rewards\\_coefficient |  | 0.01 |" in card
    assert "AutoModelForSequenceClassification.from_pretrained(MODEL" in card and "generate" not in card


def test_untrusted_text_is_escaped(tmp_path):
    words = {
        name: CorpusDescription(license=HOSTILE.replace("\n", " "), description=HOSTILE) for name in ("chat", "votes")
    }
    hostile = {"spec": CHAIN["dpo/demo"]["spec"] | {"loss": HOSTILE, "training": LEARNING | {HOSTILE: HOSTILE}}}
    card = card_of(tmp_path / "hostile", spec_of(corpora=words, license="mit"), dpo_demo=hostile)
    plain = card_of(
        tmp_path / "plain", dpo_demo={"spec": CHAIN["dpo/demo"]["spec"] | {"training": LEARNING | {"x": "y"}}}
    )

    def elements(card: str) -> list[str]:
        """The types of all Markdown elements in order, without paragraphs, which a description adds."""
        tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(card.split("---\n", 2)[2])
        inner = [child.type for token in tokens for child in token.children or ()]
        return [
            kind
            for kind in [*(token.type for token in tokens), *inner]
            if "paragraph" not in kind and kind not in ("inline", "text")
        ]

    assert [one for one in elements(card) if one != "text_special"] == elements(plain)
    assert "\u202e" not in card
    assert head_of(card).keys() == head_of(plain).keys()
    assert head_of(card)["license"] == "mit"


def test_an_invalid_hub_id_makes_no_link_and_no_code(tmp_path):
    """Manifests of other origin may contain one."""
    path = 'x"); import os  # ](http://x) <b>'
    corpus = CHAIN["corpus/votes"]["spec"]
    corpus = corpus | {"sources": [corpus["sources"][0] | {"hub": corpus["sources"][0]["hub"] | {"path": path}}]}
    card = card_of(
        tmp_path,
        sft_demo={"spec": CHAIN["sft/demo"]["spec"] | {"base": HUB | {"path": path}}} | ALONE,
        dpo_demo={"spec": CHAIN["dpo/demo"]["spec"] | {"continued": True}} | ALONE,
        corpus_votes={"spec": corpus},
    )
    assert 'BASE = "..."' in card
    assert "import os" in card
    assert "import os" not in card.split("```python")[1]
    assert "huggingface.co" not in card
    assert "datasets" not in head_of(card)


def test_urls_in_untrusted_text_become_no_links():
    assert escaped("http://x https://y www.z me@z") == r"http\://x https\://y www\.z me\@z"


def test_manifests_in_another_order_are_refused(tmp_path):
    manifests = write_chain(tmp_path)
    with pytest.raises(SnaketuneError, match="isn't the manifest of dpo/demo"):
        CardResults(spec_of(), manifests[::-1])
    with pytest.raises(SnaketuneError, match="7 jobs, but there are 6 manifests"):
        CardResults(spec_of(), manifests[:-1])
