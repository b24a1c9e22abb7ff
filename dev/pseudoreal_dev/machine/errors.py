"""The one error that a developer sees without a traceback: its text says what failed and what to do."""


class DevError(Exception):
    """Something on this machine stopped the tooling; the message names it and the remedy."""
