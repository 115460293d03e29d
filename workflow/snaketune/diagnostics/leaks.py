"""Checks for leaks: held-out prompts of one corpus that are trained on in another corpus.

Prompts are compared by what rows are split by (`corpus.selecting.splits`): the system text, if both corpora have any, and the
first user turn. Case, spacing and punctuation don't count; operators and brackets do, as some exercises differ in nothing else.
Rephrased prompts aren't found. Documents are compared by their ids, which are digests of their text.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.split_files import read_split
from snaketune.stages.findings import Finding
from snaketune.stages.specs import PreflightEvaluation

# Words, and each symbol that isn't punctuation of prose.
COMPARED = re.compile(r"\w+|[^\w\s.,;:!?'\"‘’‚‛“”„‟«»‹›…·¡¿،؛؟。、，．；：！？「」『』]")
# The hash of a missing system text.
NO_SYSTEM = 0


def check_leaks(
    evaluations: Iterable[PreflightEvaluation], corpora: dict[str, Artifact], evaluated: dict[str, Artifact]
) -> Iterator[Finding]:
    """Yield findings on prompts that one corpus holds out and another trains on; if more than half are, the run is stopped.

    Args:
        corpora: those that are trained on, by name.
        evaluated: those whose held-out rows are evaluated. Within one corpus equal prompts are always in one split.
    """
    pairs = {
        (other, name)
        for evaluation in evaluations
        for name in evaluation.corpora
        for other in evaluation.trained_on
        if name != other
    }
    for other, name in sorted(pairs):
        corpus, seen = evaluated[name], corpora[other]
        documents = _holds_documents(corpus)
        if documents != _holds_documents(seen):
            continue
        systems = not documents and _has_system(corpus, "held_out") and _has_system(seen, "train")
        # The number of held-out rows of each prompt that isn't among the training rows.
        unseen = Counter(_compared(corpus, "held_out", systems))
        rows = unseen.total()
        for prompt in _compared(seen, "train", systems):
            unseen.pop(prompt, None)
        yield from _leak(corpus, seen, rows - unseen.total(), rows, "documents" if documents else "prompts")


def _compared(corpus: Artifact, split: str, systems: bool) -> Iterator[Any]:
    """Yield for each row what it is compared by: the id of a document, or the hashes of a prompt, with its system text if
    `systems`."""
    if _holds_documents(corpus):
        yield from read_split(corpus, split).column("id").to_pylist()
    else:
        yield from ((system if systems else NO_SYSTEM, user) for system, user in _prompts(corpus, split))


def _holds_documents(corpus: Artifact) -> bool:
    return corpus.manifest["spec"]["kind"] == "text"


def _leak(corpus: Artifact, seen: Artifact, both: int, rows: int, what: str) -> Iterator[Finding]:
    if not both:
        return
    name, other = (artifact.folder.parent.name for artifact in (corpus, seen))
    ways, specs = [], [artifact.manifest["spec"] for artifact in (corpus, seen)]
    # Two corpora can't be decontaminated against each other; one can, against a corpus that isn't decontaminated itself.
    if not any(spec["decontamination"] for spec in specs):
        ways.append("set it ({})")
    (seed, share), (other_seed, other_share) = ((spec["split_seed"], spec["held_out"]) for spec in specs)
    if (seed, share) != (other_seed, other_share) and share < 1:
        splits = f"{name} has {seed} and {share:g}, {other} {other_seed} and {other_share:g}"
        ways.append(f"give both the same split_seed and held_out ({splits})")
    elif share < 1 and any(spec["near_duplicates"] for spec in specs):
        ways.append("remove near_duplicates from both, so that the split depends on the prompt alone")
    same = ", case, spacing and punctuation aside" if what == "prompts" else ""
    trained = f"{both:,} of the {rows:,} held-out {what} of {name} are trained on in {other}{same}"
    yield Finding(
        key=f"corpora.{other}.decontamination",
        problem=f"{trained}, so scores on them say little",
        do=", or ".join([*ways, "remove them from the files"]),
        certain=2 * both > rows,
    )


def _prompts(corpus: Artifact, split: str) -> Iterator[tuple[int, int]]:
    """Yield for each row the hashes of its system text and of its first user turn."""
    # There are few system texts.
    hash_system = lru_cache(maxsize=256)(_hash)
    for roles, contents, offsets in _turns(corpus, split):
        users = np.flatnonzero(pc.equal(roles, "user"))
        firsts = pa.array(users[np.searchsorted(users, offsets)])
        opened = pc.equal(roles.take(offsets), "system")
        systems = pc.if_else(opened, contents.take(offsets), None).to_pylist()
        for system, user in zip(systems, contents.take(firsts).to_pylist(), strict=True):
            yield NO_SYSTEM if system is None else hash_system(system), _hash(user)


def _has_system(corpus: Artifact, split: str) -> bool:
    return any(pc.any(pc.equal(roles.take(offsets), "system")).as_py() for roles, _, offsets in _turns(corpus, split))


def _turns(corpus: Artifact, split: str) -> Iterator[tuple[pa.Array, pa.Array, pa.Array]]:
    """Yield batch by batch role and content of the turns that the split depends on, and the index of each row's first turn."""
    table = read_split(corpus, split)
    for chunk in table.column("messages" if "messages" in table.column_names else "prompt").chunks:
        yield chunk.values.field("role"), chunk.values.field("content"), chunk.offsets[:-1]


def _hash(text: str) -> int:
    """The hash of the words of a text; of a text without words, that of the text.

    >>> _hash("It's 3 + 4!") == _hash("it’s 3  +  4"), _hash("3 + 4") == _hash("3 - 4")
    (True, False)
    """
    return xxhash.xxh3_64_intdigest((" ".join(COMPARED.findall(text.lower())) or text).encode())
