"""Kubernetes' own scheduler, for pods naming it."""

from collections.abc import Iterator

import pytest
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests.support.schedulers import PLAIN_SCHEDULER, running_scheduler


@pytest.fixture(scope="module")
def plain_scheduler(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder, program = tmp_path_factory.mktemp("scheduler"), binaries.build("kube-scheduler").path("kube-scheduler")
    _, kubeconfig = control_plane.user(PLAIN_SCHEDULER, ["system:masters"])
    with running_scheduler(program, folder, kubeconfig, {"schedulerName": PLAIN_SCHEDULER}):
        yield
