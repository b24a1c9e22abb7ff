"""Failed requests become one sentence and an exit code."""

import json
from typing import Any

import pytest
from pseudoreal.errors import Conflict, Rejected, Target, error_of_response, unreachable
from pseudoreal_client.commands.options import exit_status
from pseudoreal_trainer.cli.common import ExitStatus

GET = Target("get", "PseudoRealJob", "llm", "team")
LIST = Target("list", "pseudorealjobs", "", None)
CREATE = Target("create", "PseudoRealJob", "llm", "team")
QUOTA = 'pseudorealjobs "llm" is forbidden: exceeded quota: small, requested: 1, used: 1, limited: 1'
CASES: dict[str, tuple[int, Any, Target, ExitStatus, str]] = {
    "no credentials": (401, {"message": "Unauthorized"}, GET, ExitStatus.FORBIDDEN, "renew your credentials"),
    "no right": (403, {"reason": "Forbidden", "message": "no"}, GET, ExitStatus.FORBIDDEN, "role `view` in namespace"),
    "no right to create": (403, {"reason": "Forbidden", "message": "no"}, CREATE, ExitStatus.FORBIDDEN, "role `edit`"),
    "no right to all": (403, {"reason": "Forbidden", "message": "no"}, LIST, ExitStatus.FORBIDDEN, "with -n"),
    "a quota": (403, {"reason": "Forbidden", "message": QUOTA}, CREATE, ExitStatus.FAILED, "exceeded quota: small"),
    "not installed": (404, "404 page not found\n", LIST, ExitStatus.NOT_INSTALLED, "helm install"),
    "no such job": (404, {"details": {"name": "llm"}}, GET, ExitStatus.NOT_FOUND, "no PseudoRealJob llm in namespace"),
    "no such namespace": (404, {"details": {"name": "team"}}, CREATE, ExitStatus.NOT_FOUND, "no namespace team"),
    "taken": (409, {"reason": "AlreadyExists"}, CREATE, ExitStatus.FAILED, "already"),
    "overload": (429, {"message": "slow down"}, GET, ExitStatus.FAILED, "slow down"),
    "no JSON": (503, "<html>\x1b[31m", GET, ExitStatus.FAILED, "<html>␛[31m"),
    "JSON that is no object": (500, [1], GET, ExitStatus.FAILED, "500"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failed_request_is_one_sentence_with_its_exit_code(name: str) -> None:
    code, said, asked, status, words = CASES[name]
    refusal = error_of_response(code, said if isinstance(said, str) else json.dumps(said), asked)
    assert exit_status(refusal) == status
    assert words in refusal.message
    assert "\n" not in refusal.message


def test_status_409_of_a_patch_is_a_conflict() -> None:
    said = json.dumps({"reason": "Conflict", "message": "the object has been modified"})
    assert isinstance(error_of_response(409, said, Target("patch", "PseudoRealJob", "llm", "team")), Conflict)


def test_a_rejected_object_has_the_fields_of_its_causes() -> None:
    causes = [
        {"field": "spec.phases[0].workers", "message": "Invalid value: 0: must be greater"},
        {"field": "spec", "message": 'Invalid value: "object": spec.model.layers 3 is odd'},
        {"field": "spec", "message": "Invalid value: spec.model.layers 5 is odd"},  # Kubernetes 1.37
        {"field": "<nil>", "message": "alone"},
    ]
    said = json.dumps({"message": "is invalid", "details": {"causes": causes}})
    refusal = error_of_response(422, said, CREATE)
    assert isinstance(refusal, Rejected)
    assert refusal.causes == [
        "spec.phases[0].workers: Invalid value: 0: must be greater",
        "spec.model.layers 3 is odd",
        "spec.model.layers 5 is odd",
        "alone",
    ]
    assert exit_status(refusal) == 78


def test_a_job_that_the_policy_refuses_has_a_cause_for_each_broken_rule() -> None:
    name = "'pseudorealjobs.pseudoreal.dev'"
    message = (
        f"ValidatingAdmissionPolicy {name} with binding {name} denied request: a 1 must be 2; change it | b is odd"
    )
    refusal = error_of_response(422, json.dumps({"details": {"causes": [{"message": message}]}}), CREATE)
    assert isinstance(refusal, Rejected)
    assert refusal.causes == ["a 1 must be 2; change it", "b is odd"]


def test_unreachable_cluster_is_named_by_its_host() -> None:
    refusal = unreachable("https://far:6443", GET, OSError("refused"))
    assert "the cluster at https://far:6443 does not answer (get PseudoRealJob: refused)" in refusal.message
    assert exit_status(refusal) == 3
