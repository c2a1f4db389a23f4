"""The one exception type that users are meant to read."""


class AdaSpecError(Exception):
    """A problem the user can act on.

    The message is a sentence that says what is wrong, with the values, and what to do. Command
    line entry points print it without a traceback and exit with code 2.
    """
