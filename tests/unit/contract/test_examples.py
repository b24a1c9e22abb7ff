"""What the README tells people to start must be able to run."""

from typing import Any

import pytest
from pseudoreal_api.resolved.resolve import check_resolvable
from pseudoreal_api.spec.check import check_job

from tests.jobs import example_jobs


@pytest.mark.parametrize("body", example_jobs(), ids=lambda body: body["metadata"]["name"])
def test_an_example_passes_the_local_check(body: dict[str, Any]) -> None:
    job = check_job(body)
    check_resolvable(job.spec)
    assert [phase.name for phase in job.spec.phases] == ["pseudo", "real"]
