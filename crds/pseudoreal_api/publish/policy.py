"""Generates the policy with the rules on a job: `python -m pseudoreal_api.publish.policy DIRECTORY`.

The API server evaluates a definition's rules at every write, also of a status, and each access to a field costs in
proportion to the number of fields beside it. A ValidatingAdmissionPolicy sees the job without its schema, and is
evaluated only when the job itself is written. Of several validations that fail, the API server shows only the first.
So the policy has a single validation, which joins the sentences of all broken rules.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.publish.crd import HEADER
from pseudoreal_api.spec.changes import JOB_CHANGES, SPEC_CHANGES
from pseudoreal_api.spec.rules.job import METADATA_RULES, SPEC_RULES
from pseudoreal_api.spec.rules.rule import SEPARATOR, Rule

FILE_NAME = f"{GROUP}_{PLURAL}_policy.yaml"
NAME = f"{PLURAL}.{GROUP}"
"""Name of the policy and of its binding, and of the definition, with which the two are installed."""
_API_VERSION = "admissionregistration.k8s.io/v1"
_MESSAGE_BYTES = 5 * 1024
"""Maximum size of a message: the API server drops a longer one."""
_CUT_CHARACTERS = 1200
"""Length to which a longer message is cut: CEL cuts by characters, of which each has at most 4 bytes."""
_REMEDY = "run `pseudoreal validate` on the file to see all of them"


def policy() -> dict[str, Any]:
    """Return the policy. Each rule is a variable: its sentence, or an empty text if the job follows it."""
    rules = _sentences("rule", SPEC_RULES, "object.spec") | _sentences("ruleOfJob", METADATA_RULES, "object")
    changes = _sentences("change", SPEC_CHANGES, "object.spec", "oldObject.spec")
    changes |= _sentences("changeOfJob", JOB_CHANGES, "object", "oldObject")
    said = "variables.said"
    variables = rules | changes
    variables["broken"] = (
        f"(({_FIELDS_CHANGE}) ? {_list(rules)} : []) + (request.operation == 'UPDATE' ? {_list(changes)} : [])"
    )
    # A message must be one line.
    variables["said"] = f"variables.broken.filter(s, s != '').join('{SEPARATOR}').replace('\\n', ' ')"
    validation = {
        "expression": "variables.broken.all(s, s == '')",
        "messageExpression": f"size(bytes({said})) <= {_MESSAGE_BYTES} ? {said}"
        f" : {said}.substring(0, {_CUT_CHARACTERS}) + ' ... and more; {_REMEDY}'",
        "message": f"the job breaks rules; {_REMEDY}",
    }
    match = {"apiGroups": [GROUP], "apiVersions": [VERSION], "operations": ["CREATE", "UPDATE"], "resources": [PLURAL]}
    return {
        "apiVersion": _API_VERSION,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [match]},
            "matchConditions": [
                {
                    "name": "spec-changes",
                    "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
                }
            ],
            "variables": [{"name": name, "expression": expression} for name, expression in variables.items()],
            "validations": [validation],
        },
    }


def binding() -> dict[str, Any]:
    return {
        "apiVersion": _API_VERSION,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME, "validationActions": ["Deny"]},
    }


def _sentences(name: str, rules: Sequence[Rule], job: str, before: str = "") -> dict[str, str]:
    """Return the variables of the rules, by name. `job`: replaces `self`; `before`: replaces `oldSelf`."""

    def of_job(expression: str) -> str:
        return re.sub(r"\boldSelf\b", before, re.sub(r"\bself\b", job, expression))

    return {
        f"{name}{number}": f"({of_job(rule.rule)}) ? '' : {of_job(rule.message)}"
        for number, rule in enumerate(rules, 1)
    }


def _list(variables: dict[str, str]) -> str:
    return f"[{', '.join(f'variables.{name}' for name in variables)}]"


_READ = sorted({field for rule in SPEC_RULES for field in re.findall(r"\bself\.(\w+)", rule.rule)})
_FIELDS_CHANGE = (
    "request.operation == 'CREATE' || [{}].exists(f, dyn(object.spec)[?f] != dyn(oldObject.spec)[?f])".format(
        ", ".join(f"'{field}'" for field in _READ)
    )
)
"""Condition that a field of the spec that rules read changes: a job that was stored before a rule existed can still be
suspended, and get another deadline."""


def to_yaml() -> str:
    return HEADER + yaml.safe_dump_all([policy(), binding()], sort_keys=False, width=120)


if __name__ == "__main__":
    for directory in map(Path, sys.argv[1:]):
        (directory / FILE_NAME).write_text(to_yaml())
