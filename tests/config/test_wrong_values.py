"""Wrong configs are refused before anything runs, with key, value and what was expected."""

import json
import re
from datetime import date

import pytest

from snaketune.config.foreign_names import FOREIGN_NAMES
from snaketune.config.load import load
from snaketune.config.training_runs import Dpo
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph

from .edits import put, refused

WRONG = [
    ("sft.demo.training.learning_rte", 1, ["sft.demo.training.learning_rte", "did you mean 'learning_rate'"]),
    ("corpora.demo-chat.held_ou", 0.1, ["corpora.demo-chat.held_ou", "did you mean 'held_out'"]),
    ("dpo.demo.form", "demo", ["dpo.demo.form", "did you mean 'from'"]),
    ("sfd", {}, ["sfd", "did you mean 'sft'"]),
    ("sft.demo.base.hidden_sise", 64, ["sft.demo.base.hidden_sise", "did you mean 'hidden_size'"]),
    ("corpora.demo-chat.sources.0.files", "a.jsonl", ["sources.0.files: found 'a.jsonl'; expected a list: [a.jsonl]"]),
    ("corpora.demo-chat.sources", {"files": ["a"]}, ["expected a list: each item after a `-`"]),
    ("sft.demo.base", "Qwen/Qwen2.5-0.5B", ["sft.demo.base: found 'Qwen/Qwen2.5-0.5B'", "keys such as path, revision"]),
    ("sft.demo.lora", 16, ["sft.demo.lora: found 16; expected a section with keys such as rank, alpha"]),
    ("sft.demo.lora", {"target_modules": []}, ["found []; expected a text or a list of at least 1"]),
    ("sft.demo.training.micro_batch_rows", "auto ", ["found 'auto '; expected 'auto' or a whole number"]),
    ("sft.demo.training.evaluate", {"every": "often"}, ["evaluate.every: found 'often'; expected 'auto' or a number"]),
    ("sft", [], ["sft: found []; expected a section of entries, each under a name"]),
    ("sft.a b", {}, ["found 'a b'; expected a name of letters, digits"]),
    ("eval.demo.models", "sft:demo", ["eval.demo.models: found 'sft:demo'; expected a list: [sft:demo]"]),
    ("eval.demo.models", ["demo"], ["expected a model: base:NAME, sft:NAME, dpo:NAME, merge:NAME or reward:NAME"]),
    ("push", {"x": {"model": "sft:demo", "repository": "me"}}, ["expected a repository of the Hub: owner/name"]),
    ("sft.demo.learning_rate", 1e-3, ["sft.demo.learning_rate", "did you mean 'training.learning_rate'?"]),
    ("sft.demo.lr", 1e-3, ["sft.demo.lr", "here it is training.learning_rate"]),
    ("sft.demo.training.num_train_epochs", 3, ["num_train_epochs: unknown key; here it is training.epochs"]),
    ("sft.demo.lora", {"r": 8}, ["sft.demo.lora.r: unknown key; here it is lora.rank"]),
    ("sft.demo.lora", {"lora_alpha": 8}, ["here it is lora.alpha"]),
    ("sft.demo.training.per_device_train_batch_size", 8, ["here it is training.batch_rows", "micro_batch_rows"]),
    ("sft.demo.packing.max_length", 8, ["here it is packing.length"]),
    ("grpo", {"demo": {}}, ["grpo: unknown key", "dpo.NAME.loss", "isn't supported"]),
    ("sft.demo.training.epochs", "many", ["sft.demo.training.epochs", "'many'", "number"]),
    ("sft.demo.training.epochs", -1, ["sft.demo.training.epochs", "-1", "a number above 0"]),
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
    ("sft.demo.packing.length", "x", ["sft.demo.packing.length: found 'x'; expected a whole number"]),
    ("sft.demo.packing.length", [512], ["sft.demo.packing.length: found [512]; expected a list of at least 2"]),
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
    ("corpora.demo-chat.parts", 1000, ["corpora.demo-chat.parts", "1000", "at most 512"]),
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
    ("corpora.demo-chat.sources.0.weight", 0, ["sources.0.weight", "a number above 0"]),
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
    ("dpo.demo.ld_alpha", 1.5, ["dpo.demo.ld_alpha", "at most 1"]),
    ("dpo.demo.stop_if", {"window": 5}, ["dpo.demo.stop_if: expected margin_below, chosen_reward_below or kl_above"]),
    ("dpo.demo.stop_if", {"kl_abov": 5}, ["stop_if.kl_abov", "did you mean 'kl_above'"]),
    ("dpo.demo.label_smoothing", 0.7, ["dpo.demo.label_smoothing", "0.7", "a number below 0.5"]),
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
    ("eval.demo.generation", {"temperature": -1}, ["eval.demo.generation.temperature", "at least 0"]),
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
    ("corpora.demo-chat.sources.0.fields", {"prompt": "q"}, ["sources.0.fields", "map one of: prompt, response"]),
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
    ("dpo.demo.reference_pass", {"parts": 1000}, ["dpo.demo.reference_pass.parts", "at most 128"]),
    ("corpora.demo-preferences.held_out", 0, ["eval.demo.preferences", "held_out is 0", "no held-out rows"]),
    ("sft.demo.base", {"path": "some/model"}, ["sft.demo.tokenizer", "has another vocabulary"]),
    ("sft.demo.training.seed", -1, ["sft.demo.training.seed", "at least 0"]),
    ("tokenizers.demo", {"adopt": "../gone"}, ["tokenizers.demo.adopt", "'../gone' is not a folder"]),
    ("dpo.demo.packing.length", 4096, ["dpo.demo.packing.length", "max_positions is 2048"]),
    ("eval.demo.packing.length", 4096, ["eval.demo.packing.length", "max_positions is 2048"]),
    ("corpora.demo-chat.sources.0.files", ["a{b}.jsonl"], ["'a{b}.jsonl' contains braces"]),
    ("corpora.demo-chat.held_out", True, ["corpora.demo-chat.held_out", "found true"]),
    ("Corpora", {}, ["Corpora: unknown key", "did you mean 'corpora'"]),
    ("sft.demo.training.epochs", float("inf"), ["sft.demo.training.epochs", "expected a finite number"]),
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
    ("sft.demo.training.betas", [0.9, 1.0], ["sft.demo.training.betas", "a number below 1"]),
    ("sft.demo.base.heads", 128, ["sft.demo.base", "is odd"]),
    ("eval.demo.conversations", ["demo-chat", "demo-chat"], ["eval.demo.conversations", "'demo-chat' is listed twice"]),
    ("eval.demo.tasks.folder", "resources/demo", ["eval.demo.tasks.folder", "task files"]),
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


def test_template_variables_are_json_and_need_packed_rows(raw):
    (source,) = raw["corpora"]["demo-chat"]["sources"]
    dated = {"kind": "conversations", "sources": [source | {"template_variables": {"day": date(2026, 1, 31)}}]}
    refused(put(raw, "corpora.x", dated), ["corpora.x.sources", "template_variables"])
    for stated in ({"template_variables": {"day": "today"}}, {"fields": {"template_variables": "v"}}):
        raw["corpora"]["demo-chat"]["sources"] = [source | stated]
        load(raw)
        refused(put(raw, "sft.demo.packing.strategy", "none"), ["sft.demo.packing.strategy", "its template_variables"])


def test_keys_that_stand_for_those_of_other_libraries_exist():
    for target in FOREIGN_NAMES.values():
        for section, key in re.findall(r"\b(training|operation|packing|lora|base|quantization)\.(\w+)", target):
            assert f'"{key}":' in json.dumps(Workflow.model_json_schema()), (section, key)
        for key in re.findall(r"\bdpo\.NAME\.(\w+)", target):
            assert key in Dpo.model_fields


def test_names_of_entries_that_look_like_names_of_models_are_shown(raw):
    """As those in README, in capitals."""
    raw["sft"] |= {"TUNED": raw["sft"]["demo"] | {"packing": {"length": "x"}}}
    refused(raw, ["  sft.TUNED.packing.length: found 'x'; expected a whole number"])
