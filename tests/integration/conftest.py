"""A real API server and controller manager, shared by all tests of this folder. There are no nodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_dev.cluster.control_plane import ControlPlane

AUDITED = "pseudoreal-operator"
"""The user whose requests the API server notes."""


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    rules: list[dict[str, Any]] = [{"level": "Metadata", "users": [AUDITED]}, {"level": "None"}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
    (folder / "audit.yaml").write_text(json.dumps(policy))
    arguments = [f"--audit-policy-file={folder / 'audit.yaml'}", f"--audit-log-path={folder / 'audit.log'}"]
    with ControlPlane(folder, api_server_arguments=arguments) as running:
        yield running


def audit_log(control_plane: ControlPlane) -> Path:
    """One JSON object a line."""
    return control_plane.directory / "audit.log"
