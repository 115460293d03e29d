"""Text to rows and text to tokens, beside TRL and sentencepiece."""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from benchmarks.data_path.rows import FILES, as_messages, repeated
from benchmarks.jobs import ROW_LENGTH, conversations
from benchmarks.results import in_turn, medians, timed

from snaketune.packing.reader import open_rows
from snaketune.tokenization.batched.chunks import ChunkEncoder
from snaketune.tokenization.batched.separable import METASPACE, NotSeparable, separable

# Texts that our encoder gets at once.
TEXTS = 32768


def compared(key: str, rounds: int, **sides: Callable[[], Any]) -> dict[str, Any]:
    """Time both sides in turn; return medians, and as `key` the speedup of ours, the first."""
    rounds_of = in_turn(rounds, {name: timed(side) for name, side in sides.items()})
    seconds = medians(rounds_of)
    ours, theirs = seconds.values()
    return {key: theirs / ours, "seconds": seconds, "rounds": rounds_of}


def prepare(rounds: int, folder: Path, data: Path, megabytes: float = 100) -> dict[str, Any]:
    """Time raw JSON lines to rows that are ready for training."""
    from datasets import Dataset, concatenate_datasets, disable_caching, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    files = repeated(data, folder, megabytes)
    project = conversations(folder / "project", files, [data / name for name in FILES])
    projects = [project.copy_to(folder / f"ours{number}") for number in range(rounds)]
    tokenizer = AutoTokenizer.from_pretrained(project.tokenizer)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings = SFTConfig(
        output_dir=str(folder / "trl"), max_length=ROW_LENGTH, packing=True, assistant_only_loss=True, use_cpu=True,
        report_to="none",
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **size)),
        settings,
        train_dataset=Dataset.from_list([as_messages({"prompt": "x", "response": "x"})] * 2),
        processing_class=tokenizer,
    )
    made: dict[str, Any] = {}

    def ours() -> None:
        own = projects.pop()
        made["snaketune"] = open_rows(own.make(own.pack()), "train")

    def theirs() -> None:
        cache = str(folder / "cache")
        loaded = [load_dataset("json", data_files=str(file), split="train", cache_dir=cache) for file in files]
        chats = concatenate_datasets([part.map(as_messages, remove_columns=part.column_names) for part in loaded])
        made["trl"] = trainer._prepare_dataset(
            chats, tokenizer, settings, packing=True, formatting_func=None, dataset_name="train"
        )
        shutil.rmtree(cache)

    found = compared("prepare_speedup_vs_trl", rounds, snaketune=ours, trl=theirs)
    tokens = {
        "snaketune": made["snaketune"].tokens,
        "trl": sum(map(len, made["trl"].with_format("arrow")["input_ids"].to_pylist())),
    }
    rows = {name: len(side) for name, side in made.items()}
    return found | {"megabytes": sum(f.stat().st_size for f in files) / 1e6, "rows": rows, "tokens": tokens}


def tokenize(rounds: int, folder: Path, data: Path, megabytes: float = 50) -> dict[str, Any]:
    """Time encoding with one vocabulary, by us and by sentencepiece, on the rows of `prepare`.

    Text that comes again is what our encoder is good at, so beside it: every text of every .jsonl file below `data`, once.
    Our cache is empty when a round begins.
    """
    import sentencepiece

    tokenizer = (
        conversations(folder / "project", [data / name for name in FILES]).tokenizer.parents[1] / "trained/tokenizer"
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=(tokenizer / "sentencepiece.model").read_bytes())
    description = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))

    def measured(files: list[Path]) -> dict[str, Any]:
        texts = [text for file in files for line in file.open(encoding="utf-8") for text in strings(json.loads(line))]
        encoders, column = [PlainTexts(description) for _ in range(rounds)], pa.array(texts)
        made: dict[str, Any] = {}

        def ours() -> None:
            encoder = encoders.pop()
            made["snaketune"] = [encoder.encode(column[at : at + TEXTS]) for at in range(0, len(column), TEXTS)]

        def theirs() -> None:
            made["sentencepiece"] = processor.encode(texts, num_threads=1)

        found = compared("tokenize_speedup_vs_sentencepiece", rounds, snaketune=ours, sentencepiece=theirs)
        encoded = [ids[a:b].tolist() for ids, offsets in made["snaketune"] for a, b in pairwise(offsets)]
        size = sum(len(text.encode()) for text in texts) / 1e6
        return found | {
            "megabytes": size,
            "texts": len(texts),
            "texts_that_differ": sum(a != b for a, b in zip(encoded, made["sentencepiece"], strict=True)),
            "megabytes_per_s": {name: size / statistics.median(some) for name, some in found["rounds"].items()},
        }

    return measured(repeated(data, folder, megabytes)) | {"every text once": measured(sorted(data.rglob("*.jsonl")))}


def strings(value: Any) -> Iterator[str]:
    """Return all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


class PlainTexts:
    """Encoder of plain texts without a template; strings that look like added tokens are text.

    Memory: some 30 bytes per byte of the texts given at once; a few MB at once are fastest.
    """

    def __init__(self, description: dict[str, Any]):
        """
        Args:
            description: `tokenizer.json`, parsed.
        Raises:
            NotSeparable: no proof covers it, or it treats a text's start, or `▁`, in a way of its own.
        """
        found = separable(description)
        if found.prefix != "none" or found.reserved.search(METASPACE.encode()):
            raise NotSeparable("it writes spaces as another character")
        self._chunks = ChunkEncoder(found)

    def encode(self, texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
        """Encode n texts; return their ids end to end, int32[t], and their offsets, int64[n + 1]."""
        _, offsets, data = texts.buffers()
        starts = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
        start, end = int(starts[0]), int(starts[-1])
        encoded = self._chunks.encode((data or pa.py_buffer(b"")).slice(start, end - start), [starts - start])
        return encoded.ids, encoded.tokens[np.searchsorted(encoded.cuts, starts - start)].astype(np.int64)
