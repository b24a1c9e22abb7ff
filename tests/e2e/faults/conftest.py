"""A job that nobody disturbs, to compare with, and others that train the same."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from pseudoreal_dev.kubectl import Kubernetes

from tests.e2e.faults.undisturbed import SPEC, Undisturbed
from tests.e2e.job import Job, applied


@pytest.fixture(scope="session")
def undisturbed(kubernetes: Kubernetes) -> Undisturbed:
    with applied(kubernetes, "undisturbed", **SPEC) as job:
        return Undisturbed.of(job)


@pytest.fixture
def start(kubernetes: Kubernetes) -> Iterator[Callable[..., Job]]:
    """Applies a job like the undisturbed one; it is deleted afterwards."""
    with ExitStack() as stack:
        yield lambda name, **changes: stack.enter_context(applied(kubernetes, name, **SPEC | changes))
