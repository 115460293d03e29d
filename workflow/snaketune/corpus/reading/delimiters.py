"""What separates the cells of a CSV file: a comma, a tab, a semicolon or a bar, found by its first rows."""

import csv
import io

DELIMITERS = (",", "\t", ";", "|")
ROWS_CHECKED = 5


def delimiter_of(head: bytes, *, whole: bool, tabs: bool = False, columns: int | None = None) -> str | None:
    r"""The delimiter by which several rows have as many cells as the header, and more than one; a comma, if it is one.

    >>> delimiter_of(b"prompt;response\na, b;c\nd;e\n", whole=True)
    ';'

    Args:
        head: the beginning of the file.
        whole: whether that is all of it.
        tabs: whether tabs count before commas.
        columns: how many there are, of a file without a header.
    """
    text = (head if whole else head[: head.rfind(b"\n") + 1]).decode("utf-8-sig", "replace")
    for delimiter in ("\t", ",", ";", "|") if tabs else DELIMITERS:
        cells = _cell_counts(text, delimiter)
        enough = len(cells) > 1 if columns is None else cells[:1] == [columns]
        if enough and cells[0] > 1 and len(set(cells)) == 1:
            return delimiter
    return None


def _cell_counts(text: str, delimiter: str) -> list[int]:
    counts: list[int] = []
    try:
        for cells in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            if cells:
                counts.append(len(cells))
            if len(counts) == ROWS_CHECKED:
                break
    except csv.Error:
        pass
    return counts
