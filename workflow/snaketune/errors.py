"""The error that is shown to the user as a message without a traceback."""


class SnaketuneError(Exception):
    """Invalid input, a damaged artifact or an impossible request.

    The message names the file, line or key, says what was found there, and what to do about it.
    """
