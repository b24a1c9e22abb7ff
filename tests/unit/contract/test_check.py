"""The local check rejects the same jobs as the API server, with the same sentences for the rules across fields."""

import pytest
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.spec import check
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJobSpec
from pseudoreal_api.spec.rules.job import METADATA_RULES, SPEC_RULES
from pseudoreal_api.spec.rules.rule import Rule

from tests.support.jobs import BadJob, GoodJob, bad_jobs, good_job, minimal_job, other_good_jobs


def test_a_good_job_passes() -> None:
    assert check_job(good_job()).spec.phases[1].workers == 2


@pytest.mark.parametrize("good", other_good_jobs(), ids=lambda good: good.name)
def test_other_good_jobs_pass(good: GoodJob) -> None:
    check_resolvable(check_job(good.body).spec)


def test_a_model_data_and_phases_are_enough() -> None:
    """Without a named claim, one is created for the job."""
    body = minimal_job()
    assert body["spec"].keys() == {"model", "data", "phases"}
    spec = check_job(body).spec
    check_resolvable(spec)
    volume = spec.checkpoint.storage.mounted
    assert volume is not None
    assert (volume.claim_name, volume.mount_path, volume.retention_policy) == (None, "/checkpoints", "Retain")


@pytest.mark.parametrize("bad", bad_jobs(), ids=lambda bad: bad.name)
def test_a_bad_job_is_refused(bad: BadJob) -> None:
    with pytest.raises(InvalidJob) as refused:
        check_job(bad.body)
    for piece in bad.says:
        assert piece.lower() in str(refused.value).lower()


def test_each_rule_refuses_a_bad_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that refuses no job of tests/data/jobs.yaml is tested nowhere; write such a job below `bad`."""
    broken: set[Rule] = set()
    evaluate = check.broken_rules

    def evaluate_all(metadata: JobMetadata, spec: PseudoRealJobSpec) -> dict[Rule, str]:
        found = evaluate(metadata, spec)
        broken.update(found)
        return found

    monkeypatch.setattr(check, "broken_rules", evaluate_all)
    for bad in bad_jobs():
        with pytest.raises(InvalidJob):
            check_job(bad.body)
    assert [rule.message for rule in (*SPEC_RULES, *METADATA_RULES) if rule not in broken] == []


@pytest.mark.parametrize("amount", [0, 1, "1", "500m", "1.5", "16Gi", "1e3", "8G", "2k"])
def test_quantities_are_those_of_kubernetes(amount: int | str) -> None:
    job = check_job(good_job(spec__phases__0__resources={"limits": {"memory": amount}}))
    assert job.spec.phases[0].resources.limits == {"memory": amount}


def test_another_kind_is_refused() -> None:
    with pytest.raises(InvalidJob, match="use pseudoreal"):
        check_job({"apiVersion": "batch/v1", "kind": "Job"})
