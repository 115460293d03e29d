"""Where malformed rows go, and when they are too many."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

from snaketune.corpus.raw import RawRow
from snaketune.corpus.rows import Malformed, excerpt
from snaketune.errors import SnaketuneError

ROWS_SHOWN = 10
COMMONEST_REASONS_SHOWN = 3


@dataclass
class Quarantine:
    """The file that bad rows are listed in, and what of them a message needs."""

    file: TextIO
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    def add(self, file: str, raw: RawRow, error: Malformed) -> None:
        found = error.excerpt if isinstance(raw.found, Malformed) else excerpt(raw.found)
        record = {
            "file": file,
            raw.unit: raw.number,
            "reason": error.reason,
            "detail": error.detail,
            "excerpt": found,
        }
        line = json.dumps(record, ensure_ascii=False)
        self.file.write(line + "\n")
        self.reasons[error.reason] += 1
        place = f"{file}:{raw.number}" if raw.unit == "line" else f"{file}, row {raw.number}"
        self.examples.setdefault(error.reason, f"{place}: {error.detail}")
        if len(self.first) < ROWS_SHOWN:
            self.first.append(line)

    def judge(self, rows: int, sound: int, limit: float) -> None:
        """End the stage if too many of the rows are here.

        Args:
            rows: all that was found.
            sound: how many of them can be used.
            limit: the share that may be malformed.
        Raises:
            SnaketuneError: a larger share is, or no row is sound.
        """
        bad = self.reasons.total()
        if not bad or (sound and bad / rows <= limit):
            return
        # The payload, and this file with it, is gone when the stage fails; the log stays.
        encoding = sys.stdout.encoding or "utf-8"
        for line in self.first:
            print(f"quarantined: {line}".encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
        reasons = "".join(
            f"\n  {count} × {reason}, for instance {self.examples[reason]}"
            for reason, count in self.reasons.most_common(COMMONEST_REASONS_SHOWN)
        )
        if not sound:
            raise SnaketuneError(
                f"none of the {rows} rows can be used:{reasons}\nCheck `layout` and `fields` of the source"
            )
        raise SnaketuneError(
            f"{bad} of {rows} rows ({bad / rows:.2%}) are malformed, more than the {limit:.2%} "
            f"allowed:{reasons}\nFix these rows, or raise corpora.<name>.max_quarantined_fraction"
        )
