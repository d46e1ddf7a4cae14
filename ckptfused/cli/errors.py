"""How commands end: exit statuses, and the error that a command reports to a person."""

STATUSES = """exit status: 0, all is well; 1, the command failed, and says why; 2, its options are wrong;
3, it ran, and the answer is no: nothing fits into the budget (plan), or something is an error (doctor)"""
FAILED, MISUSED, NO = 1, 2, 3
"""`MISUSED` is argparse's own."""


class CommandError(RuntimeError):
    """Ends a command with exit status `FAILED`: one message, no traceback, which says what was expected, what came,
    what to do."""
