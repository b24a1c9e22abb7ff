"""Errors whose text is a sentence for people."""


class InvalidJobError(ValueError):
    """The job cannot run as its spec says, however often it is tried; the text says what to change."""


class TrainingError(RuntimeError):
    """The phase cannot go on; the text says why and what to do."""
