"""Wrong configs are refused before anything runs, with key, value and what was expected; right ones resolve."""

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


WRONG = [
    ("sft.demo.training.learning_rte", 1, ["sft.demo.training.learning_rte", "did you mean 'learning_rate'"]),
    ("corpora.demo-chat.held_ou", 0.1, ["corpora.demo-chat.held_ou", "did you mean 'held_out'"]),
    ("dpo.demo.form", "demo", ["dpo.demo.form", "did you mean 'from'"]),
    ("sfd", {}, ["sfd", "did you mean 'sft'"]),
    ("sft.demo.base.hidden_sise", 64, ["sft.demo.base.hidden_sise", "did you mean 'hidden_size'"]),
    ("sft.demo.training.epochs", "many", ["sft.demo.training.epochs", "'many'", "number"]),
    ("sft.demo.training.epochs", -1, ["sft.demo.training.epochs", "-1", "greater than 0"]),
    ("sft.demo.training.batch_rows", 3, ["sft.demo.training", "batch_rows 3", "micro_batch_rows 2"]),
    ("sft.demo.training", {"epochs": 1}, ["sft.demo.training.learning_rate", "is missing"]),
    ("sft.demo.corpus", "demo-chta", ["sft.demo.corpus", "'demo-chta'", "did you mean 'demo-chat'"]),
    (
        "sft.demo.corpus",
        "demo-preferences",
        ["sft.demo.corpus", "is of kind preferences", "expected conversations or text"],
    ),
    ("sft.demo.tokenizer", "x", ["sft.demo.tokenizer", "'x'", "known: demo"]),
    ("sft.demo.packing.length", 4096, ["sft.demo.packing.length", "4096", "max_positions", "2048"]),
    ("sft.demo.packing.length", "x", ["sft.demo.packing.length: found 'x'; input should be a valid integer"]),
    ("sft.demo.packing.length", [512], ["sft.demo.packing.length: found [512]; tuple should have at least 2"]),
    ("sft.demo.packing.length", [512, 1000], ["sft.demo.packing.length", "512 doesn't divide 1000"]),
    ("sft.demo.packing.length", [256, 4096], ["sft.demo.packing.length", "4096", "max_positions"]),
    ("sft.demo.packing", {"length": [256, 512], "order": "length"}, ["sft.demo.packing", "takes rows of one length"]),
    ("sft.demo.packing.order", "column", ["sft.demo.packing.order", "corpora.demo-chat has no `order_column`"]),
    ("eval.demo.packing", {"order": "length"}, ["eval.demo.packing.order", "in any order; remove it"]),
    (
        "sft.demo.operation",
        {"launch": "deepspeed", "activation_offloading": True},
        ["sft.demo.operation.activation_offloading", "use ddp or fsdp"],
    ),
    ("sft.demo.packing", {"length": [256, 512], "strategy": "wrapped"}, ["sft.demo.packing", "takes a single length"]),
    ("sft.demo.packing", {"strategy": "none", "overflow": "split"}, ["sft.demo.packing", "found split"]),
    ("sft.demo.packing", {"strategy": "none", "train_on": "all"}, ["sft.demo.packing", "remove train_on"]),
    ("dpo.demo.packing", {"overflow": "split"}, ["dpo.demo", "pairs are never split"]),
    ("dpo.demo.packing", {"train_on": "all"}, ["dpo.demo", "remove packing.train_on"]),
    ("eval.demo.packing", {"overflow": "split"}, ["eval.demo.packing", "pairs are never split"]),
    (
        "corpora.demo-chat.cleaning",
        {"drop_matching": ["("]},
        ["cleaning.drop_matching", "'(' is not a regular expression"],
    ),
    ("corpora.demo-chat.cleaning", {"languages": ["English"]}, ["cleaning.languages", "'English'"]),
    (
        "corpora.demo-chat.cleaning",
        {"min_characters": 9, "max_characters": 3},
        ["cleaning", "more than max_characters 3"],
    ),
    ("corpora.demo-chat.parts", 1000, ["corpora.demo-chat.parts", "1000", "less than or equal to 128"]),
    ("corpora.demo-chat.held_out", 1.0, ["sft.demo.corpus", "'demo-chat' holds out all rows"]),
    (
        "corpora.bench",
        {
            "kind": "conversations",
            "sources": [{"files": ["resources/demo/chat.jsonl"]}],
            "held_out": 1,
            "decontamination": {},
        },
        ["corpora.bench", "held_out is 1", "remove decontamination"],
    ),
    ("corpora.demo-chat.repair", ["merge"], ["corpora.demo-chat.repair", "'merge'", "'merge-same-role'"]),
    ("corpora.demo-chat.sources.0.speakers", {"A": "bot"}, ["sources.0.speakers.A", "'bot'", "'assistant'"]),
    ("corpora.demo-chat.sources.0.weight", 0, ["sources.0.weight", "greater than 0"]),
    ("dpo.demo.from", "nobody", ["dpo.demo.from", "'nobody'", "`sft:`"]),
    ("dpo.demo.loss", "sigmoids", ["dpo.demo.loss", "'sigmoids'", "'sigmoid'"]),
    ("dpo.demo.loss", "aot_unpaired", ["dpo.demo.loss: there is no loss 'aot_unpaired'", "`aot`"]),
    ("dpo.demo.loss", "kto_pair", ["dpo.demo.loss: there is no loss 'kto_pair'", "`bco_pair`"]),
    ("dpo.demo.loss", ["sigmoid", "sft"], ["dpo.demo.loss: there is no loss"]),
    ("dpo.demo.loss", {}, ["dpo.demo.loss: found {}"]),
    ("dpo.demo.loss", {"sigmoid": 0.8, "stf": 0.2}, ["dpo.demo.loss", "'stf'; did you mean 'sft'"]),
    ("dpo.demo.loss", {"sigmoid": 0}, ["dpo.demo.loss: found 0 as the weight of sigmoid", "above 0"]),
    ("dpo.demo.loss", {"sigmoid": True}, ["dpo.demo.loss: found True as the weight of sigmoid"]),
    ("dpo.demo.loss", "sft", ["sft alone", "has no preference term"]),
    ("dpo.demo.loss", {"kto": 1, "sft": 1}, ["kto takes single completions", "can't be combined"]),
    ("dpo.demo.loss", "kto", ["dpo.demo.corpus", "is of kind preferences, expected unpaired"]),
    ("dpo.demo.loss", "exo_pair", ["exo_pair is infinite without label_smoothing; set it above 0"]),
    ("dpo.demo.simpo_gamma", 1.0, ["simpo_gamma has no effect on loss sigmoid", "it belongs to simpo"]),
    ("dpo.demo.f_alpha_divergence_coef", 0.3, ["f_alpha_divergence_coef has no effect", "alpha_divergence"]),
    ("dpo.demo.ld_alpha", 1.5, ["dpo.demo.ld_alpha", "less than or equal to 1"]),
    ("dpo.demo.stop_if", {"window": 5}, ["dpo.demo.stop_if: expected margin_below, chosen_reward_below or kl_above"]),
    ("dpo.demo.stop_if", {"kl_abov": 5}, ["stop_if.kl_abov", "did you mean 'kl_above'"]),
    ("dpo.demo.label_smoothing", 0.7, ["dpo.demo.label_smoothing", "0.7", "less than 0.5"]),
    ("dpo.demo.quantization", {}, ["dpo.demo", "quantization", "lora"]),
    ("eval.demo.models", ["dpo:nobody"], ["eval.demo.models", "'nobody'"]),
    ("eval.demo.models", ["demo"], ["eval.demo.models", "'demo'"]),
    (
        "corpora.demo-chat.sources.0.fields",
        {"prompt": "question", "response": "reply"},
        [
            "eval.demo.exact_match: no row of demo-chat can have a checkable answer",
            "fields.answer",
            "corpora.demo-chat.answer_pattern",
        ],
    ),
    ("eval.demo.exact_match.answer_pattern", "(", ["answer_pattern", "not a regular expression"]),
    ("eval.demo.exact_match.answer_pattern", "x", ["answer_pattern", "exactly one group"]),
    (
        "eval.demo.generation",
        {"top_k": 5},
        ["eval.demo.generation: top_k is 5, but it has no effect with temperature 0"],
    ),
    ("eval.demo.generation", {"temperature": -1}, ["eval.demo.generation.temperature", "greater than or equal to 0"]),
    ("eval.demo.generation", {"stop": [""]}, ["eval.demo.generation.stop.0", "at least 1 character"]),
    ("eval.demo.tasks", {"names": []}, ["eval.demo.tasks.names", "at least 1"]),
    ("eval.demo.tasks", {"names": ["x"], "chat_template": "maybe"}, ["eval.demo.tasks.chat_template", "'maybe'"]),
    (
        "eval.demo.tasks",
        {"names": ["x"], "chat_template": False, "few_shot_as_multiturn": False},
        ["eval.demo.tasks: few_shot_as_multiturn is false", "remove it"],
    ),
    ("eval.demo.tasks.folder", "no/where", ["eval.demo.tasks.folder", "'no/where'", "is not a folder with task files"]),
    ("corpora.demo-chat.sources.0.files", ["gone.jsonl"], ["corpora.demo-chat.sources.0.files", "'gone.jsonl'"]),
    ("corpora.demo-chat.sources", [], ["corpora.demo-chat.sources", "at least 1"]),
    ("corpora.a/b", {}, ["corpora.a/b"]),
    ("corpora.demo-chat.sources.0.fields", {"prompt": "q"}, ["sources.0.fields", "prompt and response"]),
    ("tokenizers.demo.adopt", "some/model", ["tokenizers.demo", "exactly one of `train` and `adopt`"]),
    ("sft.demo.lora", {"rank": 8}, ["sft.demo", "lora", "from scratch"]),
    ("sft.demo.grid", {"training.epochs": 3}, ["sft.demo.grid", "lists of values"]),
    (
        "dpo.demo.grid",
        {"loss": [{"ipo": 2, "sft": 1}, {"sft": 1, "ipo": 2}]},
        ["dpo.demo.grid", "two runs would be named 'demo-loss0'"],
    ),
    ("sft.Llama", {"corpus": 1}, ["sft.Llama.corpus: found 1", "sft.Llama.training: is missing"]),
    ("sft.demo.base", {"layrs": 2}, ["sft.demo.base.layrs", "did you mean 'layers'"]),
    ("sft.demo.base", {"path": "./nope/model"}, ["sft.demo.base.path", "'./nope/model' is not a folder"]),
    ("dpo.demo.reference", {"path": "./nope"}, ["dpo.demo.reference.path", "'./nope' is not a folder"]),
    (
        "dpo.demo.reference",
        {"path": "resources/demo"},
        ["'resources/demo' is not a folder with a model", "config.json"],
    ),
    ("sft.demo.base", {"path": "config/config.yaml"}, ["sft.demo.base.path", "'config/config.yaml' is not a folder"]),
    (
        "dpo.demo.reference",
        {"path": "demo"},
        ["dpo.demo.reference.path: 'demo' is neither a folder (in", "`owner/name`"],
    ),
    ("dpo.demo.reference", {"path": "sft:demo"}, ["'sft:demo'", "a folder, or a model of the Hub as `owner/name`"]),
    ("dpo.demo.reference", {"path": ""}, ["dpo.demo.reference.path: found ''"]),
    ("dpo.demo.reference_pass", {"parts": 1000}, ["dpo.demo.reference_pass.parts", "less than or equal to 128"]),
    ("corpora.demo-preferences.held_out", 0, ["eval.demo.preferences", "held_out is 0", "no held-out rows"]),
    ("sft.demo.base", {"path": "some/model"}, ["sft.demo.tokenizer", "has another vocabulary"]),
    ("sft.demo.training.seed", -1, ["sft.demo.training.seed", "greater than or equal to 0"]),
    ("tokenizers.demo", {"adopt": "../gone"}, ["tokenizers.demo.adopt", "'../gone' is not a folder"]),
    ("dpo.demo.packing.length", 4096, ["dpo.demo.packing.length", "max_positions is 2048"]),
    ("eval.demo.packing.length", 4096, ["eval.demo.packing.length", "max_positions is 2048"]),
    ("corpora.demo-chat.sources.0.files", ["a{b}.jsonl"], ["'a{b}.jsonl' contains braces"]),
    ("corpora.demo-chat.held_out", True, ["corpora.demo-chat.held_out", "found true"]),
    ("Corpora", {}, ["Corpora: unknown key", "did you mean 'corpora'"]),
    ("sft.demo.training.epochs", float("inf"), ["sft.demo.training.epochs", "finite"]),
    ("sft.demo.training.optimizer", "adamw", ["sft.demo.training.optimizer: found 'adamw'", "'adamw_torch_fused'"]),
    (
        "sft.demo.training.optimizer",
        "lomo",
        ["sft.demo.training.optimizer: 'lomo' isn't supported: it updates weights in"],
    ),
    ("sft.demo.training.optimizer", "galore_adamw", ["sft.demo.training.optimizer", "needs optim_target_modules"]),
    (
        "sft.demo.training.schedule",
        "greedy",
        ["sft.demo.training.schedule: 'greedy' isn't supported: it needs a metric"],
    ),
    ("sft.demo.training.optimizer", "greedy", ["sft.demo.training.optimizer: found 'greedy'", "'adamw_torch_fused'"]),
    ("dpo.demo.training.schedule", "cosin", ["dpo.demo.training.schedule: found 'cosin'", "'cosine'"]),
    (
        "sft.demo.training.schedule",
        "cosine_with_min_lr",
        ["training.schedule_options", "min_lr or min_lr_rate; found none"],
    ),
    ("sft.demo.training.schedule_options", {"nm_cycles": 1}, ["schedule_options", "did you mean 'num_cycles'"]),
    (
        "sft.demo.training.schedule_options",
        {"num_cycles": 0},
        ["schedule_options: num_cycles: found 0; ", "greater than 0"],
    ),
    ("sft.demo.training.schedule_options", {"num_cycles": True}, ["schedule_options: num_cycles: found True; "]),
    ("sft.demo.training.betas", [0.9, 1.0], ["sft.demo.training.betas", "less than 1"]),
    ("sft.demo.base.heads", 128, ["sft.demo.base", "is odd"]),
    ("eval.demo.conversations", ["demo-chat", "demo-chat"], ["eval.demo.conversations", "'demo-chat' is listed twice"]),
    ("eval.demo.tasks.folder", "resources/demo", ["eval.demo.tasks.folder", "task files"]),
    ("report.sort_by", "preference.demo-preferences.reward_accuracy", ["report.sort_by", "mean 'preferences'"]),
    ("report.sort_by", "preferences.demo-preferencs.reward_accuracy", ["report.sort_by", "mean 'demo-preferences'"]),
    ("report.sort_by", "preferences.demo-chat.reward_accuracy", ["'demo-chat' under `preferences:`"]),
    (
        "report.sort_by",
        "preferences.demo-preferences.reward_acuracy",
        ["no score 'reward_acuracy'", "'reward_accuracy'"],
    ),
    ("report.sort_by", "preferences.demo-preferences", ["'demo-preferences' under `preferences:`"]),
    ("eval.demo.models", ["sft:demo"], ["report.sort_by", "sorts the runs of `dpo:`"]),
    ("eval.demo.preferences", [], ["report.sort_by", "'demo-preferences' under `preferences:`; none is defined"]),
    ("eval.demo.exact_match.answer_pattern", "(a{99999999999})", ["answer_pattern", "not a regular expression"]),
    ("corpora.demo-chat.sources.0.files", ["-x.jsonl"], ["'-x.jsonl'", "write ./-x.jsonl"]),
    ("corpora.demo-chat.sources.0.files", ["x" * 300], ["sources.0.files", "too long"]),
    ("sft.demo.extends", ["demo"], ["sft.demo.extends", "['demo']"]),
    ("sft.more", {"extends": "empty"}, ["sft.more.extends", "'empty'"]),
    ("sft.demo.extends", "gone", ["sft.demo.extends", "'gone'"]),
    ("sft.demo.extends", "demo", ["sft.demo.extends", "is circular"]),
]


@pytest.mark.parametrize(("key", "value", "messages"), WRONG, ids=[f"{key}={value!r}"[:60] for key, value, _ in WRONG])
def test_a_wrong_config_is_refused_with_key_value_and_expectation(raw, key, value, messages):
    refused(put(raw, key, value), messages)


def test_reruns_on_names_stages(raw):
    with pytest.raises(SnaketuneError, match=r"reruns_on: there is no stage 'stf'; did you mean 'sft'\?"):
        JobGraph(*load(raw | {"reruns_on": {"stf": "versions"}}))


@pytest.mark.parametrize("value", ["x", 4, [512]])
def test_a_value_or_a_list_of_them_is_refused_once(raw, value):
    with pytest.raises(SnaketuneError) as error:
        load(put(raw, "sft.demo.packing.length", value))
    assert len(str(error.value).splitlines()) == 2


def test_all_errors_are_reported_together(raw):
    wrong = put(put(raw, "sft.demo.training.epochs", 0), "dpo.demo.bta", 1)
    with pytest.raises(SnaketuneError, match=r"(?s)dpo\.demo\.bta.*sft\.demo\.training\.epochs"):
        load(wrong)


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
