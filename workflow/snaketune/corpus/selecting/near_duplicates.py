"""Which texts of rows are compared for near duplicates, and the groups that follow; `signatures` finds them.

The texts of a row are compared as one, the tools that it offers among them: the same request with other tools is another
task. Brackets, operators and digits count, for they are all that some rows differ in: exercises in logic, code, arithmetic.
Of a group, all rows but the first are dropped, if the config says so.
"""

from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np

from snaketune.corpus.rows import TEXT, Row
from snaketune.corpus.selecting.duplicates import Groups, first_occurrence, not_first
from snaketune.corpus.selecting.signatures import Signatures
from snaketune.corpus.selecting.words import TextHashes, compared_texts, words_of
from snaketune.stages.progress import progress


class NearDuplicates:
    """Append rows inside `with`; ask for groups of them afterwards."""

    def __init__(self, folder: Path, *, threshold: float, shingle: int):
        """Args: folder: for the signatures."""
        self.texts, self.prompts = (
            Signatures(folder / name, threshold=threshold, shingle=shingle) for name in ("texts", "prompts")
        )

    def __enter__(self) -> Self:
        self.open_files = ExitStack()
        self.open_files.enter_context(self.texts)
        self.open_files.enter_context(self.prompts)
        return self

    def __exit__(self, *_: object) -> None:
        self.open_files.close()

    def append(self, rows: list[Row]) -> None:
        """The signatures of one batch."""
        texts = [[*compared_texts(row.turns), *([row.tools] if row.tools else ())] for row in rows]
        first = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
        words = words_of([text for row in texts for text in row], symbols=True)
        self.texts.append(TextHashes(words.hashes, words.offsets[first]))
        prompts = (next(turn for turn in row.opening if turn["role"] in ("user", TEXT)) for row in rows)
        self.prompts.append(words_of([turn["content"] for turn in prompts], symbols=True))

    def groups(self, compared: np.ndarray) -> np.ndarray:
        """For each row, the first row of its group: those that say nearly the same, or are linked by rows that do.

        Args:
            compared: whether each row takes part.
        """
        groups = Groups(np.arange(len(compared)))
        self.texts.join_similar(groups, compared, "rows")
        return groups.first()

    def split_groups(self, prompt_hashes: np.ndarray, group: np.ndarray, compared: np.ndarray) -> np.ndarray:
        """For each row, the first of all rows that must be on its side of the split.

        These have the same prompt or a similar one, or say nearly the same, or are linked by rows that are.

        Args:
            drawn: for each row, the number drawn for its prompt.
            group: what `groups` found.
        """
        same_prompt = first_occurrence(prompt_hashes)
        groups = Groups(same_prompt)
        for row in progress(np.flatnonzero(not_first(group)).tolist(), "joining near duplicates", "rows"):
            groups.join(row, int(group[row]))
        self.prompts.join_similar(groups, compared & ~not_first(same_prompt), "prompts")
        return groups.first()
