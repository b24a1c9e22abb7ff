"""The chart gives the operator no unused right. Runs after all other tests of this folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import chart
from tests.support.depth import DEPTH
from tests.support.names import OPERATOR

pytestmark = pytest.mark.integration

Json = dict[str, Any]
Right = tuple[str, str, str]

WITHOUT_REQUEST = {
    ("pseudoreal.dev", "pseudorealjobs/finalizers", "update"),
    ("pseudoreal.dev", "pseudorealjobs", "patch"),
}
"""Rights without requests of their own: the first is checked by an admission plugin when a child gets an owner; the
second removed the finalizer of releases up to 0.2, which this release does not do any more."""
TOO_NEW = {("scheduling.k8s.io", "podgroups", verb) for verb in ("get", "create")}
"""Rights on PodGroups of Kubernetes 1.37, not served by this API server."""


def given(rules: list[Json]) -> Iterator[Right]:
    """Yield API group, resource and verb of each right."""
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from ((group, resource, verb) for verb in rule["verbs"])


def used(log: Path) -> set[Right]:
    found = set()
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if entry["user"]["username"] == OPERATOR and "objectRef" in entry:
            what = entry["objectRef"]
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            found.add((what.get("apiGroup", ""), resource, entry["verb"]))
    return found


def test_every_right_of_the_operator_is_used(audit_log: Path, request: pytest.FixtureRequest) -> None:
    folder = Path(__file__).parent
    run = {item.path for item in request.session.items}
    # Those beside neighbours are long, and the operator asks for nothing there that it does not ask for elsewhere.
    wanted = [path for path in folder.rglob("test_*.py") if DEPTH.is_deep or path.parent.name != "neighbours"]
    missing = sorted(path.name for path in wanted if path not in run)
    if missing:
        pytest.skip(f"what is used shows only when all tests of {folder.name} run; {missing[0]} does not")
    rendered = chart.render()
    roles = [("ClusterRole", chart.WIDE), ("ClusterRole", f"{chart.WIDE}-reviews")]
    roles += [("Role", f"{chart.RELEASE}-lease")]
    rights = {right for kind, name in roles for right in given(chart.find(rendered, kind, name)["rules"])}
    assert rights - WITHOUT_REQUEST - TOO_NEW - used(audit_log) == set()
