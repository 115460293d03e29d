"""Tokens that are new to a base, and whether the run trains their rows."""

import json
import re
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import EarlierTraining
from snaketune.tokenization.chat import ChatTokenizer

from .conftest import Family, tiny_model


def base_without(family: Family, token: str, how: str, tied: bool) -> Path:
    """Return the folder of a base that wasn't trained on a token of the run's tokenizer: its embedding ends before the token,
    or its own tokenizer has no token for that row, or one of another name."""
    description = json.loads((family.tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8"))
    id = ChatTokenizer.load(family.tokenizer.folder).control.ids[token]
    rows = id if how == "no row" else 400
    folder = tiny_model(
        family.folder,
        vocab_size=rows,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    if how != "no row":
        own = {"no token": [], "another name": [{"id": id, "content": "<|reserved_0|>"}]}[how]
        added = [one for one in description["added_tokens"] if one["id"] != id]
        description["added_tokens"] = [
            *added,
            *(described | description["added_tokens"][0] | described for described in own),
        ]
        description["model"]["vocab"].pop(token, None)
        (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


HEADS = ("embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("token", "how", "settings", "tied", "severity", "entry"),
    [
        ("<|im_end|>", "no token", {"lora": Lora()}, False, "stops", "lora.modules_to_save: [embed_tokens, lm_head]"),
        ("<|im_end|>", "another name", {"lora": Lora()}, False, "stops", "lora.modules_to_save: [embed_tokens, lm_head]"),
        ("<|im_end|>", "no row", {"lora": Lora()}, False, "stops", "lora.modules_to_save: [embed_tokens, lm_head]"),
        ("<|im_end|>", "no token", {"lora": Lora()}, True, "stops", "lora.modules_to_save: [embed_tokens]"),
        (
            "<|im_end|>", "no token", {"lora": Lora(modules_to_save=("norm",))}, True, "stops",
            "lora.modules_to_save: [norm, embed_tokens]",
        ),
        ("<|im_end|>", "no token", {"lora": Lora(modules_to_save=("lm_head",))}, False, "warns", "[lm_head, embed_tokens]"),
        ("<|im_start|>", "no token", {"lora": Lora()}, False, "warns", "lora.modules_to_save: [embed_tokens, lm_head]"),
        ("<|im_end|>", "no token", {"trainable": r".*layers.*"}, False, "stops", "match embed_tokens and lm_head too"),
        ("<|im_end|>", "no token", {"lora": Lora(modules_to_save=HEADS)}, False, None, None),
        ("<|im_end|>", "no token", {"lora": Lora(modules_to_save=HEADS[:1])}, True, None, None),
        ("<|im_end|>", "no token", {}, False, None, None),
    ],
)  # fmt: skip
def test_new_tokens_whose_rows_are_not_trained(family, token, how, settings, tied, severity, entry):
    family.base = Pretrained(path=str(base_without(family, token, how, tied)))
    family.run |= {"learning_rate": 1e-5} | {k: v for k, v in settings.items() if k == "trainable"}
    family.settings |= {k: v for k, v in settings.items() if k == "lora"}
    key = r"sft\.demo\." + (r"training\.trainable" if "trainable" in settings else r"lora\.modules_to_save")
    if severity == "stops":
        with pytest.raises(SnaketuneError, match=rf"{key}: .*'{re.escape(token)}'.*random.*{re.escape(entry)}"):
            family.findings()
        return
    found = [one for one in family.findings() if "random" in one["found"]]
    assert [one["severity"] for one in found] == ([severity] if severity else [])
    assert all(entry in one["do"] and repr(token) in one["found"] for one in found)


def test_new_ends_of_turns_of_raw_rows_stop_a_run_too(family):
    family.base = Pretrained(path=str(base_without(family, "<|im_end|>", "no token", False)))
    family.run["learning_rate"] = 1e-5
    family.settings |= {"lora": Lora()}
    raw = family.pack.manifest | {"format_version": "2.0"}
    family.pack = Artifact(family.pack.manifest_path, raw, family.pack.folder)
    with pytest.raises(SnaketuneError, match=r"'<\|im_end\|>'.*lora\.modules_to_save: \[embed"):
        family.findings()


def test_tokens_that_an_earlier_training_has_learned_are_not_new(family):
    family.base = Pretrained(path=str(base_without(family, "<|im_end|>", "no token", False)))
    family.run["learning_rate"] = 1e-5
    family.settings |= {"lora": Lora(), "earlier": (EarlierTraining(lora=None, trainable=None, pack=0),)}
    assert family.findings() == []
    family.settings["earlier"] = (EarlierTraining(lora=Lora(), trainable=None, pack=0),)
    with pytest.raises(SnaketuneError, match=r"lora\.modules_to_save: \[embed"):
        family.findings()
