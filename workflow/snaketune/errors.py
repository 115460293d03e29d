"""The one error that reaches a user as a message and not as a traceback."""


class SnaketuneError(Exception):
    """Bad input, a broken artifact or an impossible request.

    The message names the file, line or key, says what was found, and what to do about it.
    """
