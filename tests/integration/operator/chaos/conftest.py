"""Operators behind proxies."""

from pathlib import Path

import pytest
from kubernetes import client

from tests.integration.operator.chaos.support.lives import Lives
from tests.integration.operator.chaos.support.proxy import upstream_of


@pytest.fixture
def lives(admin: client.ApiClient, operator_kubeconfig: Path, tmp_path: Path) -> Lives:
    return Lives(admin, upstream_of(operator_kubeconfig), tmp_path)
