"""The CustomResourceDefinition on a real API server: refusals, defaults, and its presentation in kubectl."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.publish.crd import custom_resource_definition
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.core_types import TYPES
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.rules.rule import SEPARATOR
from pseudoreal_dev import kubernetes_types

from tests import released
from tests.support.jobs import BadJob, GoodJob, bad_jobs, example_jobs, good_job, minimal_job, other_good_jobs
from tests.support.kubectl import Kubectl
from tests.support.minors import since
from tests.support.patience import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.minors, pytest.mark.usefixtures("admin")]
Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer of the API server: the object, or the refusal."""

    body: Json
    refusal: str = ""


@dataclass(frozen=True)
class Jobs:
    """Requests like kubectl's, without the start time of kubectl."""

    api: client.CustomObjectsApi

    def create(self, body: Json, *, dry_run: bool = False) -> Answer:
        dry: Any = {"dry_run": "All"} if dry_run else {}
        return self._ask(self.api.create_namespaced_custom_object, body=body, field_validation="Strict", **dry)

    def replace(self, body: Json) -> Answer:
        name = body["metadata"]["name"]
        return self._ask(self.api.replace_namespaced_custom_object, name=name, body=body, field_validation="Strict")

    def write_status(self, name: str, status: Json) -> Json:
        patch = self.api.patch_namespaced_custom_object_status
        answer = self._ask(patch, name=name, body={"status": status})
        assert answer.refusal == ""
        return answer.body

    def _ask(self, call: Callable[..., Any], **arguments: Any) -> Answer:
        try:
            return Answer(call(GROUP, VERSION, "default", PLURAL, **arguments))
        except client.ApiException as error:
            return Answer({}, json.loads(error.body or "{}")["message"])


@pytest.fixture(scope="module")
def jobs(admin: client.ApiClient) -> Jobs:
    return Jobs(client.CustomObjectsApi(admin))


@pytest.mark.parametrize("bad", bad_jobs(), ids=lambda bad: bad.name)
def test_an_invalid_job_is_rejected_with_its_field_and_values(jobs: Jobs, bad: BadJob) -> None:
    refusal = jobs.create(bad.body, dry_run=True).refusal
    assert refusal
    for piece in bad.says:
        assert piece.lower() in refusal.lower()


def test_all_mistakes_are_shown_at_once(jobs: Jobs) -> None:
    changes: Change = {"spec__model__layers": 7, "spec__hang": {"stragglerFactor": "0.5"}}
    with pytest.raises(InvalidJob) as local:
        check_job(good_job("no.label", **changes))
    sentences = str(local.value).splitlines()
    assert len(sentences) == 4
    assert jobs.create(good_job("no.label", **changes), dry_run=True).refusal.endswith(SEPARATOR.join(sentences))


def test_a_job_may_leave_its_name_to_the_api_server(jobs: Jobs) -> None:
    body = good_job()
    body["metadata"] = {"generateName": "good-"}
    assert jobs.create(body, dry_run=True).refusal == ""
    assert jobs.create(body | {"metadata": {"generateName": "a.b-"}}, dry_run=True).refusal


@pytest.mark.parametrize("letter", ["a", "ß", "\U0001f600"])
def test_sentences_with_long_values_are_cut(jobs: Jobs, letter: str) -> None:
    """The API server drops a message of more than 5 KiB, or of more than one line."""
    path = f"first\n{letter * 1500}"
    changes: Change = {"spec__data": {"path": path, "volume": CLAIM}, "spec__model__layers": 7}
    weights = {"type": "HuggingFace", "huggingFace": {"path": path, "volume": CLAIM}}
    refusal = jobs.create(good_job(**changes, spec__checkpoint__startFrom=weights), dry_run=True).refusal
    assert "spec.phases[pseudo].sharing.blocks 2 must divide spec.model.layers 7" in refusal or "and more" in refusal
    assert ("`pseudoreal validate`" in refusal) == (letter != "a")


@pytest.mark.parametrize("body", example_jobs(), ids=lambda body: body["metadata"]["name"])
def test_the_examples_are_accepted(jobs: Jobs, body: Json) -> None:
    answer = jobs.create(body, dry_run=True)
    assert answer.refusal == ""
    # Nothing that a user wrote is pruned or changed.
    assert _spec(answer.body) == _spec(body)


def test_the_defaults_of_the_api_server_equal_the_defaults_of_the_models(jobs: Jobs) -> None:
    answer = jobs.create(good_job(), dry_run=True)
    assert _spec(answer.body) == _spec(good_job())
    # The server itself filled them in: the user's file says nothing of these.
    assert answer.body["spec"]["phases"][0]["parallelism"]["schedule"] == "Layered"


def test_a_minimal_job_gets_its_defaults(jobs: Jobs) -> None:
    answer = jobs.create(minimal_job(), dry_run=True)
    assert _spec(answer.body) == _spec(minimal_job())
    assert answer.body["spec"]["checkpoint"]["storage"] == {"type": "Volume"}
    assert answer.body["spec"]["phases"][1]["pod"] == {"env": [], "template": {}}
    # It depends on the number of ranks, which the schema does not know; what an earlier release stored stays.
    assert "stateSharding" not in answer.body["spec"]["phases"][1]["parallelism"]


def test_a_job_of_an_earlier_release_keeps_its_state_sharding(jobs: Jobs) -> None:
    """Up to 0.3.0 the API server stored the default None, in phases with layout Auto as well."""
    for layout, batch in (
        ({"replicas": 1}, {"sequences": 8, "microBatches": 2}),
        ({"layout": "Auto"}, {"sequences": 8}),
    ):
        stored = layout | {"stateSharding": "None"}
        body = good_job("stored", spec__phases__1__parallelism=stored, spec__phases__1__batch=batch)
        answer = jobs.create(body, dry_run=True)
        assert answer.refusal == ""
        assert answer.body["spec"]["phases"][1]["parallelism"]["stateSharding"] == "None"


@pytest.mark.parametrize("good", other_good_jobs(), ids=lambda good: good.name)
def test_other_good_jobs_are_accepted(jobs: Jobs, good: GoodJob) -> None:
    answer = jobs.create(good.body, dry_run=True)
    assert answer.refusal == ""
    assert _spec(answer.body) == _spec(good.body)


@since("1.31")
def test_jobs_are_found_by_their_state(jobs: Jobs) -> None:
    for name, state in (("lost", "Failed"), ("done", "Complete")):
        assert jobs.create(good_job(name, spec__suspend=True)).refusal == ""
        jobs.write_status(name, {"state": state})
    found: Any = jobs.api.list_namespaced_custom_object(
        GROUP, VERSION, "default", PLURAL, field_selector="status.state=Failed"
    )
    names = [job["metadata"]["name"] for job in found["items"]]
    assert "lost" in names
    assert "done" not in names


def _spec(body: Json) -> PseudoRealJobSpec:
    return PseudoRealJob.from_object(body).spec


Change = dict[str, Any]


@pytest.fixture
def change(jobs: Jobs) -> Callable[..., str]:
    """Function for creating the good job with the first changes; returns the API server's refusal of the second
    changes, empty if it accepts them."""
    name = f"changed-{next(_NUMBERS)}"

    def run(before: Change, after: Change, *, ended: bool = False) -> str:
        made = jobs.create(good_job(name, **before))
        assert made.refusal == ""
        if ended:
            made = Answer(jobs.write_status(name, {"completionTime": "2026-11-23T00:00:00Z"}))
        body = good_job(name, **after)
        body["metadata"]["resourceVersion"] = made.body["metadata"]["resourceVersion"]
        return jobs.replace(body).refusal

    return run


_NUMBERS = count()

PSEUDO, REAL = good_job()["spec"]["phases"]
MORE: Json = {"name": "more", "until": {"step": 30}, "batch": {"sequences": 8}}
ADDED: Change = {"spec__phases": [PSEUDO, REAL, MORE]}
LONGER: Change = {"spec__phases__1__until": {"step": 25}}
PAUSED: Change = {"spec__suspend": True}
WHERE: list[Change] = [
    {"spec__pod": {"image": "trainer:2"}},
    {"spec__pod": {"template": {"spec": {"nodeSelector": {"gpu": "h100"}}}}},
    {"spec__phases__0__pod": {"env": [{"name": "KEY", "value": "1"}]}},
    {"spec__phases__1__pod": {"template": {"metadata": {"labels": {"a": "b"}}}}},
    {"spec__phases__1__resources": {"limits": {"memory": "2Gi"}}},
    {"spec__scheduling": {"queue": "night"}},
    {"spec__scheduling": {"queue": "night", "workloadPriorityClassName": "urgent"}},
    {"spec__scheduling": {"topology": {"required": "topology.kubernetes.io/zone"}}},
    {"spec__scheduling": {"gang": {"policy": "Native"}}},
    {"spec__logging": {"sinks": [{"type": "TensorBoard"}]}},
]
"""Changes of fields about the placement of pods and the destination of figures."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ADDED),
        ({}, LONGER),
        (
            {},
            {
                "spec__phases": [
                    PSEUDO,
                    REAL | {"until": {"step": 25}},
                    MORE,
                    MORE | {"name": "x", "until": {"step": 40}},
                ]
            },
        ),
        ({"spec__phases__1__until": {"tokens": 9000}}, {"spec__phases__1__until": {"tokens": 9001}}),
        ({}, {"spec__restart": {"maxRestarts": 9}, "spec__deadlines": {"activeSeconds": 60}}),
        ({}, {"spec__hang": {"action": "Report"}, "spec__cleanUp": {"children": "Delete"}}),
        ({}, {"spec__requests": [{"id": "1", "type": "FinishPhase", "phase": "pseudo"}]}),
        ({}, PAUSED),
        *((PAUSED, PAUSED | where) for where in WHERE),
        *((PAUSED, where) for where in WHERE),
        (PAUSED, LONGER),
    ],
)
def test_allowed_changes_of_a_job_are_accepted(change: Callable[..., str], before: Change, after: Change) -> None:
    assert change(before, after) == ""


LABELLED: Change = {"spec__pod": {"template": {"metadata": {"labels": {"a": "b"}}}}}
SELECTED: Change = {"spec__pod": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}
CLAIM: Json = {"persistentVolumeClaim": {"claimName": "text"}}
HOST: Json = {"hostPath": {"path": "/"}}
OTHER: Json = {"iscsi": {"targetPortal": "there", "iqn": "iqn.2026-01.example:text", "lun": 0}}
ORDER = "phases may only be added at the end; a phase cannot be removed, moved or renamed"
UNTIL = "spec.phases[].until: only step and tokens of the last phase may change, and may only grow"
RUNS = "is immutable while the job runs; set spec.suspend to true first"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"spec__phases": [PSEUDO]}, ORDER),
        ({}, {"spec__phases": [PSEUDO, MORE]}, ORDER),
        ({}, {"spec__phases": [MORE | {"sharing": {"blocks": 1}, "until": {"step": 5}}, PSEUDO, REAL]}, ORDER),
        ({}, {"spec__phases__0__name": "renamed"}, ORDER),
        ({}, {"spec__phases__0__until": {"step": 12}}, UNTIL),
        ({}, {"spec__phases__1__until": {"step": 19}}, UNTIL),
        ({}, {"spec__phases__1__until": {"step": 20, "tokens": 9000}}, UNTIL),
        ({}, {"spec__phases__1__until": {"step": 20, "validationLoss": "1.5"}}, UNTIL),
        ({"spec__phases__1__until": {"step": 20, "tokens": 9000}}, LONGER, UNTIL),
        (ADDED, {"spec__phases": [PSEUDO, REAL | {"until": {"step": 25}}, MORE]}, UNTIL),
        *(({}, where, RUNS) for where in WHERE),
        ({}, PAUSED | WHERE[0], RUNS),
        ({}, {"spec__managedBy": "kueue.x-k8s.io/multikueue"}, "spec.managedBy is immutable"),
        (PAUSED | {"spec__managedBy": "pseudoreal.dev/operator"}, PAUSED, "spec.managedBy is immutable"),
        # As many fields, none of which is in the other: CEL alone takes them for equal.
        (LABELLED, SELECTED, RUNS),
        (SELECTED, LABELLED, RUNS),
    ],
)
def test_forbidden_changes_of_a_job_are_rejected(
    change: Callable[..., str], before: Change, after: Change, says: str
) -> None:
    assert says in change(before, after)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("layers", 4),
        ("growth", {"pattern": "Stack"}),
        ("experts", 2),
        ("sharing", {"blocks": 4}),
        ("workers", 1),
        ("elastic", {"minWorkers": 1}),
        ("spares", 1),
        ("processesPerWorker", 2),
        ("batch", {"sequences": 16}),
        ("mixture", [{"source": "web", "weight": 1}]),
        ("parallelism", {"pipeline": 2}),
        ("activations", {"keep": "All"}),
        ("offload", {"home": "Host"}),
        ("compile", {"mode": "Blocks"}),
    ],
)
@pytest.mark.parametrize("before", [{}, PAUSED], ids=["runs", "suspended"])
def test_fields_that_decide_the_weights_of_a_phase_are_immutable(
    change: Callable[..., str], path: str, value: Any, before: Change
) -> None:
    assert f"spec.phases[].{path} is immutable" in change(before, before | {f"spec__phases__1__{path}": value})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec__model__layers", 16),
        ("spec__data__path", "elsewhere"),
        ("spec__optimizer", {"learningRate": "1e-3"}),
        ("spec__precision", {"compute": "float32"}),
        ("spec__delink", {"optimizerState": "Reset"}),
        ("spec__checkpoint__everySteps", 7),
        ("spec__network", {"mode": "Socket"}),
    ],
)
@pytest.mark.parametrize("before", [{}, PAUSED], ids=["runs", "suspended"])
def test_fields_that_training_depends_on_are_immutable(
    change: Callable[..., str], path: str, value: Any, before: Change
) -> None:
    assert f"spec.{path.split('__')[1]} is immutable" in change(before, before | {path: value})


@pytest.mark.parametrize(("old", "new"), [(CLAIM, HOST), (HOST, CLAIM), (CLAIM, OTHER), (OTHER, HOST)])
@pytest.mark.parametrize("path", ["spec__data", "spec__phases__1__offload"])
def test_the_volume_of_a_job_is_immutable(change: Callable[..., str], path: str, old: Json, new: Json) -> None:
    rest: Json = {"path": "/d"} if path == "spec__data" else {"home": "Disk"}
    assert "is immutable" in change({path: rest | {"volume": old}}, {path: rest | {"volume": new}})


@pytest.mark.parametrize("after", [ADDED, LONGER, PAUSED | LONGER])
def test_a_finished_job_accepts_no_more_phases(change: Callable[..., str], after: Change) -> None:
    assert "the job has ended; to train on, create a job with spec.checkpoint.continueFrom" in change(
        {}, after, ended=True
    )


def test_the_ttl_of_a_finished_job_can_change(change: Callable[..., str]) -> None:
    assert change({}, {"spec__deadlines": {"ttlSecondsAfterFinished": 60}}, ended=True) == ""


@pytest.mark.parametrize("release", released.releases())
def test_the_status_of_a_release_is_kept(jobs: Jobs, release: str) -> None:
    name = f"of-{release.replace('.', '-')}"
    assert jobs.create(good_job(name)).refusal == ""
    status = released.recorded(release, "status")
    assert jobs.write_status(name, status)["status"] == status


def test_the_status_is_a_subresource(kubectl: Kubectl) -> None:
    body = good_job("honest") | {"status": {"state": "Complete"}}
    assert kubectl("apply", "-f", "-", body=body).returncode == 0
    assert "status" not in json.loads(kubectl("get", "prj", "honest", "-o", "json").stdout)


@since("1.31")
def test_core_v1_types_equal_the_published_schema(kubectl: Kubectl) -> None:
    """The API server may be older than the types in the CRD; they then have more fields."""
    document = json.loads(kubectl.said("get", "--raw", "/openapi/v3/api/v1"))
    for name, schema in kubernetes_types.types(document["components"]["schemas"]).items():
        fields = schema.pop("properties")
        assert fields.items() <= TYPES[name]["properties"].items(), name
        assert schema.items() <= TYPES[name].items(), name


_DEEP_MAP, _DEEP_LIST = '{"a":' * 2000 + "{}" + "}" * 2000, "[" * 2000 + "]" * 2000
_EMBEDDED: list[Change] = [
    {"spec__pod": {"template": "?"}},
    {"spec__phases__1__pod": {"template": {"spec": "?"}}},
    {"spec__pod": {"template": {"spec": {"nodeSelector": "?"}}}},
    {"spec__pod": {"template": {"spec": {"containers": [{"name": "trainer", "args": ["?"]}]}}}},
    {"spec__pod": {"env": [{"name": "KEY", "valueFrom": "?"}]}},
    {"spec__data": {"path": "/text", "volume": "?"}},
    {"spec__phases__1__offload": {"home": "Disk", "volume": {"emptyDir": "?"}}},
    {"spec__checkpoint": {"storage": {"volume": {"claimTemplate": {"spec": "?"}}}}},
    {"status": "?"},
]


@pytest.mark.parametrize("deep", [_DEEP_MAP, _DEEP_LIST], ids=["map", "list"])
@pytest.mark.parametrize("place", _EMBEDDED, ids=str)
def test_the_api_server_stores_no_deep_object(kubectl: Kubectl, tmp_path: Path, deep: str, place: Change) -> None:
    """Such an object once crashed every program reading it."""
    (tmp_path / "job").write_text(json.dumps(good_job(**place)).replace('"?"', deep))
    path = f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}?dryRun=All&fieldValidation=Ignore"
    answer = kubectl("create", "--raw", path, "-f", str(tmp_path / "job"))
    assert answer.returncode == 0 or "must be of type" in answer.stderr
    assert '{"a":{"a":' not in answer.stdout


NULLS: Json = {"securityContext": {"runAsUser": None}, "containers": [{"name": "trainer", "securityContext": None}]}


def test_nulls_in_a_pod_template_are_kept(jobs: Jobs) -> None:
    """Nulls remove fields set by the operator."""
    answer = jobs.create(good_job(spec__pod={"template": {"spec": NULLS}}), dry_run=True)
    assert answer.body["spec"]["pod"]["template"]["spec"] == NULLS


@pytest.mark.long
def test_a_job_stored_before_typed_templates_is_read_and_gets_a_status(
    admin: client.ApiClient, kubectl: Kubectl
) -> None:
    """Fields unknown to pods are pruned on reading; a missing required field stays, and does not prevent status
    writes."""
    group = f"old.{GROUP}"
    definition = custom_resource_definition()
    definition["metadata"]["name"] = f"{PLURAL}.{group}"
    definition["spec"] |= {"group": group, "names": {"kind": "OldJob", "plural": PLURAL}}
    (version,) = definition["spec"]["versions"]
    pod = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["pod"]["properties"]
    typed, pod["template"] = pod["template"], {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    kubectl.said("apply", "--server-side", "-f", "-", body=definition)
    api, old = client.CustomObjectsApi(admin), (group, VERSION, "default", PLURAL)
    body = good_job("old") | {"apiVersion": f"{group}/{VERSION}", "kind": "OldJob"}
    lacking: Json = {"volumes": [{"name": "text", "persistentVolumeClaim": {}}]}
    body["spec"]["pod"] = {"template": {"spec": lacking | {"nodeselector": {"a": "b"}}}}
    try:
        wait_for("the old definition", lambda: kubectl("create", "-f", "-", body=body).returncode == 0)
        pod["template"] = typed
        kubectl.said("apply", "--server-side", "-f", "-", body=definition)
        stays = {"spec": lacking}

        def read() -> Json:
            found: Any = api.get_namespaced_custom_object(*old, "old")
            return found["spec"]["pod"]["template"]  # type: ignore[no-any-return]

        wait_for("the type", lambda: read() == stays)
        written: Any = api.patch_namespaced_custom_object_status(*old, "old", {"status": {"state": "Training"}})
        assert written["status"]["state"] == "Training"
        assert PseudoRealJob.from_object(written).spec.pod.template == stays
    finally:
        kubectl.said("delete", "crd", f"{PLURAL}.{group}")


def test_the_crd_fits_client_side_apply(kubectl: Kubectl) -> None:
    """The API server then stores the definition once more in an annotation with a size limit."""
    definition = custom_resource_definition()
    definition["metadata"]["labels"] = {"app.kubernetes.io/instance": "x" * 63}
    assert kubectl("apply", "--dry-run=server", "-f", "-", body=definition).returncode == 0


def test_kubectl_explain_describes_the_fields(kubectl: Kubectl) -> None:
    # The API server publishes a schema moments after it has accepted it.
    wait_for("the schema", lambda: kubectl("explain", "prj.spec.phases").returncode == 0)
    said = " ".join(kubectl("explain", "prj.spec.phases").stdout.split())
    assert "phases are the parts of the training, in order." in said
    assert "sharing says which layers share weights in this phase (a pseudo phase)." in said
    assert "Cosine" in kubectl("explain", "prj.spec.optimizer.schedule").stdout
    assert "nodeSelector" in kubectl("explain", "prj.spec.pod.template.spec").stdout
    assert "imagePullPolicy" in kubectl("explain", "prj.spec.phases.pod.template.spec.containers").stdout


def test_lists_name_the_columns_and_the_categories(kubectl: Kubectl) -> None:
    assert kubectl("apply", "-f", "-", body=good_job("listed")).returncode == 0
    assert kubectl("get", "prj", "listed").stdout.split()[:8] == [
        "NAME", "STATE", "PHASE", "STEP", "LOSS", "PROGRESS", "RESTARTS", "AGE",
    ]  # fmt: skip
    for category in ("all", "training"):
        assert "pseudorealjob.pseudoreal.dev/listed" in kubectl("get", category, "-o", "name").stdout
