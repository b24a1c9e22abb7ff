"""Types of core/v1 inside a job: their list, their limits, and the local check's sentences about mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.embedded import MOST_MISFITS, embedded_in
from pseudoreal_dev import kubernetes_types

from tests.support.jobs import good_job
from tests.unit.contract.support.linter import fields, is_embedded

Json = dict[str, Any]

VERSION: Json = custom_resource_definition()["spec"]["versions"][0]
TYPED = {field.path: field.schema for field in fields(VERSION) if is_embedded(field.path)}


def test_the_types_are_those_of_the_newest_kubernetes_that_is_known() -> None:
    assert kubernetes_types.FILE.read_text() == kubernetes_types.to_python(), (
        "the file is as written by `make generate`"
    )


def test_nothing_in_a_job_has_any_field_or_any_number_of_entries() -> None:
    for path, node in _nodes("", VERSION["schema"]["openAPIV3Schema"]):
        assert "x-kubernetes-preserve-unknown-fields" not in node, path
        if node.get("type") == "array":
            assert node["maxItems"] <= 1024, path
        if "additionalProperties" in node:
            assert node["maxProperties"] <= 128, path


def _nodes(path: str, node: Json) -> Iterator[tuple[str, Json]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(f"{path}.{name}", child)
    for key, end in (("items", "[]"), ("additionalProperties", "{}")):
        if key in node:
            yield from _nodes(path + end, node[key])


EVERYWHERE: Json = {
    "spec__data": {"path": "/d", "volume": {"nfs": {"server": "a", "path": "/"}}},
    "spec__checkpoint": {
        "storage": {"volume": {"claimTemplate": {"spec": {"storageClassName": "fast"}}}},
        "startFrom": {"type": "HuggingFace", "huggingFace": {"path": "/w", "volume": {"emptyDir": {}}}},
    },
    "spec__pod": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
    "spec__phases__0__pod": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    "spec__phases__1__offload": {"home": "Disk", "volume": {"emptyDir": {"sizeLimit": "1Gi"}}},
}


def test_the_local_check_looks_at_every_embedded_type() -> None:
    found = {_pattern(part.where) for part in embedded_in(check_job(good_job(**EVERYWHERE)).spec)}
    assert found == set(TYPED)


def _pattern(path: str) -> str:
    return "".join(
        "[]" if step.isdecimal() else step for step in path.replace("[", "\0").replace("]", "\0").split("\0")
    )


def pod(**spec: Any) -> Json:
    return {"spec__pod": {"template": {"spec": spec}}}


def trainer(**fields: Any) -> Json:
    return pod(containers=[{"name": "trainer", **fields}])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (pod(nodeselector={"a": "b"}), '"spec.pod.template.spec.nodeselector"; did you mean nodeSelector?'),
        (pod(tolerations=[{"kye": "a"}]), '"spec.pod.template.spec.tolerations[0].kye"; did you mean key?'),
        (pod(xyz=1), 'unknown field "spec.pod.template.spec.xyz"; remove it'),
        ({"spec__pod": {"template": {"metadata": {"name": "x"}}}}, 'unknown field "spec.pod.template.metadata.name"'),
        ({"spec__pod": {"template": {"status": {}}}}, 'unknown field "spec.pod.template.status"'),
        (
            {"spec__phases__1__pod": {"template": {"spec": {"hostnetwork": True}}}},
            'unknown field "spec.phases[1].pod.template.spec.hostnetwork"; did you mean hostNetwork?',
        ),
        (pod(containers=5), "spec.pod.template.spec.containers: must be of type array, and is of type integer"),
        (pod(nodeSelector={"a": 1}), "spec.nodeSelector.a: must be of type string, and is of type integer; put 1 in"),
        (trainer(args=[None]), "containers[0].args[0]: must be of type string, and is of type null; remove it"),
        (trainer(resources={"limits": {"cpu": 0.5}}), "cpu: must be of type integer or string, and is"),
        (trainer(resources={"limits": {"cpu": "9" * 65}}), "limits.cpu: has 65 characters, and can have at most 64"),
        (pod(containers=[{"image": "x"}]), "spec.pod.template.spec.containers[0].name: Required value"),
        (pod(volumes=[{"name": f"v{i}"} for i in range(129)]), "Too many: 129: must have at most 128 items"),
        (pod(nodeSelector={str(i): "x" for i in range(65)}), "Too many: 65: must have at most 64 items"),
        ({"spec__data": {"path": "/d", "volume": {"nsf": {}}}}, '"spec.data.volume.nsf"; did you mean nfs?'),
        (
            {"spec__pod": {"env": [{"name": "A", "valueFrom": {"secretRef": {}}}]}},
            'unknown field "spec.pod.env[0].valueFrom.secretRef"',
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named(changes: Json, says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        check_job(good_job(**changes))
    assert says in str(refused.value)


def test_sentences_are_few_and_short_whatever_is_wrong() -> None:
    with pytest.raises(InvalidJob) as refused:
        check_job(good_job(**pod(**{f"{number}{'x' * 5000}": {} for number in range(2000)})))
    lines = str(refused.value).splitlines()
    assert len(lines) == MOST_MISFITS
    assert max(map(len, lines)) < 200


def test_a_deep_value_costs_nothing() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidJob, match=r"spec\.pod\.template\.spec\.a"):
        check_job(good_job(**pod(a=deep, nodeSelector={"a": deep})))


NULLS: Json = {
    "securityContext": {"runAsUser": None},
    "priorityClassName": None,
    "containers": [{"name": "trainer", "env": None, "securityContext": None, "resources": {"limits": None}}],
}


def test_a_null_takes_away_what_the_operator_sets() -> None:
    check_resolvable(check_job(good_job(**pod(**NULLS))).spec)
