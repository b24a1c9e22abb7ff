"""Realistic jobs and all of their children: equal to the reviewed and committed manifests, and valid by Kubernetes'
own schemas."""

import kubernetes_validate
import pytest
from pseudoreal_api.spec.check import check_job
from pseudoreal_operator.lifecycle.acceptance import check

from tests import golden

KUBERNETES = "1.34"
_NEWER = {"gang-native": "1.37"}
"""Jobs that need a newer Kubernetes -> its version."""


@pytest.mark.parametrize("name", golden.names())
def test_golden_jobs_are_valid(name: str) -> None:
    check(check_job(golden.job(name)).spec)


@pytest.mark.parametrize("name", golden.names())
def test_children_equal_the_golden_files(name: str) -> None:
    assert golden.rendered(name) == golden.stored(name), "python -m tests.golden renders them anew; read the difference"


@pytest.mark.parametrize("name", golden.names())
def test_children_follow_kubernetes_schemas(name: str) -> None:
    version = _NEWER.get(name, KUBERNETES)
    for manifest in golden.manifests(name):
        if manifest["kind"] != "PodGroup" or name in _NEWER:
            kubernetes_validate.validate(manifest, version, strict=True)
