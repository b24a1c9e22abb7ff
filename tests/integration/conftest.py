"""A real API server and controller manager, shared by all tests of this folder. There are no nodes."""

from collections.abc import Iterator

import pytest
from pseudoreal_dev.cluster.control_plane import ControlPlane


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as running:
        yield running
