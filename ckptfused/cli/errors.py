"""The error a command reports to a person: one message, no traceback."""


class CommandError(RuntimeError):
    """Ends a command with exit status 1; the message says what was expected, what came, what to do."""
