"""The one error shown without a traceback: its text says what failed and what to do."""


class DevError(Exception):
    """The tooling cannot go on; the message names the cause on this machine and the remedy."""
