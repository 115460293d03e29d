"""Validation of `push:`, `gguf:` and the keys for model cards."""

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph

from .edits import put, refused

PUSH = {"model": "dpo:demo", "repository": "owner/name"}


def test_a_push_is_private_and_to_main_by_default(raw):
    push = load(put(raw, "push", {"demo": PUSH}))[0].push["demo"]
    assert (push.private, push.branch) == (True, "main")


@pytest.mark.parametrize(
    ("push", "messages"),
    [
        ({"model": "dpo:dmo"}, ["push.demo.model: there is no 'dmo' under `dpo:`; did you mean 'demo'?"]),
        (
            {"model": "dpo:sweep"},
            ["push.demo.model: there is no 'sweep' under `dpo:`", "a grid or rounds; name one", "sweep-lossipo-"],
        ),
        ({"model": "base:demo"}, ["push.demo.model: found 'base:demo'"]),
        ({"repository": "name"}, ["push.demo.repository: found 'name'"]),
        ({"repository": "../x/y"}, ["push.demo.repository"]),
        ({"repository": "owner/--x"}, ["push.demo.repository"]),
        ({"branch": "../x"}, ["push.demo.branch"]),
        ({"private": "maybe"}, ["push.demo.private"]),
        ({"token": "x"}, ["push.demo.token: unknown key"]),
    ],
)  # fmt: skip
def test_an_invalid_push_is_refused(raw, push, messages):
    refused(put(raw, "push", {"demo": PUSH | push}), messages)


def test_two_models_for_one_branch_are_refused(raw):
    both = {"one": PUSH, "other": {"model": "sft:demo", "repository": "Owner/Name"}}
    refused(put(raw, "push", both), ["push.other.repository: push.one already pushes to branch 'main' of Owner/Name"])
    both["other"]["branch"] = "sft"
    load(put(raw, "push", both))


def with_adapters(raw: dict, **lora) -> dict:
    raw = put(raw, "sft.demo.base", {"path": "Qwen/Qwen2.5-0.5B"})
    raw = put(raw, "tokenizers.demo", {"adopt": "Qwen/Qwen2.5-0.5B"})
    return put(put(raw, "sft.demo.lora", {"rank": 4} | lora), "dpo.demo.lora", "continued")


@pytest.mark.parametrize("model", ["sft:demo", "dpo:demo"])
def test_an_adapter_alone_is_no_gguf_file_and_can_be_pushed(raw, model):
    alone = put(with_adapters(raw, merge=False), "push", {"demo": PUSH | {"model": model}})
    load(alone)
    refused(
        put(alone, "gguf", {"demo": {"model": model}}),
        [f"gguf.demo.model: {model} is an adapter alone", "lora.merge: true"],
    )
    load(put(with_adapters(raw), "gguf", {"demo": {"model": model}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("corpora.demo-chat.license", "mit\nlicense: other"),
        ("corpora.demo-chat.license", ""),
        ("corpora.demo-chat.description", "x" * 2001),
        ("sft.demo.license", "Apache License 2.0"),
        ("sft.demo.license", "mit\n"),
    ],
)
def test_licenses_and_descriptions_are_validated(raw, key, value):
    refused(put(raw, key, value), [f"{key}: found "])


def licenses(config: dict) -> dict[str, str | None]:
    plan = JobGraph(*load(config))
    return {job.spec.model: job.spec.license for job in plan.stage("card")}


def test_a_run_inherits_the_license_of_the_run_it_starts_from(raw):
    raw["sft"]["next"] = raw["sft"]["demo"] | {"use_base": "sft:demo"}
    del raw["sft"]["next"]["base"]
    raw["dpo"]["next"] = raw["dpo"]["demo"] | {"from": "next"}
    assert set(licenses(raw).values()) == {None}
    assert set(licenses(put(raw, "sft.demo.license", "mit")).values()) == {"mit"}
    both = licenses(put(put(raw, "sft.demo.license", "mit"), "sft.next.license", "other"))
    assert both == {name: "other" if "next" in name else "mit" for name in both}


def test_a_card_describes_only_the_models_own_chain(raw):
    plan = JobGraph(*load(raw))
    cards = {
        job.name: [f"{one.stage}/{one.name.split('-demo-512')[0]}" for one in job.spec.jobs]
        for job in plan.stage("card")
    }
    assert set(cards) == {"sft-demo", "dpo-demo", "dpo-sweep-lossipo-beta1.0"}
    assert cards["dpo-demo"] == [
        "dpo/demo", "sft/demo", "pack/demo-preferences", "pack/demo-chat", "eval/demo/dpo-demo",
        "corpus/demo-chat", "corpus/demo-preferences",
    ]  # fmt: skip
