"""Pairs as texts and as tokens, by transformers' tokenizer alone: what the peer is given, and what ours are recognised by."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dpo.material import Material, corpus_rows, pack_of

from snaketune.packing.reader import documents
from snaketune.stages.job import result_at


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair; its texts as the template renders them, and its tokens."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def sequences(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and chosen, prompt and rejected."""
        return self.prompt_ids + self.chosen_ids, self.prompt_ids + self.rejected_ids

    @property
    def texts(self) -> dict[str, str]:
        """As a row of a data set for TRL, which puts the end of turn after the completions."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


def pairs_of(material: Material, run_name: str) -> list[Pair]:
    """Of a run, the pairs that were packed; to be called in the material's folder."""
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
    """Tokens that must be computed: for each prompt, the nodes of a trie of all that is said after it.

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
