"""The delimiter of a CSV file, detected from its first rows: a comma, a tab, a semicolon or a bar."""

import csv
import io

DELIMITERS = (",", "\t", ";", "|")
ROWS_CHECKED = 5


def delimiter_of(head: bytes, *, whole: bool, tabs: bool = False, columns: int | None = None) -> str | None:
    r"""Return the first delimiter with which all of the first rows have the same number of cells, and more than one.

    >>> delimiter_of(b"prompt;response\na, b;c\nd;e\n", whole=True)
    ';'

    Args:
        head: the beginning of the file.
        whole: whether `head` is the whole file.
        tabs: whether tabs are tried before commas.
        columns: the number of columns of a file without a header.
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
