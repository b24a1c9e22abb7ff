"""Imports of optional packages, needed by some commands only."""

from collections.abc import Iterator
from contextlib import contextmanager

from pseudoreal_trainer.errors import InvalidJobError


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Context for imports of packages from an extra of this distribution. Raises InvalidJobError if one is not
    installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidJobError(
            f"the Python package {error.name} is not installed, which this needs: pip install 'pseudoreal[{extra}]'"
        ) from error
