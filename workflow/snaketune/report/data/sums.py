"""Checks that counts add up, with messages for the page."""

from snaketune.report.text import whole


def count_error(unit: str, count: int, name: str, other_count: int, other_name: str) -> list[str]:
    """A message if two counts differ, else an empty list.

    >>> count_error("rows", 60, "kept by the corpus", 59, "tokenized")
    ['60 rows kept by the corpus, but 59 tokenized']
    """
    return [] if count == other_count else [f"{whole(count)} {unit} {name}, but {whole(other_count)} {other_name}"]
