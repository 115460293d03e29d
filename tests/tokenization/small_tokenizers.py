"""Small tokenizers of the kinds that models have: trained, byte-level, sentencepiece-like in three ways, and unigram."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TokenizerSpec
from snaketune.tables import write_table
from snaketune.tokenization.batched.separable import PATTERNS
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.vocabulary import build

TEMPLATES = Path(__file__).parents[2] / "resources" / "chat_templates"
CHATML, MISTRAL, PHI3 = (TEMPLATES / f"{name}.jinja" for name in ("chatml", "mistral", "phi3"))

SYLLABLES = [start + end for start in "ctmshlr" for end in ("at", "on", "e", "ing", "ow")]
NUMBERS = random.Random(0)
WORDS = ["".join(NUMBERS.choices(SYLLABLES, k=NUMBERS.randint(1, 3))) for _ in range(300)]
TEXTS = [
    " ".join(NUMBERS.choices(WORDS, k=6)) + f",  {i}!\n\n  def {NUMBERS.choice(WORDS)} é" + "▁" * (i % 11 == 0)
    for i in range(400)
]


def messages(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation of user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def corpus_artifact(folder: Path, table: dict[str, list]) -> Artifact:
    folder.mkdir(parents=True)
    write_table(folder / "train-00000.arrow", pa.table(table))
    return Artifact(folder.parent / "manifest.json", {"payload": describe_files(folder), "records": {}}, folder)


def conversations() -> list[list[dict[str, str]]]:
    return [messages(a, b, system=a[:10] if i % 3 == 0 else None) for i, (a, b) in enumerate(pairwise(TEXTS))]


def train_in(folder: Path, kind: str, vocab_size: int = 400, corpora: list[Artifact] | None = None):
    """Run the stage; return its work folder and outcome."""
    corpora = corpora or [corpus_artifact(folder / "corpus", {"messages": conversations()})]
    work = WorkFolder(folder / "work")
    work.start()
    spec = TokenizerSpec(model=kind, vocab_size=vocab_size, character_coverage=0.9995, split_digits=True)
    return work, build(spec, work, corpora=corpora, chat_template=[CHATML], base=[])


def tokenizer_artifact(folder: Path) -> Artifact:
    """Train a tokenizer and return it as the stage publishes it."""
    payload = train_in(folder, "bpe")[0].payload
    return Artifact(folder / "manifest.json", {"payload": describe_files(payload), "records": {}}, payload)


def special(*names: str, **flags) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **flags) for name in names]


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None = None, **config) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def byte_level(folder: Path, template: Path = PHI3) -> Path:
    """Phi-3's tags with GPT-2's byte alphabet; some tags strip the whitespace after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|assistant|>"))
    tokenizer.add_special_tokens(special("<|user|>", "<|system|>", "<|end|>", rstrip=True))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save_tokenizer(folder, tokenizer, template.read_text(), eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def metaspace(folder: Path, template: Path = MISTRAL, legacy: bool = False) -> Path:
    """Mistral's kind: byte fallback, and a space before the first word of a text (`legacy`: of every part of it)."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    pieces = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=480, special_tokens=pieces, show_progress=False))
    description = json.loads(trained.to_str())
    description["model"] |= {"byte_fallback": True, "fuse_unk": True}
    description["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(description))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\x00", "isolated")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(special(*pieces[:5]))
    return save_tokenizer(folder, tokenizer, template.read_text(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram(folder: Path, template: Path = MISTRAL) -> Path:
    """T5's kind: no byte fallback, so unk is used; its control tokens are pieces of the model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([text.replace("▁", "") for text in TEXTS], trainer)
    return save_tokenizer(
        folder,
        tokenizer,
        template.read_text(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


FRAMES = special(
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
# Llama 3's template: without markers, and it trims contents.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|im_start|>' + message['role']"
    " + '\\n\\n' + message['content'] | trim + '<|im_end|>' %}{% if loop.index0 == 0 %}{% set content = '<s>' + content %}"
    "{% endif %}{{ content }}{% endfor %}"
)


def byte_level_with(pattern: str, **model) -> Tokenizer:
    """Llama 3's kind: a pattern before the byte alphabet."""
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    description = json.loads(tokenizer.to_str())
    description["model"] |= model
    return Tokenizer.from_str(json.dumps(description))


def sentencepiece_like(normalizer, pre_tokenizer, **model) -> Tokenizer:
    """Llama 2's and Gemma's kind: spaces written as `▁`, merges over whole texts, byte fallback."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, special_tokens=pieces, show_progress=False))
    description = json.loads(trained.to_str())
    description["model"] |= {"byte_fallback": True, "fuse_unk": True} | model
    description["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return tokenizer


def families() -> dict[str, Tokenizer]:
    """Return tokenizers that batched encoding covers, by name, without control tokens."""
    replaces = normalizers.Replace(" ", "▁")
    qwen = byte_level_with(sorted(PATTERNS)[2])
    qwen.normalizer = normalizers.NFC()
    t5 = Tokenizer(models.Unigram())
    t5.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    t5.train_from_iterator([text.replace("▁", "") for text in TEXTS], trainer)
    return {
        "gpt2": byte_level_with(sorted(PATTERNS)[0]),
        "llama3": byte_level_with(sorted(PATTERNS)[1], ignore_merges=True),
        "qwen": qwen,
        "o200k": byte_level_with(sorted(PATTERNS)[3]),
        "llama2": sentencepiece_like(normalizers.Sequence([normalizers.Prepend("▁"), replaces]), None),
        "gemma": sentencepiece_like(replaces, pre_tokenizers.Split(" ", "merged_with_previous")),
        "mistral": sentencepiece_like(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "no-bytes": sentencepiece_like(
            None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False), byte_fallback=False
        ),
        "t5": t5,
    }


def chat_of(folder: Path, tokenizer: Tokenizer, template: str, **config) -> ChatTokenizer:
    """Return the tokenizer with the control tokens of all templates here, and an added token that isn't one (`<think>`)."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(FRAMES)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", **config}
    if tokenizer.token_to_id("<unk>") is not None:
        config["unk_token"] = "<unk>"
    return ChatTokenizer.load(save_tokenizer(folder, tokenizer, template, **config))
