"""Jobs that the API server stored with the definition of release 0.3.0 live on under the definition of this one."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus

from tests import released
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("admin")]

Json = dict[str, Any]

FOLDER = Path(__file__).parents[1] / "data" / "crds"
OLD_GROUP = "before.example.dev"
"""Group of a definition beside the one that other tests use."""
JOBS: list[Json] = list(yaml.safe_load_all((FOLDER / "0.3.0-jobs.yaml").read_text()))
_NAMES = count()


def _beside(definition: Json) -> Any:
    names = {"kind": "OldJob", "listKind": "OldJobList", "plural": PLURAL, "singular": "oldjob"}
    return definition | {
        "metadata": {"name": f"{PLURAL}.{OLD_GROUP}"},
        "spec": definition["spec"] | {"group": OLD_GROUP, "names": names},
    }


class Stored:
    """Jobs stored under the definition of release 0.3.0, which is replaced by `upgrade`."""

    def __init__(self, api: client.ApiClient) -> None:
        self._custom, self._definitions = client.CustomObjectsApi(api), client.ApiextensionsV1Api(api)
        self._name = f"{PLURAL}.{OLD_GROUP}"

    def install(self) -> None:
        old = yaml.safe_load((FOLDER / "0.3.0.yaml").read_text())
        self._definitions.create_custom_resource_definition(_beside(old))
        self._await_schema(lambda: "served" if self._lists() else None)

    def upgrade(self) -> None:
        new: Any = _beside(custom_resource_definition())
        before: Any = self._definitions.read_custom_resource_definition(self._name)
        new["metadata"]["resourceVersion"] = before.metadata.resource_version
        self._definitions.replace_custom_resource_definition(self._name, new)
        # A field that only the new definition has: without it, the server prunes the field.
        probe = self._body(JOBS[0], "probe")
        probe["spec"]["model"]["family"] = "Llama3"
        dry = {"dry_run": "All"}
        self._await_schema(lambda: self._call("create", body=probe, **dry)["spec"]["model"].get("family"))

    def create(self, job: Json) -> str:
        name = f"stored-{next(_NAMES)}"
        self._call("create", body=self._body(job, name))
        return name

    def read(self, name: str) -> Json:
        return self._call("get", name=name)

    def patch(self, name: str, patch: Json) -> Json:
        return self._call("patch", name=name, body=patch)

    def patch_status(self, name: str, status: Json) -> Json:
        found: Any = self._custom.patch_namespaced_custom_object_status(
            OLD_GROUP, VERSION, "default", PLURAL, name, {"status": status}
        )
        return dict(found)

    def remove(self) -> None:
        self._definitions.delete_custom_resource_definition(self._name)

    def _body(self, job: Json, name: str) -> Json:
        copy: Json = json.loads(json.dumps(job))
        return copy | {"apiVersion": f"{OLD_GROUP}/{VERSION}", "kind": "OldJob", "metadata": {"name": name}}

    def _call(self, verb: str, **arguments: Any) -> Json:
        call = getattr(self._custom, f"{verb}_namespaced_custom_object")
        return dict(call(OLD_GROUP, VERSION, "default", PLURAL, **arguments))

    def _lists(self) -> bool:
        try:
            self._custom.list_namespaced_custom_object(OLD_GROUP, VERSION, "default", PLURAL)
        except client.ApiException:
            return False
        return True

    def _await_schema(self, probe: Callable[[], Any]) -> None:
        wait_for("the schema of the definition", probe, lambda: self._name)


@pytest.fixture(scope="module")
def stored(admin: client.ApiClient) -> Iterator[tuple[Stored, dict[str, str]]]:
    """Definition of this release over stored jobs of release 0.3.0; name in the file -> name of the stored job."""
    api = Stored(admin)
    api.install()
    try:
        names = {job["metadata"]["name"]: api.create(job) for job in JOBS}
        status = released.recorded("0.3.0", "status")
        for name in names.values():
            api.patch_status(name, status)
        api.upgrade()
        yield api, names
    finally:
        api.remove()


@pytest.mark.parametrize("job", sorted(job["metadata"]["name"] for job in JOBS))
def test_stored_job_of_the_release_can_still_be_changed(job: str, stored: tuple[Stored, dict[str, str]]) -> None:
    api, names = stored
    name = names[job]
    before = api.read(name)
    api.patch_status(name, {"state": "Training", "restarts": 1})
    api.patch(name, {"metadata": {"labels": {"team": "blue"}}})
    api.patch(name, {"spec": {"suspend": True}})
    after = api.patch(name, {"spec": {"suspend": False}})
    assert after["status"]["restarts"] == 1
    assert _without_defaults_of(before["spec"], after["spec"]) == before["spec"] | {"suspend": False}
    body = after | {"apiVersion": f"{GROUP}/{VERSION}", "kind": "PseudoRealJob"}
    assert PseudoRealJob.from_object(body).spec.phases
    assert PseudoRealJobStatus.model_validate(after["status"]).restarts == 1


def _without_defaults_of(before: Any, after: Any) -> Any:
    """Return `after` without the fields that `before` does not have: defaults of this release."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: _without_defaults_of(value, after[key]) for key, value in before.items() if key in after}
    if isinstance(before, list) and isinstance(after, list):
        return [_without_defaults_of(*pair) for pair in zip(before, after, strict=True)]
    return after
