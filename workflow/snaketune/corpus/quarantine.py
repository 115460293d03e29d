"""The list of malformed rows, and the limit on their share."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt, print_line, printable
from snaketune.corpus.rows import Malformed, RawRow
from snaketune.errors import SnaketuneError

ROWS_SHOWN = 10
COMMONEST_REASONS_SHOWN = 3
# Parts of personal data at a cut: what is left of an address or a number matches no pattern any more.
HALF_AN_ADDRESS = re.compile(r"""[^\s"'@]*@[^\s"']*""")
LAST_WORD_OR_NUMBER = re.compile(r"""[\d\s().+-]*[^\s"']*$""")


class Recorder:
    """Records of malformed rows."""

    def __init__(self, mask: Callable[[str], str] | None = None):
        """Args: mask: masks personal data in the record as in the rows; None where nothing is masked."""
        self.mask = mask

    def record(self, file: str, raw: RawRow, error: Malformed) -> dict[str, Any]:
        return {
            "file": file,
            raw.unit: raw.number,
            "reason": error.reason,
            "detail": self._masked_text(error.detail),
            "excerpt": self._excerpt(raw, error),
        }

    def _excerpt(self, raw: RawRow, error: Malformed) -> str:
        if isinstance(raw.value, Malformed):
            text = self._masked_text(error.excerpt)
            cut = self.mask and len(error.excerpt) >= EXCERPT_LENGTH
            return LAST_WORD_OR_NUMBER.sub("…", text, count=1) if cut else text
        try:
            # Masked before it is cut, while all personal data is whole.
            return excerpt(self._masked(raw.value) if self.mask else raw.value)
        except RecursionError:
            return "…"

    def _masked_text(self, text: str) -> str:
        return HALF_AN_ADDRESS.sub("…", self.mask(text)) if self.mask else text

    def _masked(self, value: Any) -> Any:
        match value:
            case dict():
                return {self.mask(str(key)): self._masked(part) for key, part in value.items()}
            case list():
                return [self._masked(part) for part in value]
        text = str(value)
        masked = self.mask(text)
        return value if masked == text else masked


@dataclass
class Quarantine:
    """The file of malformed rows, and their counts and examples for messages.

    Attributes:
        repairs, repairable: the repairs that would make rows valid, and the number of these rows.
    """

    file: TextIO
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    repairs: dict[str, None] = field(default_factory=dict)
    repairable: int = 0

    def add(self, record: dict[str, Any], repairs: Sequence[str] = ()) -> None:
        """Args: record: of a `Recorder`; repairs: the configurable repairs that would make the row valid."""
        line = printable(json.dumps(record, ensure_ascii=False))
        self.file.write(line + "\n")
        self.reasons[record["reason"]] += 1
        self.repairs |= dict.fromkeys(repairs)
        self.repairable += bool(repairs)
        file = record["file"]
        location = f"{file}:{record['line']}" if "line" in record else f"{file}, row {record['row']}"
        self.examples.setdefault(record["reason"], printable(f"{location}: {record['detail']}"))
        if len(self.first) < ROWS_SHOWN:
            self.first.append(line)

    def check_limit(self, rows: int, sound: int, limit: float, saved_path: Path) -> None:
        """Raise if too many of the rows are malformed.

        Args:
            rows, sound: numbers of all rows, and of those that can be used.
            limit: the largest share of malformed rows that is allowed.
            saved_path: the path that the file, which must be closed, is moved to before raising.
        Raises:
            SnaketuneError: the share is larger than the limit, or no row can be used.
        """
        bad = self.reasons.total()
        if not bad or (sound and bad / rows <= limit):
            return
        # The next attempt empties the payload. The first rows are logged, too, for readers who have only the log.
        Path(self.file.name).replace(saved_path)
        for line in self.first:
            print_line(f"quarantined: {line}")
        reasons = "".join(
            f"\n  {count} × {reason}, for instance {self.examples[reason]}"
            for reason, count in self.reasons.most_common(COMMONEST_REASONS_SHOWN)
        )
        what = f"{bad} of {rows} rows ({bad / rows:.2%}) are malformed, more than the {limit:.2%} allowed"
        advice = "Fix these rows, or raise corpora.<name>.max_quarantined_fraction"
        if not sound:
            what, advice = f"none of the {rows} rows can be used", "Check `layout` and `fields` of the source"
        if self.repairs:
            repair = f"corpora.<name>.repair: [{', '.join(self.repairs)}]"
            with_repair = f"{self.repairable} of them can be used with `{repair}`"
            advice = f"{with_repair}\n{advice}" if sound else with_repair
        raise SnaketuneError(f"{what}:{reasons}\nAll are listed in {saved_path}\n{advice}")
