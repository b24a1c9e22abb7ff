"""The generated CustomResourceDefinition follows the conventions of Kubernetes APIs, and each rule can fail."""

import copy
from dataclasses import dataclass

import pytest
from pseudoreal_api.publish.crd import custom_resource_definition

from tests.unit.contract.support.linter import RULES, Json, fields

VERSION: Json = custom_resource_definition()["spec"]["versions"][0]

_PHASE_OF_TRAINING = "a phase of training, the subject of this API; the job's own state is in conditions"
_AS_IN_CORE = "as in core/v1"
_TYPE = "a name of a number format, as torch and everybody writes it"
_MOMENT = "a moment that reads as a sentence: since when, until when"

EXCEPTIONS = {
    ("enums", "spec.precision.compute"): _TYPE,
    ("enums", "spec.data.sources[].dtype"): _TYPE,
    ("enums", "spec.data.validation.sets[].dtype"): _TYPE,
    ("minlength", "spec.pod.env[].value"): "a variable may be empty, as in core/v1",
    ("minlength", "spec.phases[].pod.env[].value"): "a variable may be empty, as in core/v1",
    ("nobools", "spec.suspend"): "as in batch/v1; Kueue sets it",
    ("nobools", "spec.scheduling.queueDelink"): "a delink waits with the phases or it does not",
    ("nobools", "spec.network.hostNetwork"): _AS_IN_CORE,
    ("nobools", "status.phases[].discards[].continued"): "written and read by the operator alone",
    ("nomaps", "spec.phases[].resources.limits"): _AS_IN_CORE,
    ("nomaps", "spec.phases[].resources.requests"): _AS_IN_CORE,
    ("nophase", "spec.phases"): _PHASE_OF_TRAINING,
    ("nophase", "spec.requests[].phase"): _PHASE_OF_TRAINING,
    ("nophase", "status.phases"): _PHASE_OF_TRAINING,
    ("nophase", "status.currentPhase"): _PHASE_OF_TRAINING,
    ("nophase", "status.elastic.phaseName"): _PHASE_OF_TRAINING,
    ("nophase", "status.placement.phaseName"): _PHASE_OF_TRAINING,
    ("nophase", "status.spares.phaseName"): _PHASE_OF_TRAINING,
    ("nophase", "status.restartsInPlace.phase"): _PHASE_OF_TRAINING,
    ("nophase", "status.transition.fromPhase"): _PHASE_OF_TRAINING,
    ("nophase", "status.transition.toPhase"): _PHASE_OF_TRAINING,
    ("nophase", "status.progress.phaseRemainingSeconds"): _PHASE_OF_TRAINING,
    ("notimestamp", "status.activeSince"): _MOMENT,
    ("notimestamp", "status.blockedSince"): _MOMENT,
    ("notimestamp", "status.elastic.growAfter"): _MOMENT,
    ("notimestamp", "status.elastic.since"): _MOMENT,
    ("notimestamp", "status.queuedSince"): _MOMENT,
    ("notimestamp", "status.restartAfter"): _MOMENT,
    ("notimestamp", "status.transition.deadline"): _MOMENT,
}
"""(rule, field) -> the reason why the rule does not apply to the field."""


@dataclass(frozen=True)
class Defect:
    """Changes laid over a field's schema, and the field that the rule then reports.

    An empty `at` changes the whole version; the value None deletes a key.
    """

    at: str
    changes: Json
    found: str


def _added(name: str, schema: Json | None = None) -> Defect:
    """Return a defect that adds a field with this name to the spec."""
    told = {"type": "string", "maxLength": 9, "minLength": 1, "description": f"{name} is there. Omitted: it is not."}
    return Defect("spec", {"properties": {name: told | (schema or {})}}, f"spec.{name}")


DEFECTS = {
    "arrayofstruct": Defect("spec.restart.rules[]", {"required": None}, "spec.restart.rules"),
    "commentstart": Defect("spec.model.layers", {"description": "The number of layers."}, "spec.model.layers"),
    "conditions": Defect("status.conditions[]", {"properties": {"reason": {"maxLength": 64}}}, "status.conditions"),
    "conflictingmarkers": Defect("spec.network.sharedMemory", {"type": "string"}, "spec.network.sharedMemory"),
    "defaultorrequired": Defect("spec.model.layers", {"default": 8}, "spec.model.layers"),
    "dependenttags": Defect("spec.requests", {"x-kubernetes-list-map-keys": None}, "spec.requests"),
    "duplicatemarkers": Defect("spec.hang.action", {"enum": ["Fail", "Fail"]}, "spec.hang.action"),
    "enums": Defect("spec.hang.action", {"enum": ["Fail", "rollBack"]}, "spec.hang.action"),
    "integers": Defect("status.execution", {"format": "uint32"}, "status.execution"),
    "jsontags": _added("ib_adapters"),
    "maxlength": Defect("status.phases[].discards", {"maxItems": None}, "status.phases[].discards"),
    "minlength": Defect("spec.pod.image", {"minLength": None}, "spec.pod.image"),
    "nobools": _added("preflight", {"type": "boolean"}),
    "nodurations": _added("saveTimeout"),
    "nofloats": _added("learningRate", {"type": "number"}),
    "nomaps": _added("labels", {"type": "object", "additionalProperties": {"type": "string", "maxLength": 9}}),
    "nonullable": Defect("spec.pod.image", {"nullable": True}, "spec.pod.image"),
    "nophase": Defect("status", {"properties": {"phase": {"type": "string"}}}, "status.phase"),
    "noreferences": _added("secretReference"),
    "notimestamp": _added("savedTimestamp"),
    "optionalfields": Defect("spec.pod.image", {"description": "image is the trainer image."}, "spec.pod.image"),
    "optionalorrequired": Defect("spec.model.attention", {"required": ["head"]}, "spec.model.attention"),
    "requiredfields": Defect("spec.requests[].id", {"minLength": None}, "spec.requests[].id"),
    "ssatags": Defect("spec.network.networks", {"x-kubernetes-list-type": None}, "spec.network.networks"),
    "statusoptional": Defect("status", {"required": ["state"]}, "status.state"),
    "statussubresource": Defect("", {"subresources": None}, "status"),
}


@pytest.mark.parametrize("name", RULES)
def test_the_contract_keeps_the_rule(name: str) -> None:
    assert [path for path in RULES[name](VERSION) if (name, path) not in EXCEPTIONS] == []


@pytest.mark.parametrize("name", RULES)
def test_the_rule_finds_a_defect(name: str) -> None:
    defect = DEFECTS[name]
    found = list(RULES[name](_with(VERSION, defect)))
    assert defect.found in found
    assert (name, defect.found) not in EXCEPTIONS


@pytest.mark.parametrize(("name", "path"), EXCEPTIONS)
def test_the_exception_is_needed(name: str, path: str) -> None:
    assert path in RULES[name](VERSION)


def test_the_rules_look_at_every_field() -> None:
    paths = [field.path for field in fields(VERSION)]
    assert len(paths) == len(set(paths)) > 200
    assert {"spec.phases[].offload.homes[].unit", "spec.phases[].resources.limits{}"} <= set(paths)


def _with(version: Json, defect: Defect) -> Json:
    changed = copy.deepcopy(version)
    node = changed
    if defect.at:
        node = next(field.schema for field in fields(changed) if field.path == defect.at)
    _lay_over(node, defect.changes)
    return changed


def _lay_over(node: Json, changes: Json) -> None:
    for key, value in changes.items():
        if value is None:
            del node[key]
        elif isinstance(value, dict):
            _lay_over(node.setdefault(key, {}), value)
        else:
            node[key] = value
