"""Rows that a chat template can't write as they are."""

from snaketune.errors import SnaketuneError


class Refused(SnaketuneError):
    """Of one row, what its template can't do with it; other rows may be written all the same.

    Attributes:
        reason: a short stable name, counted and listed.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
