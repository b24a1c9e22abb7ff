"""Processor time that the API server spends on a write of a status: rules cost nothing there."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.base import PLURAL, VERSION
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.spec.rules.job import SPEC_RULES
from pseudoreal_dev.cluster.control_plane import ControlPlane

from tests import released
from tests.support.jobs import good_job
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.solo, pytest.mark.long]

Json = dict[str, Any]

ROUNDS, WRITES = 40, 8
MOST_RATIO = 1.15
"""Maximum cost of a status, divided by its cost under a definition without rules."""


def _bare() -> Json:
    definition = custom_resource_definition()
    del _spec(definition)["properties"]["phases"]["x-kubernetes-validations"]
    return definition


def _with_rules() -> Json:
    """Return the definition with the rules on values in it, as before there was the policy."""
    definition = custom_resource_definition()
    rules = [{"rule": rule.rule, "messageExpression": rule.message} for rule in SPEC_RULES]
    _spec(definition)["x-kubernetes-validations"] = rules
    return definition


def _spec(definition: Json) -> Any:
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


DEFINITIONS: dict[str, Callable[[], Json]] = {
    "bare": _bare,
    "shipped": custom_resource_definition,
    "rules": _with_rules,
}


def test_status_write_costs_what_it_costs_without_rules(admin: client.ApiClient, control_plane: ControlPlane) -> None:
    """The definitions take turns, so that what else runs on the machine disturbs all of them."""
    (server,) = (process.pid for process in control_plane.processes if process.name == "kube-apiserver")
    api, definitions = client.CustomObjectsApi(admin), client.ApiextensionsV1Api(admin)
    costs: dict[str, list[float]] = {name: [] for name in DEFINITIONS}
    status, chance = released.recorded("0.3.0", "status"), Random(0)
    try:
        for name in DEFINITIONS:
            _install(name, definitions, api)
        for turn in range(ROUNDS + 1):
            for name in chance.sample(list(DEFINITIONS), len(DEFINITIONS)):
                before = _processor_seconds(server)
                for number in range(WRITES):
                    written: Json = {"status": status | {"restarts": turn * WRITES + number}}
                    api.patch_namespaced_custom_object_status(_group(name), VERSION, "default", PLURAL, "job", written)
                costs[name].append((_processor_seconds(server) - before) / WRITES)
    finally:
        for name in DEFINITIONS:
            definitions.delete_custom_resource_definition(f"{PLURAL}.{_group(name)}")
    shipped, rules = (
        median(cost / bare for cost, bare in zip(costs[name][1:], costs["bare"][1:], strict=True))
        for name in ("shipped", "rules")
    )
    print({name: f"{1000 * median(found[1:]):.1f} ms" for name, found in costs.items()}, f"{shipped:.2f} {rules:.2f}")
    assert shipped <= MOST_RATIO
    assert rules > MOST_RATIO, "the measurement finds rules in the definition"


def _install(name: str, definitions: client.ApiextensionsV1Api, api: client.CustomObjectsApi) -> None:
    definition: Any = DEFINITIONS[name]()
    names = {"kind": "CostJob", "listKind": "CostJobList", "plural": PLURAL, "singular": "costjob"}
    definition["metadata"] = {"name": f"{PLURAL}.{_group(name)}"}
    definition["spec"] |= {"group": _group(name), "names": names}
    definitions.create_custom_resource_definition(definition)
    body = good_job("job") | {"apiVersion": f"{_group(name)}/{VERSION}", "kind": "CostJob"}

    def create() -> bool:
        try:
            api.create_namespaced_custom_object(_group(name), VERSION, "default", PLURAL, body)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    wait_for("the definition", create)


def _group(name: str) -> str:
    return f"{name}.cost.example.dev"


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process, which Linux counts for each thread in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
