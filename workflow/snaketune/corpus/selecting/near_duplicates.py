"""Groups of near duplicates among rows; `signatures` compares their texts.

The texts of a row are compared as one, including the tools that it offers: the same request with other tools is another
task. Brackets, operators and digits count, because some rows differ in nothing else: exercises in logic, code, arithmetic.
All rows of a group but the first are dropped, if the config says so.
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


class NearDuplicateSearch:
    """Append rows inside `with`; get their groups afterwards."""

    def __init__(self, folder: Path, *, threshold: float, shingle: int):
        """Args: folder: where the signatures are written."""
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
        """Write the signatures of one batch of rows."""
        texts = [[*compared_texts(row.turns), *([row.tools] if row.tools else ())] for row in rows]
        first = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(texts) + 1)
        words = words_of([text for row in texts for text in row], symbols=True)
        self.texts.append(TextHashes(words.hashes, words.offsets[first]))
        prompts = (next(turn for turn in row.opening if turn["role"] in ("user", TEXT)) for row in rows)
        self.prompts.append(words_of([turn["content"] for turn in prompts], symbols=True))

    def groups(self, compared: np.ndarray) -> np.ndarray:
        """Return, for each row, the first row of its group: rows that are similar, or linked by similar rows.

        Args:
            compared: whether each row is compared.
        """
        groups = Groups(np.arange(len(compared)))
        self.texts.join_similar(groups, compared, "rows")
        return groups.first()

    def split_groups(self, prompt_hashes: np.ndarray, group: np.ndarray, compared: np.ndarray) -> np.ndarray:
        """Return, for each row, the first of all rows that must be on the same side of the split.

        These are rows with the same or a similar prompt, near duplicates, and rows linked by them.

        Args:
            prompt_hashes: for each row, the hash of its prompt.
            group: the result of `groups`.
            compared: whether each row is compared.
        """
        same_prompt = first_occurrence(prompt_hashes)
        groups = Groups(same_prompt)
        for row in progress(np.flatnonzero(not_first(group)).tolist(), "joining near duplicates", "rows"):
            groups.join(row, int(group[row]))
        self.prompts.join_similar(groups, compared & ~not_first(same_prompt), "prompts")
        return groups.first()
