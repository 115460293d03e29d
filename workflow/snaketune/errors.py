"""The error that is shown to the user as a message without a traceback."""


class SnaketuneError(Exception):
    """Invalid input, a damaged artifact or an impossible request.

    The message names the file, line or key, says what was found there, and what to do about it.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
