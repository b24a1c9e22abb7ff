"""The local check refuses what the API server refuses, with the same words for the rules across fields."""

import pytest
from pseudoreal_api.spec.check import InvalidJob, check_job

from tests.jobs import BadJob, bad_jobs, good_job


def test_a_good_job_passes() -> None:
    assert check_job(good_job()).spec.phases[1].workers == 2


@pytest.mark.parametrize("bad", bad_jobs(), ids=lambda bad: bad.name)
def test_a_bad_job_is_refused(bad: BadJob) -> None:
    with pytest.raises(InvalidJob) as refused:
        check_job(bad.body)
    for piece in bad.says:
        assert piece.lower() in str(refused.value).lower()


@pytest.mark.parametrize("amount", [0, 1, "1", "500m", "1.5", "16Gi", "1e3", "8G", "2k"])
def test_quantities_are_those_of_kubernetes(amount: int | str) -> None:
    job = check_job(good_job(spec__phases__0__resources={"limits": {"memory": amount}}))
    assert job.spec.phases[0].resources.limits == {"memory": amount}


def test_another_kind_is_refused() -> None:
    with pytest.raises(InvalidJob, match="use pseudoreal"):
        check_job({"apiVersion": "batch/v1", "kind": "Job"})
