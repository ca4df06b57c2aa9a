"""The one error that a wrong input raises."""


class UserError(ValueError):
    """A wrong input or a missing piece, told in one line: the value, what is allowed, what to do.

    The command line prints it without a traceback and exits with 2.
    """
