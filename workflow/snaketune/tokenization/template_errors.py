"""Errors of rows that a chat template can't render."""

from snaketune.errors import SnaketuneError


class Refused(SnaketuneError):
    """A chat template can't render a row; other rows may be fine.

    Attributes:
        reason: a short, stable name, for counts and lists.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
