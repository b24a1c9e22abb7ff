class NotExportable(ValueError):
    """A model that the format cannot express; the text says why."""
