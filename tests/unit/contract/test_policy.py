"""The policy with the rules across fields, as it is written; tests/integration/test_contract.py runs it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pseudoreal_api.publish import crd, policy
from pseudoreal_api.spec.changes import JOB_CHANGES, SPEC_CHANGES
from pseudoreal_api.spec.rules.job import METADATA_RULES, SPEC_RULES

Json = dict[str, Any]

POLICY, BINDING = policy.policy(), policy.binding()
APPLY_BYTES = 262_144 - 4096
"""Bytes that `kubectl apply` can store in an annotation, beside other annotations."""


def test_the_policy_judges_jobs_and_not_their_statuses() -> None:
    """A resource without a subresource matches no subresource."""
    (rule,) = POLICY["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pseudorealjobs"], ["CREATE", "UPDATE"])
    assert (POLICY["spec"]["failurePolicy"], BINDING["spec"]["validationActions"]) == ("Fail", ["Deny"])
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"] == "pseudorealjobs.pseudoreal.dev"


def test_each_rule_is_asked() -> None:
    expressions = {variable["name"]: variable["expression"] for variable in POLICY["spec"]["variables"]}
    asked = re.findall(r"variables\.(\w+)", expressions["broken"])
    assert len(asked) == len(set(asked)) == sum(map(len, (SPEC_RULES, METADATA_RULES, SPEC_CHANGES, JOB_CHANGES)))
    assert {*asked, "broken", "said"} == expressions.keys()
    assert not re.search(r"\b(self|oldSelf)\b", str(expressions))


def test_the_definition_has_one_rule_which_the_operator_relies_on() -> None:
    """Each access to a field costs at each write of a status: more than one rule needs a measurement
    (tests/integration/test_status_cost.py)."""
    found = [*_validations("", crd.custom_resource_definition())]
    assert [path for path, _ in found] == [".phases"]
    assert "self[i].name == oldSelf[i].name" in found[0][1]["rule"]


def _validations(path: str, node: Any) -> Iterator[tuple[str, Json]]:
    """Yield the name of the field and the validation."""
    if isinstance(node, list):
        for item in node:
            yield from _validations(path, item)
    if isinstance(node, dict):
        yield from ((path, validation) for validation in node.get("x-kubernetes-validations", []))
        for key, value in node.items():
            yield from _validations(f".{key}", value)


@pytest.mark.parametrize("manifest", [POLICY, crd.custom_resource_definition()], ids=["policy", "definition"])
def test_kubectl_can_apply_it_on_the_client_side(manifest: Json) -> None:
    assert len(json.dumps(manifest, separators=(",", ":"))) < APPLY_BYTES
