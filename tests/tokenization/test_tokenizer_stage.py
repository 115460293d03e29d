"""The stage: trained tokenizers are checked and deterministic, adopted ones get a pad token, bad templates are refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from small_tokenizers import (
    CHATML,
    MISTRAL,
    PHI3,
    TEXTS,
    byte_level,
    conversations,
    corpus_artifact,
    messages,
    metaspace,
    save_tokenizer,
    special,
    train_in,
)
from tokenizers import Tokenizer

from snaketune.artifacts.manifest import describe_files
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.code_digest import Modules
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.creation.train import EDGE_CASES, Texts, compare, convert, train
from snaketune.tokenization.vocabulary import build

MODELS = ("bpe", "unigram")
FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def adopt(tmp_path: Path, folder: Path | str, template: Path | None = None):
    work = WorkFolder(tmp_path / "adopted")
    work.start()
    templates = [template] if template else []
    return work, build(TokenizerSpec(adopt=str(folder)), work, corpora=[], chat_template=templates, base=[])


@pytest.mark.parametrize("model", MODELS)
def test_payload_and_manifest(trained, model):
    work, outcome = trained[model]
    assert {path.name for path in work.payload.iterdir()} == FILES | {"sentencepiece.model"}
    chat = ChatTokenizer.load(work.payload)
    assert outcome.about["vocab_size"] == chat.vocab_size == 400
    assert chat.pad_id != chat.eos_id and chat.eos_id in outcome.about["stop_ids"]
    assert outcome.about["parity"]["texts"] == 2 * len(conversations()) + len(conversations()[::3]) + len(EDGE_CASES)
    assert 1 <= len(outcome.about["samples"]) <= 3
    assert all(turn.endswith("<|im_end|>") for sample in outcome.about["samples"] for turn in sample["supervised_text"])
    assert outcome.counts["reserved_characters_left_out"] == sum(
        text.count("▁") for pair in conversations() for m in pair for text in [m["content"]]
    )


@pytest.mark.parametrize("model", MODELS)
def test_ids_equal_sentencepiece(trained, model):
    folder = trained[model][0].payload
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.encode_special_tokens = True
    for text in [*TEXTS, *EDGE_CASES]:
        if "▁" not in text:
            assert fast.encode(text).ids == processor.encode(text), text


@pytest.mark.parametrize("model", MODELS)
def test_control_tokens_and_newline_are_tokens_of_their_own(trained, model):
    fast = Tokenizer.from_file(str(trained[model][0].payload / "tokenizer.json"))
    assert [fast.id_to_token(id) for id in range(4)] == ["<unk>", "<|pad|>", "<|im_end|>", "<|im_start|>"]
    assert fast.token_to_id("\n") is not None
    # The role line takes few tokens, because role names are in the training texts.
    assert len(fast.encode("<|im_start|>assistant\n").ids) <= 4


@pytest.mark.parametrize("model", MODELS)
def test_same_corpus_same_bytes_in_another_process(trained, tmp_path, model):
    """With another hash seed, so that the files depend on no order of a set."""
    work, _ = trained[model]
    corpus = corpus_artifact(tmp_path / "corpus", {"messages": conversations()})
    script = f"""
import sys
from pathlib import Path
from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tokenization.vocabulary import build
rows = Path({str(corpus.folder)!r})
work = WorkFolder(Path({str(tmp_path / "again")!r}))
work.start()
build(
    TokenizerSpec(model={model!r}, vocab_size=400, character_coverage=0.9995, split_digits=True),
    work,
    corpora=[Artifact(rows, {{"payload": describe_files(rows), "records": {{}}}}, rows)],
    chat_template=[Path({str(CHATML)!r})],
    base=[],
)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert describe_files(WorkFolder(tmp_path / "again").payload) == describe_files(work.payload)


def test_preferences_are_training_texts_too(tmp_path):
    rows = {
        "prompt": [messages(text) for text in TEXTS],
        "chosen": [[{"role": "assistant", "content": text[::-1]}] for text in TEXTS],
        "rejected": [[{"role": "assistant", "content": "ŵ" + text}] for text in TEXTS],
    }
    work, outcome = train_in(tmp_path, "bpe", corpora=[corpus_artifact(tmp_path / "corpus", rows)])
    assert Tokenizer.from_file(str(work.payload / "tokenizer.json")).token_to_id("ŵ") is not None
    assert outcome.about["parity"]["texts"] == 3 * len(TEXTS) + len(EDGE_CASES)


@pytest.mark.parametrize("model", MODELS)
def test_the_error_for_too_large_a_vocabulary_names_the_largest_that_works(tmp_path, model):
    corpus = corpus_artifact(tmp_path / "corpus", {"messages": conversations()})
    with pytest.raises(SnaketuneError, match=r"vocab_size: 20000 .*the largest that works is \d+") as error:
        train_in(tmp_path / "big", model, vocab_size=20000, corpora=[corpus])
    largest = int(str(error.value).rsplit(" ", 1)[-1])
    assert train_in(tmp_path / "fits", model, vocab_size=largest, corpora=[corpus])[1].about["vocab_size"] == largest


def test_too_small_a_vocabulary_or_no_text_is_refused(tmp_path):
    corpus = corpus_artifact(tmp_path / "corpus", {"messages": conversations()})
    with pytest.raises(SnaketuneError, match=r"the smallest that works is \d+"):
        train_in(tmp_path / "small", "bpe", vocab_size=270, corpora=[corpus])
    with pytest.raises(SnaketuneError, match="no text to learn from"):
        train(Texts([]), TokenizerSpec(model="bpe", vocab_size=400, character_coverage=0.9995, split_digits=True))


def test_long_texts_are_not_skipped(tmp_path):
    """sentencepiece's own limit is 4,192 bytes, beyond which it skips a text."""
    long = " ".join(TEXTS) + " ŵŵŵŵŵŵŵŵ"
    spec = TokenizerSpec(model="bpe", vocab_size=400, character_coverage=1.0, split_digits=True)
    assert convert(train(Texts([long]), spec)).token_to_id("ŵ") is not None


def test_a_difference_from_sentencepiece_is_an_error(trained):
    model = (trained["bpe"][0].payload / "sentencepiece.model").read_bytes()
    description = json.loads(convert(model).to_str())
    description["model"]["merges"].reverse()
    with pytest.raises(SnaketuneError, match=r"disagree on .*expected"):
        compare(Tokenizer.from_str(json.dumps(description)), model, TEXTS)


def test_auto_tokenizer_loads_the_payload(trained):
    from transformers import AutoTokenizer

    folder = trained["bpe"][0].payload
    theirs, ours = AutoTokenizer.from_pretrained(folder), ChatTokenizer.load(folder)
    conversation = conversations()[0]
    assert theirs.apply_chat_template(conversation)["input_ids"] == ours.encode([conversation])[0].ids.tolist()
    assert theirs.bos_token is None and theirs.pad_token_id == ours.pad_id and theirs.eos_token_id == ours.eos_id
    assert len(theirs) == ours.vocab_size
    for text in EDGE_CASES:
        assert theirs.decode(theirs.encode(text, split_special_tokens=True)) == text


def test_an_adopted_tokenizer_without_pad_token_pads_with_unk(tmp_path):
    work, outcome = adopt(tmp_path, metaspace(tmp_path / "base"))
    assert outcome.about["adopted"] == {"chat_template": "the model's own", "pad_token": "<unk>"}
    assert outcome.about["pad_id"] not in outcome.about["stop_ids"]
    assert {path.name for path in work.payload.iterdir()} >= FILES


def test_an_adopted_tokenizer_with_eos_as_pad_and_no_unk_gets_a_pad_token(tmp_path):
    base = byte_level(tmp_path / "base")
    size = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab_size()
    _, outcome = adopt(tmp_path, base)
    assert outcome.about["adopted"]["pad_token"] == "<|pad|>"
    assert outcome.about["pad_id"] == size and outcome.about["vocab_size"] == size + 1
    assert len(outcome.about["stop_ids"]) == 2


def test_adopted_ids_are_the_base_models(tmp_path):
    from transformers import AutoTokenizer

    base = metaspace(tmp_path / "base")
    work, _ = adopt(tmp_path, base)
    theirs = AutoTokenizer.from_pretrained(base)
    for conversation in conversations()[:20]:
        conversation = [message for message in conversation if message["role"] != "system"]
        ours = ChatTokenizer.load(work.payload).encode([conversation])[0]
        assert ours.ids.tolist() == theirs.apply_chat_template(conversation)["input_ids"]


def test_a_template_without_markers_is_supervised_by_roles(tmp_path, capsys):
    """Phi-3's own template, which marks nothing, gives the same result as its marked copy."""
    plain = tmp_path / "plain.jinja"
    plain.write_text(PHI3.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    base = byte_level(tmp_path / "base", template=plain)
    work, outcome = adopt(tmp_path / "own", base)
    assert "found by roles" in capsys.readouterr().out
    assert outcome.about["spans"] == "roles" and outcome.about["adopted"]["chat_template"] == "the model's own"
    given, marked = adopt(tmp_path / "given", base, PHI3)
    assert marked.about["spans"] == "markers" and marked.about["samples"] == outcome.about["samples"]
    edge_cases = [messages(" a ", "  sat<|end|> "), messages("x", ""), messages("x", "\n", "", "<|user|>", system="\t")]
    by_roles, by_markers = (
        ChatTokenizer.load(some.payload).encode(conversations() + edge_cases) for some in (work, given)
    )
    for own, expected in zip(by_roles, by_markers, strict=True):
        assert own.ids.tolist() == expected.ids.tolist() and own.spans == expected.spans


def test_templates_without_markers_that_change_contents_are_refused(tmp_path):
    plain = PHI3.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    shouting, endless, twice = (tmp_path / f"{name}.jinja" for name in ("shouting", "endless", "twice"))
    shouting.write_text(plain.replace("message['content'] +", "message['content'] | upper +"))
    endless.write_text(plain.replace("'<|end|>'", "'\n'"))
    twice.write_text(plain.replace("message['content'] +", "message['content'] + message['content'] +"))
    base = byte_level(tmp_path / "base")
    with pytest.raises(SnaketuneError, match=r"changes what assistants say: only .* of 'Zebra flock\.'"):
        adopt(tmp_path / "1", base, shouting)
    with pytest.raises(SnaketuneError, match="no special token of this tokenizer follows what an assistant says"):
        adopt(tmp_path / "2", base, endless)
    with pytest.raises(SnaketuneError, match="changes what assistants say, or doesn't write it once"):
        adopt(tmp_path / "3", base, twice)


def test_a_tokenizer_without_a_template_is_for_documents_only_and_shipped_templates_are_named(tmp_path, capsys):
    bare = metaspace(tmp_path / "base")
    (bare / "chat_template.jinja").unlink()
    work, outcome = adopt(tmp_path / "1", bare)
    assert re.search(r"no chat template.*chatml\.jinja.*mistral\.jinja", capsys.readouterr().out)
    assert outcome.about["adopted"]["chat_template"] == outcome.about["spans"] == "none"
    chat = ChatTokenizer.load(work.payload)
    assert chat.stop_ids == (chat.eos_id,)
    assert chat.text(chat.for_documents().encode([[{"role": "text", "content": "the cat"}]])[0].ids).endswith("cat</s>")
    with pytest.raises(SnaketuneError, match=r"no chat template.*chat_template"):
        chat.encode([messages("a", "b")])
    assert adopt(tmp_path / "2", bare, template=MISTRAL)[1].about["adopted"]["chat_template"] == "given"


MISTAKES = {
    "writes today's date": "{{- strftime_now('%d %B') -}}" + PHI3.read_text(),
    "the end of turn isn't supervised": PHI3.read_text().replace(
        "+ '<|end|>' -}}\n        {%- endg", "-}}\n        {%- endg"
    ),
    "no special token": PHI3.read_text().replace("<|end|>", "<|over|>"),
    "the user's words": "{%- generation -%}"
    + PHI3.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    + "{{- '<|end|>' -}}{%- endgeneration -%}",
    "marks 0 generated blocks": PHI3.read_text().replace("== 'assistant'", "== 'model'"),
    "doesn't mark all that assistants say": PHI3.read_text().replace(
        "{%- generation -%}\n            {{- message['content'] +", "{{- message['content'] -}}{%- generation -%}{{-"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_template_mistakes_are_refused(tmp_path, mistake):
    template = tmp_path / "mistake.jinja"
    template.write_text(MISTAKES[mistake])
    with pytest.raises(SnaketuneError, match=mistake):
        adopt(tmp_path, byte_level(tmp_path / "base"), template)


def test_slow_missing_and_endless_tokenizers_are_refused(tmp_path):
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(SnaketuneError, match=r"only a slow tokenizer \(ByT5Tokenizer\)"):
        adopt(tmp_path, slow, CHATML)
    with pytest.raises(SnaketuneError, match="can't be loaded as a tokenizer"):
        adopt(tmp_path, tmp_path / "nowhere", CHATML)
    endless = Tokenizer.from_file(str(byte_level(tmp_path / "base") / "tokenizer.json"))
    endless.add_special_tokens(special("<|im_start|>", "<|im_end|>"))
    with pytest.raises(SnaketuneError, match="no eos token"):
        adopt(tmp_path, save_tokenizer(tmp_path / "endless", endless), CHATML)


def test_code_digest_covers_the_tokenization_package():
    assert "snaketune.tokenization.control" in Modules().shaping("snaketune.tokenization.tokenizer")
