"""Sums that must hold, and how the page says that one doesn't."""

from snaketune.report.text import whole


def count_error(what: str, left: int, name: str, right: int, other: str) -> list[str]:
    """Nothing if both sides are equal; else one sentence.

    >>> unequal("rows", 60, "kept by the corpus", 59, "tokenized")
    ['60 rows kept by the corpus, but 59 tokenized']
    """
    return [] if left == right else [f"{whole(left)} {what} {name}, but {whole(right)} {other}"]
