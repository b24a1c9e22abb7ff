"""Packages that only some commands need."""

from collections.abc import Iterator
from contextlib import contextmanager

from pseudoreal_trainer.errors import InvalidJobError


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """A context for imports of packages that come with an extra of this one. Raises InvalidJobError where one is
    missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidJobError(
            f"the Python package {error.name} is not installed, which this needs: pip install 'pseudoreal[{extra}]'"
        ) from error
