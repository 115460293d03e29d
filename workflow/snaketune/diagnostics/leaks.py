"""Held-out prompts that a training sees all the same, in another corpus.

Compared is what rows are split by (`corpus.selecting.splits`): the system text and the first user turn, whatever follows them,
so that the pair about a held-out question is found, and the same question with another answer. Case, spacing and punctuation
don't count; operators and brackets do, for they are all that some exercises differ in. Where one of two corpora has no system
texts, the user turns alone are compared. Prompts in other words aren't found. Documents are compared by their ids, which are
digests of all that they say.

In memory are two 64-bit hashes of each held-out prompt (some 250 bytes in Python); rows that are trained on are streamed, which
takes 13 µs for a row with a prompt of 40 words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.gpu_needs import Finding
from snaketune.stages.specs import PreflightEvaluation
from snaketune.tables import read_table

# Words, and each symbol that isn't punctuation of prose.
COMPARED = re.compile(r"\w+|[^\w\s.,;:!?'\"‘’‚‛“”„‟«»‹›…·¡¿،؛؟。、，．；：！？「」『』]")
# Of rows without a system text.
NO_SYSTEM = 0


def check_leaks(
    evaluations: Iterable[PreflightEvaluation], corpora: list[Artifact], evaluated: list[Artifact]
) -> list[Finding]:
    """Prompts that are held out of one corpus and trained on in another: more than half of them stop the run.

    Args:
        corpora: that are trained on.
        evaluated: of whose held-out rows models are asked. Within one corpus equal prompts are always on one side.
    """
    trained, asked = _by_name(corpora), _by_name(evaluated)
    pairs = {(name, other) for one in evaluations for name in one.corpora for other in one.trained_on if name != other}
    found = []
    for other in sorted({other for _, other in pairs}):
        names = sorted(name for name, with_ in pairs if with_ == other)
        found += _in_corpus({name: asked[name] for name in names}, other, trained[other])
    return found


def _by_name(corpora: list[Artifact]) -> dict[str, Artifact]:
    return {corpus.folder.parent.name: corpus for corpus in corpora}


def _in_corpus(asked: dict[str, Artifact], other: str, seen: Artifact) -> list[Finding]:
    found, prompts = [], {}
    for name, corpus in asked.items():
        if _holds_documents(corpus) and _holds_documents(seen):
            ids = _ids(corpus, "held_out")
            both = pc.sum(pc.is_in(ids, value_set=_ids(seen, "train"))).as_py() or 0
            found += _finding(name, corpus, other, seen, both, len(ids), "documents")
        elif not _holds_documents(corpus) and not _holds_documents(seen):
            prompts[name] = _HeldOut(corpus, _has_system(corpus, "held_out") and _has_system(seen, "train"))
    for prompt in _prompts(seen, "train") if prompts else ():
        for held_out in prompts.values():
            held_out.meet(*prompt)
    for name, held_out in prompts.items():
        both = held_out.rows - held_out.left.total()
        found += _finding(name, asked[name], other, seen, both, held_out.rows, "prompts")
    return found


def _finding(name: str, corpus: Artifact, other: str, seen: Artifact, both: int, rows: int, what: str) -> list[Finding]:
    if not both:
        return []
    ways, (spec, others) = [], (corpus.manifest["spec"], seen.manifest["spec"])
    # Two corpora that are cleaned of each other can't wait for each other; one cleans itself of those that aren't.
    if not spec["decontamination"] and not others["decontamination"]:
        ways.append("set it ({})")
    (seed, share), (other_seed, other_share) = splits = [(one["split_seed"], one["held_out"]) for one in (spec, others)]
    if splits[0] != splits[1] and share < 1:
        ways.append(
            f"give both the same split_seed and held_out ({name} has {seed} and {share:g}, {other} {other_seed} and "
            f"{other_share:g})"
        )
    elif share < 1 and (spec["near_duplicates"] or others["near_duplicates"]):
        ways.append("leave near_duplicates out of both, so that the split goes by the prompt alone")
    same = ", case, spacing and punctuation aside" if what == "prompts" else ""
    return [
        Finding(
            key=f"corpora.{other}.decontamination",
            problem=f"{both:,} of the {rows:,} held-out {what} of {name} are trained on in {other}{same}, so that scores on them "
            "say little",
            do=", or ".join([*ways, "take them out of the files"]),
            certain=2 * both > rows,
        )
    ]


class _HeldOut:
    """The prompts that a corpus holds out.

    Attributes:
        rows: how many rows are held out.
        left: of each prompt that wasn't met yet, how many rows have it.
        with_system: whether prompts are compared with their system texts.
    """

    def __init__(self, corpus: Artifact, with_system: bool):
        self.with_system = with_system
        self.left = Counter(self._key(*prompt) for prompt in _prompts(corpus, "held_out"))
        self.rows = self.left.total()

    def meet(self, system: int, user: int) -> None:
        """A prompt that is trained on."""
        self.left.pop(self._key(system, user), None)

    def _key(self, system: int, user: int) -> tuple[int, int]:
        return (system if self.with_system else NO_SYSTEM), user


def _prompts(corpus: Artifact, split: str) -> Iterator[tuple[int, int]]:
    """Of each row, what its system text and its first user turn are compared by."""
    # There are few system texts.
    hash_system = lru_cache(maxsize=256)(_hash)
    for turns, begins in _turns(corpus, split):
        users = np.flatnonzero(pc.equal(turns.field("role"), "user"))
        firsts = pa.array(users[np.searchsorted(users, begins)])
        opened = pc.equal(turns.field("role").take(begins), "system")
        systems = pc.if_else(opened, turns.field("content").take(begins), None).to_pylist()
        for system, user in zip(systems, turns.field("content").take(firsts).to_pylist(), strict=True):
            yield NO_SYSTEM if system is None else hash_system(system), _hash(user)


def _has_system(corpus: Artifact, split: str) -> bool:
    return any(
        pc.any(pc.equal(turns.field("role").take(begins), "system")).as_py() for turns, begins in _turns(corpus, split)
    )


def _turns(corpus: Artifact, split: str) -> Iterator[tuple[pa.StructArray, pa.Array]]:
    """Batch by batch, the turns of all rows that the split goes by, and where those of each row begin."""
    table = read_table(corpus.file(f"{split}.arrow"))
    for chunk in table.column("messages" if "messages" in table.column_names else "prompt").chunks:
        yield chunk.values, chunk.offsets[:-1]


def _hash(text: str) -> int:
    """Of the words of a text; of one without words, of the text.

    >>> _hash("It's 3 + 4!") == _hash("it’s 3  +  4"), _hash("3 + 4") == _hash("3 - 4")
    (True, False)
    """
    return xxhash.xxh3_64_intdigest((" ".join(COMPARED.findall(text.lower())) or text).encode())


def _holds_documents(corpus: Artifact) -> bool:
    return corpus.manifest["spec"]["kind"] == "text"


def _ids(corpus: Artifact, split: str) -> pa.ChunkedArray:
    return read_table(corpus.file(f"{split}.arrow")).column("id")
