class NotExportable(ValueError):
    """A model that the format cannot express; the text says why."""


class Unfit(ValueError):
    """Weights of another program that this job cannot start from; the text says why."""
