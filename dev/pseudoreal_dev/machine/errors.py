"""The one error shown without a traceback: its text names the failure and the remedy."""


class DevError(Exception):
    """The tooling cannot go on; the message names the cause on this machine and the remedy."""
