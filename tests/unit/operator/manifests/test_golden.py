"""Realistic jobs and all that is made of them: as it was read and committed, and as Kubernetes' own schemas want it."""

import kubernetes_validate
import pytest
from pseudoreal_api.spec.check import check_job
from pseudoreal_operator.lifecycle.acceptance import check

from tests import golden

KUBERNETES = "1.34"


@pytest.mark.parametrize("name", golden.names())
def test_the_jobs_are_good(name: str) -> None:
    check(check_job(golden.job(name)).spec)


@pytest.mark.parametrize("name", golden.names())
def test_the_children_are_those_that_were_read(name: str) -> None:
    assert golden.rendered(name) == golden.stored(name), "python -m tests.golden renders them anew; read the difference"


@pytest.mark.parametrize("name", golden.names())
def test_the_children_follow_kubernetes_schemas(name: str) -> None:
    for manifest in golden.manifests(name):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
