"""The error of the tooling, shown without a traceback."""


class DevError(Exception):
    """The tooling cannot go on; the message names the cause on this machine and the remedy."""
