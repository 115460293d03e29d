"""Prompts that are held out of one corpus and trained on in another, whatever the two hold."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from snaketune.artifacts.manifest import Artifact
from snaketune.config.load import load
from snaketune.diagnostics.leaks import check_leaks
from snaketune.stages.findings import Finding
from snaketune.stages.graph import JobGraph
from snaketune.stages.specs import PreflightEvaluation
from tests.config.edits import put
from tests.packing import chain

ROOT = Path(__file__).parents[2]


def turns(prompt: str, system: str | None = None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def conversation(*prompt: str | None) -> dict[str, Any]:
    return identified({"messages": [*turns(*prompt), *said("Yes."), *turns("Sure?"), *said("Sure.")]})


def pair(*prompt: str | None) -> dict[str, Any]:
    return identified({"prompt": turns(*prompt), "chosen": said("Yes."), "rejected": said("No.")})


def completion(*prompt: str | None) -> dict[str, Any]:
    return identified({"prompt": turns(*prompt), "completion": said("Yes."), "label": True})


def document(text: str) -> dict[str, Any]:
    return identified({"messages": [{"role": "text", "content": text}]})


def identified(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": hashlib.sha256(repr(row).encode()).hexdigest()[:16], **row}


KINDS = {"conversations": "sft", "text": "sft", "preferences": "preference", "unpaired": "unpaired"}


def corpus(
    folder: Path, kind: str, train: list[dict], held_out: list[dict], share: float = 0.1, **spec: Any
) -> Artifact:
    made = chain.corpus(folder, KINDS[kind], train + held_out, held_out=len(held_out), batch_rows=3)
    spec_content = {
        "kind": kind,
        "split_seed": 0,
        "held_out": share,
        "decontamination": None,
        "near_duplicates": None,
    } | spec
    # The path in results: corpus/NAME/rows.
    return Artifact(made.manifest_path, made.manifest | {"spec": spec_content}, made.folder)


def found_in(
    corpora: list[Artifact], evaluated: list[Artifact], trained_on: tuple[str, ...] = ("pairs",)
) -> list[Finding]:
    of = PreflightEvaluation(key="eval.demo", corpora=("chat",), trained_on=trained_on, exact_match=())
    by_name = [{one.folder.parent.name: one for one in some} for some in (corpora, evaluated)]
    return list(check_leaks([of], *by_name))


PROMPTS = [f"What is {number} plus {number}?" for number in range(12)]


@pytest.mark.parametrize(("kind", "row"), [("preferences", pair), ("unpaired", completion)])
def test_prompts_trained_on_as_another_kind_of_row_stop_the_run(tmp_path, kind, row):
    chat = corpus(tmp_path / "chat", "conversations", [conversation("Hi")], [*map(conversation, PROMPTS)])
    pairs = corpus(tmp_path / "pairs", kind, [*map(row, PROMPTS[:11])], [row("Hello")], split_seed=1)
    (result,) = found_in([chat, pairs], [chat])
    assert result.certain and result.key == "corpora.pairs.decontamination"
    assert "11 of the 12 held-out prompts of chat are trained on in pairs" in result.problem
    assert "the same split_seed and held_out (chat has 0 and 0.1, pairs 1 and 0.1)" in result.do


def test_up_to_half_of_them_is_a_warning(tmp_path):
    chat = corpus(tmp_path / "chat", "conversations", [], [*map(conversation, PROMPTS)])
    pairs = corpus(tmp_path / "pairs", "preferences", [*map(pair, PROMPTS[:6])], [])
    (result,) = found_in([pairs], [chat])
    assert not result.certain and "6 of the 12 held-out prompts" in result.problem
    # Their splits agree already, so that another one is no help.
    assert result.do == "set it ({}), or remove them from the files"


@pytest.mark.parametrize(
    ("held_out", "trained", "same"),
    [
        (("What is  3 plus 4?",), ("what is 3 plus 4",), True),
        (("“It's new,” he said…",), ("It’s new, he said.",), True),
        (("你好，世界。",), ("你好 世界",), True),
        (("3 + 4",), ("3 - 4",), False),
        (("1.5",), ("15",), False),
        (("f(x)",), ("f[x]",), False),
        # Another system text makes another prompt.
        (("Cats", "To French."), ("Cats", "to  french"), True),
        (("Cats", "To French."), ("Cats", "To German."), False),
        # Nothing but symbols that aren't compared is no prompt like any other.
        (("?",), ("!",), False),
    ],
)
def test_prompts_are_compared_but_for_case_spacing_and_punctuation(tmp_path, held_out, trained, same):
    chat = corpus(tmp_path / "chat", "conversations", [], [conversation(*held_out), conversation("Dogs")])
    pairs = corpus(tmp_path / "pairs", "preferences", [pair("Birds"), pair(*trained)], [])
    assert bool(found_in([pairs], [chat])) == same


@pytest.mark.parametrize("bare", ["chat", "pairs"])
def test_where_one_corpus_has_no_system_texts_user_turns_alone_are_compared(tmp_path, bare):
    held_out = [conversation(prompt, None if bare == "chat" else f"Be {prompt}") for prompt in PROMPTS]
    trained = [pair(prompt, None if bare == "pairs" else "Be brief.") for prompt in PROMPTS[1:]]
    chat, pairs = (
        corpus(tmp_path / "chat", "conversations", [], held_out),
        corpus(tmp_path / "pairs", "preferences", trained, []),
    )
    (result,) = found_in([pairs], [chat])
    assert "11 of the 12" in result.problem


def test_what_no_evaluated_model_is_trained_on_is_no_matter(tmp_path):
    chat = corpus(tmp_path / "chat", "conversations", [conversation("Hi")], [*map(conversation, PROMPTS)])
    pairs = corpus(tmp_path / "pairs", "preferences", [*map(pair, PROMPTS)], [])
    assert not found_in([chat, pairs], [chat], trained_on=("chat",))


def test_documents_are_known_by_their_ids(tmp_path):
    texts = [f"A text, number {number}." for number in range(4)]
    chat = corpus(tmp_path / "chat", "text", [], [*map(document, texts)])
    pairs = corpus(tmp_path / "pairs", "text", [*map(document, texts[:3])], [])
    (result,) = found_in([pairs], [chat])
    assert "3 of the 4 held-out documents of chat are trained on in pairs" in result.problem
    requested = corpus(tmp_path / "asked/pairs", "preferences", [pair(text) for text in texts], [])
    assert not found_in([requested], [chat])


def test_the_ways_out_are_those_that_help(tmp_path):
    chat = corpus(tmp_path / "chat", "conversations", [], [conversation("Cats")], share=1)
    pairs = corpus(tmp_path / "pairs", "preferences", [pair("Cats")], [], decontamination={"ngram": 13})
    (result,) = found_in([pairs], [chat])
    assert result.do == "remove them from the files"
    moved = corpus(tmp_path / "moved/pairs", "preferences", [pair("Cats")], [], near_duplicates={"threshold": 0.8})
    chat = corpus(tmp_path / "other/chat", "conversations", [], [conversation("Cats")])
    (result,) = found_in([moved], [chat])
    assert "remove near_duplicates from both" in result.do


def test_an_evaluation_is_held_against_what_its_own_models_learned_from(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    further = {**config["sft"]["demo"], "use_base": "sft:demo", "corpus": "more"}
    further.pop("base")
    config["corpora"]["more"] = config["corpora"]["demo-chat"]
    config["sft"]["further"] = further
    requested = {
        "base": {"models": ["base:demo"], "conversations": ["demo-chat"]},
        "before": {"models": ["base:further"], "conversations": ["more"]},
        "after": {"models": ["sft:further"], "conversations": ["demo-chat"]},
        "all": {"models": ["dpo:sweep"], "conversations": ["demo-chat"], "preferences": ["demo-preferences"]},
    }
    spec = JobGraph(*load(put(config, "eval", requested))).job("preflight", "demo").spec
    assert {one.key: (one.corpora, one.trained_on) for one in spec.evaluations} == {
        "eval.base": (("demo-chat",), ()),
        "eval.before": (("more",), ("demo-chat",)),
        "eval.after": (("demo-chat",), ("demo-chat", "more")),
        "eval.all": (("demo-chat", "demo-preferences"), ("demo-chat", "demo-preferences")),
    }
