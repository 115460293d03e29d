"""Right configs resolve to the jobs that they mean."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

from .edits import generated, put, refused

ROOT = Path(__file__).parents[2]


def test_a_grid_makes_one_run_per_combination_that_share_all_before_them(raw):
    raw["dpo"]["sweep"] = {
        "extends": "demo",
        "loss": "ipo",
        "grid": {"beta": [0.1, 0.5], "training.learning_rate": [1e-4]},
    }
    raw["eval"]["demo"]["models"] = ["dpo:sweep"]
    graph = JobGraph(*load(raw))
    names = ["sweep-beta0.1-learning_rate0.0001", "sweep-beta0.5-learning_rate0.0001"]
    assert [job.name for job in graph.stage("dpo")] == ["demo", *names]
    assert [job.name for job in graph.stage("eval")] == [f"demo/dpo-{name}" for name in names]
    assert len(list(graph.stage("ref_logps"))) == len(list(graph.stage("sft"))) == 1
    assert graph.job("dpo", names[1]).spec.loss == "ipo"
    assert graph.job("dpo", names[1]).spec.training.epochs == raw["dpo"]["demo"]["training"]["epochs"]


def test_a_key_that_the_loss_does_not_use_is_refused(raw):
    for keys, messages in (
        ({"loss": "hinge", "label_smoothing": 0.1}, r"label_smoothing has no effect on loss hinge; .*exo_pair"),
        (
            {"loss": "nca_pair", "f_divergence_type": "js_divergence"},
            "f_divergence_type has no effect on loss nca_pair",
        ),
        (
            {"loss": {"sigmoid": 1, "aot": 1}, "f_divergence_type": "forward_kl"},
            "has no effect on loss sigmoid and aot",
        ),
        ({"loss": "orpo", "ld_alpha": 0.5}, "ld_alpha has no effect on loss orpo"),
        ({"loss": "cpo", "stop_if": {"kl_above": 3}}, "stop_if.kl_above needs a loss with a reference"),
    ):
        wrong = raw | {"dpo": {"demo": raw["dpo"]["demo"] | keys}}
        with pytest.raises(SnaketuneError, match=messages):
            load(wrong)


def test_a_loss_without_a_reference_has_no_reference_job(raw):
    raw["eval"]["demo"]["models"].remove("dpo:sweep")
    for loss in ("simpo", "orpo", "cpo", {"simpo": 1.0, "sft": 0.5}):
        raw["dpo"]["demo"] |= {"loss": loss}
        raw["dpo"].pop("sweep", None)
        raw["eval"]["demo"]["models"] = ["dpo:demo"]
        graph = JobGraph(*load(raw))
        assert not [*graph.stage("ref_logps")], loss
        assert [job.artifacts["ref_logps"] for job in (*graph.stage("dpo"), graph.job("eval", "demo/dpo-demo"))] == [
            (),
            (),
        ]


def test_a_grid_over_losses_takes_mappings_too_and_shares_one_reference(raw):
    mixed = {"sigmoid": 0.8, "sft": 1.0}
    raw["dpo"]["demo"] = raw["dpo"]["demo"] | {"loss": {"ipo": 1, "sft": 2}}
    grid = {"loss": ["sigmoid", mixed, "simpo"], "beta": [0.1, 0.5], "training.learning_rate": [1e-4]}
    raw["dpo"]["sweep"] = {"extends": "demo", "grid": grid}
    # One loss with weight 1 is that loss, and an inherited mapping isn't added to.
    raw["dpo"]["heir"] = {"extends": "demo", "loss": {"sigmoid": 1}}
    graph = JobGraph(*load(raw))
    specs = {job.name: job.spec for job in graph.stage("dpo")}
    assert len(specs) == 8
    assert specs["sweep-loss1-beta0.5-learning_rate0.0001"].weights == mixed
    assert specs["heir"].loss == "sigmoid"
    assert len([*graph.stage("ref_logps")]) == 1
    assert {name for name, spec in specs.items() if not spec.needs_reference} == {
        f"sweep-losssimpo-beta{beta}-learning_rate0.0001" for beta in (0.1, 0.5)
    }


def test_the_canonical_spec_is_independent_of_key_order_and_has_all_defaults(raw):
    turned = {key: dict(reversed(section.items())) for key, section in reversed(raw.items())}
    turned["sft"]["demo"] = dict(reversed(raw["sft"]["demo"].items()))
    turned["sft"]["demo"]["lora"] = None
    one, other = JobGraph(*load(raw)), JobGraph(*load(turned))
    assert {key: canonical(job.spec) for key, job in one.jobs.items()} == {
        key: canonical(job.spec) for key, job in other.jobs.items()
    }


def test_the_shipped_schema_is_the_models_schema_and_accepts_the_shipped_configs(raw):
    shipped = json.loads((ROOT / "config/schema.json").read_text(encoding="utf-8"))
    assert shipped == generated.config_schema(STAGES), "write it again: make docs"
    for path in [ROOT / "config/config.yaml", *(ROOT / "config/recipes").glob("*.yaml")]:
        jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), shipped)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(put(raw, "sft.demo.corpsu", "x"), shipped)


def test_jobs_with_similar_names_are_distinct(raw):
    raw["corpora"] |= {"a": raw["corpora"]["demo-chat"], "a-b": {**raw["corpora"]["demo-chat"], "split_seed": 5}}
    raw["tokenizers"] |= {"b-c": raw["tokenizers"]["demo"], "c": raw["tokenizers"]["demo"]}
    raw["sft"] |= {
        "one": raw["sft"]["demo"] | {"corpus": "a", "tokenizer": "b-c"},
        "two": raw["sft"]["demo"] | {"corpus": "a-b", "tokenizer": "c"},
    }
    graph = JobGraph(*load(raw))
    one, two = (graph.job("sft", name).artifacts["pack"][0] for name in ("one", "two"))
    assert one.manifest != two.manifest
    (tokens,) = two.artifacts["plan"][0].artifacts["tokens"]
    assert [job.name for job in tokens.artifacts["corpus"]] == ["a-b"]


def test_a_corpus_has_one_part_per_256_mb_or_the_configured_number(raw, tmp_path):
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(600_000_000)
    raw["corpora"]["demo-chat"]["sources"] = [{"files": [str(large)]}]

    def parts() -> list[str]:
        pack = JobGraph(*load(raw)).job("sft", "demo").artifacts["pack"][0]
        tokens = pack.artifacts["plan"][0].artifacts["tokens"]
        assert [job.name.split("/")[1] for job in pack.artifacts["shards"]] == [j.name.split("/")[1] for j in tokens]
        return [job.name.split("/")[1] for job in tokens]

    assert parts() == ["1-of-3", "2-of-3", "3-of-3"]
    raw["corpora"]["demo-chat"]["parts"] = 2
    assert parts() == ["1-of-2", "2-of-2"]


def test_other_row_lengths_do_not_tokenize_again(raw):
    raw["sft"]["short"] = {"extends": "demo", "packing": {"length": 256, "overflow": "truncate"}}
    raw["sft"]["all"] = {"extends": "demo", "packing": {"train_on": "all"}}
    graph = JobGraph(*load(raw))
    tokens = {
        name: graph.job("sft", name).artifacts["pack"][0].artifacts["plan"][0].artifacts["tokens"]
        for name in ("demo", "short", "all")
    }
    assert tokens["demo"] == tokens["short"] != tokens["all"]


def test_a_corpus_is_decontaminated_against_what_is_evaluated(raw):
    for name in ("bench", "clean-bench"):
        raw["corpora"][name] = raw["corpora"]["demo-chat"] | {"held_out": 1.0}
        raw["eval"]["demo"]["conversations"].append(name)
    raw["corpora"]["demo-chat"]["decontamination"] = {}
    # One that is cleaned itself can't be waited for.
    raw["corpora"]["clean-bench"] |= {"decontamination": {}, "held_out": 0.5}
    job = JobGraph(*load(raw)).job("corpus", "demo-chat")
    assert [against.name for against in job.artifacts["against"]] == ["bench", "demo-preferences"]
    assert [Path(file).name for file in job.files["against_files"]] == ["demo_choice.jsonl"]


def test_a_grid_over_lists_is_named_by_index(raw):
    raw["sft"]["sweep"] = {"extends": "demo", "grid": {"training.betas": [[0.9, 0.95], [0.9, 0.99]]}}
    assert {"sweep-betas0", "sweep-betas1"} <= {job.name for job in JobGraph(*load(raw)).stage("sft")}


def test_errors_of_many_variants_are_counted_and_not_all_printed(raw):
    raw["sft"]["sweep"] = {"extends": "demo", "grid": {"training.epochs": [-number for number in range(1, 101)]}}
    with pytest.raises(SnaketuneError, match="and 70 more") as error:
        load(raw)
    assert len(str(error.value).splitlines()) == 32


def test_file_names_with_shell_characters_stay_file_names(raw, tmp_path):
    name = tmp_path / "it's $(touch gone) & co.jsonl"
    name.write_text("{}\n", encoding="utf-8")
    raw["corpora"]["odd"] = {"kind": "conversations", "sources": [{"files": [str(name)]}]}
    assert JobGraph(*load(raw)).job("corpus", "odd").files["files"] == (str(name),)


@pytest.mark.parametrize(
    "edit",
    [
        {"corpora.demo-chat.answer_pattern": "Answer: (.*)"},
        {"corpora.demo-chat.sources.0.fields": {"prompt": "question", "response": "reply", "answer": "result"}},
        # Of two corpora one is enough.
        {"eval.demo.conversations": ["more", "demo-chat"]},
        # Exact match isn't configured, but existing answers would be compared.
        {"eval.demo": {"models": ["sft:demo"], "conversations": ["demo-chat"]}, "report.sort_by": None},
    ],
)
def test_exact_match_needs_one_corpus_with_checkable_answers(raw, edit):
    mapped = put(raw, "corpora.more", raw["corpora"]["demo-chat"])
    mapped = put(mapped, "corpora.demo-chat.sources.0.fields", {"prompt": "question", "response": "reply"})
    refused(mapped, ["eval.demo.exact_match"])
    documents = put(raw, "corpora.demo-chat.kind", "text")
    documents = put(documents, "dpo", {})
    documents = put(documents, "eval.demo.models", ["sft:demo"])
    documents = put(documents, "report.sort_by", None)
    refused(documents, ["eval.demo.exact_match", "documents have no questions", "remove exact_match"])
    for key, value in edit.items():
        mapped = put(mapped, key, value)
    load(mapped)


def test_a_path_that_is_neither_a_folder_nor_an_id_of_the_hub_names_the_nearest_folder(raw, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "resources").symlink_to(ROOT / "resources")
    monkeypatch.chdir(tmp_path)
    for name in ("modle", "gpt2"):
        raw["sft"]["demo"]["base"] = {"path": name}
        with pytest.raises(
            SnaketuneError, match=f"sft.demo.base.path: '{name}' is neither a folder .*Hub, `owner/name`"
        ) as error:
            load(raw)
        assert ("did you mean the folder 'model'?" in str(error.value)) == (name == "modle")
    # What could be `owner/name` of the Hub isn't asked for there if a folder beside it has nearly that name.
    (tmp_path / "data/smollm2-135m").mkdir(parents=True)
    raw["sft"]["demo"]["base"] = {"path": "data/smollm2-135"}
    with pytest.raises(SnaketuneError, match=r"no folder 'data/smollm2-135'.*did you mean 'data/smollm2-135m'"):
        load(raw)
    raw["sft"]["demo"]["base"] = {"path": "data/llama"}
    with pytest.raises(SnaketuneError, match="'data/llama' has another vocabulary"):
        load(raw)
