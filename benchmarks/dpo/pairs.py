"""Pairs as texts and tokens by transformers' tokenizer: the peer's input, and the key that identifies our pairs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dpo.material import Material, corpus_rows, pack_of

from snaketune.packing.reader import documents
from snaketune.stages.job import result_at


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair: its texts as the template renders them, and its tokens."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def sequences(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sequences prompt + chosen and prompt + rejected."""
        return self.prompt_ids + self.chosen_ids, self.prompt_ids + self.rejected_ids

    @property
    def texts(self) -> dict[str, str]:
        """Return the pair as a row for TRL, which appends the end of turn to the completions."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


def pairs_of(material: Material, run_name: str) -> list[Pair]:
    """Return the packed pairs of a run; call it in the folder of the input."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material.tokenizer)
    job = pack_of(material.graph, run_name)
    packed = {document["id"] for document in documents(result_at(Path(job.manifest)), "train")}
    corpus = material.graph.config.dpo[run_name].corpus
    return [_pair(tokenizer, row) for row in corpus_rows(corpus) if row["id"] in packed]


def _pair(tokenizer: Any, row: dict[str, Any]) -> Pair:
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    prompt_ids = tuple(tokenizer(prompt)["input_ids"])
    texts, ids = {"prompt": prompt}, {"prompt_ids": prompt_ids}
    for side in ("chosen", "rejected"):
        ((turn),) = row[side]
        texts[side] = turn["content"]
        whole = tuple(tokenizer(prompt + texts[side] + tokenizer.eos_token)["input_ids"])
        if whole[: len(prompt_ids)] != prompt_ids:
            raise ValueError(f"pair {row['id']}: the prompt's last token depends on what comes after it")
        ids[f"{side}_ids"] = whole[len(prompt_ids) :]
    return Pair(**texts, **ids)


def fewest_tokens(pairs: Iterable[Pair]) -> int:
    """Count the tokens that must be computed: for each prompt, the trie nodes of its completions.

    >>> pair = Pair(prompt="", chosen="", rejected="", prompt_ids=(1, 2), chosen_ids=(3, 4, 5), rejected_ids=(3, 6))
    >>> fewest_tokens([pair, pair])
    6
    """
    tries: dict[tuple[int, ...], dict[int, Any]] = {}
    nodes = 0
    for pair in pairs:
        for completion in (pair.chosen_ids, pair.rejected_ids):
            if pair.prompt_ids not in tries:
                tries[pair.prompt_ids] = {}
                nodes += len(pair.prompt_ids)
            trie = tries[pair.prompt_ids]
            for token in completion:
                if token not in trie:
                    trie[token] = {}
                    nodes += 1
                trie = trie[token]
    return nodes
