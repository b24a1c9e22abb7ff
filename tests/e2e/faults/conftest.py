"""An undisturbed job for comparison, and other jobs with the same training."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from pseudoreal_dev.cluster import binaries, cluster, network
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.cluster.second_node import SecondNode

from tests.e2e.faults.support.undisturbed import SPEC, Undisturbed
from tests.e2e.support.job import CLAIM, Job, applied
from tests.e2e.support.machine import make_volume
from tests.e2e.support.operator_pod import install


@pytest.fixture(scope="session")
def kubernetes(kubernetes: Kubernetes) -> Kubernetes:
    """The cluster with the chart installed, and a volume."""
    install(kubernetes)
    make_volume(kubernetes, CLAIM)
    return kubernetes


@pytest.fixture(scope="session")
def undisturbed(kubernetes: Kubernetes) -> Undisturbed:
    with applied(kubernetes, "undisturbed", **SPEC) as job:
        return Undisturbed.of(job)


@pytest.fixture
def other_node(kubernetes: Kubernetes) -> Iterator[SecondNode]:
    node = SecondNode(cluster.control())
    node.join(binaries.build(), cluster.containerd())
    yield node
    node.leave()
    kubernetes.run("delete", "node", network.SECOND.node, "--ignore-not-found")


@pytest.fixture
def start(kubernetes: Kubernetes) -> Iterator[Callable[..., Job]]:
    """Function for applying a job like the undisturbed one; the job is deleted after the test."""
    with ExitStack() as stack:
        yield lambda name, **changes: stack.enter_context(applied(kubernetes, name, **SPEC | changes))
