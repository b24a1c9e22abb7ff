"""Jobs that break a rule, and templates that cannot be pods, are reported in a condition and an event before any child
is created."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.spec.check import broken_rules
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob
from pseudoreal_api.spec.phase import Phase
from pseudoreal_api.spec.rules.rule import Rule
from pseudoreal_operator.lifecycle import acceptance
from pseudoreal_operator.status.conditions import find
from pydantic import ValidationError

from tests.support.depth import DEPTH
from tests.support.jobs import BadJob, bad_jobs
from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import UID, World, make_job

Json = dict[str, Any]


def trainer(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": "trainer"} | fields]}}


BAD: list[tuple[Json, str]] = [
    ({"metadata": {"labels": {"pseudoreal.dev/phase": "x"}}}, "labels: pseudoreal.dev/phase belongs to the operator"),
    ({"metadata": {"annotations": {"pseudoreal.dev/x": "y"}}}, "annotations: pseudoreal.dev/x belongs to the operator"),
    (trainer(env=[{"name": "RANK", "value": "0"}]), "env: the name RANK is reserved"),
    (trainer(terminationMessagePath="/tmp/x"), "terminationMessagePath: the operator sets it, and relies on it"),
    ({"spec": {"restartPolicy": "OnFailure"}}, "spec.pod.template.spec.restartPolicy: the operator sets it"),
    ({"spec": {"subdomain": "mine"}}, "spec.pod.template.spec.subdomain: the operator sets it"),
]
OF_NO_POD: list[Json] = [
    {"metadata": {"labels": [1]}},
    {"metadata": {"annotations": 5}},
    {"metadata": None},
    {"spec": [1]},
    {"spec": {"containers": 5}},
    {"spec": {"containers": {"name": "trainer"}}},
    {"spec": {"containers": ["trainer"]}},
    trainer(env=5),
    trainer(env={"A": "b"}),
    {"spec": {"affinity": {"nodeAffinity": "gpu"}}},
]
"""Templates that an API server stored before the CRD had the type of a template, and that no pod can have."""
GOOD: list[Json] = [
    {},
    {"metadata": {"labels": None, "annotations": None}},
    {"spec": {"containers": None, "volumes": None, "affinity": None, "restartPolicy": "Never"}},
    trainer(env=None, volumeMounts=None),
    trainer(env=[{"name": "A", "value": "b"}], volumeMounts=[{"name": "v", "mountPath": "/v"}]),
    {"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}},
]


def world_with_template(template: Json) -> World:
    world = World(make_job(spec__pod={"template": template}))
    world.settle()
    return world


@pytest.mark.parametrize(("template", "says"), BAD, ids=str)
def test_template_that_is_no_pod_fails_the_job_with_a_condition_and_an_event(template: Json, says: str) -> None:
    world = world_with_template(template)
    accepted, failed = find(world.status, "Accepted"), find(world.status, "Failed")
    assert accepted
    assert failed
    assert (accepted.status, failed.reason) == ("False", "InvalidSpec")
    assert says in accepted.message == failed.message
    assert list(world.events.values()) == ["Failed"]
    assert world.objects == {}


@pytest.mark.parametrize("template", OF_NO_POD, ids=str)
def test_stored_template_that_is_no_pod_fails_the_job_or_reaches_the_api_server(template: Json) -> None:
    world = World(make_job(spec__pod={"template": template}))
    world.set(network=world.job.spec.network.model_copy(update={"host_network": True}))
    world.carry_out(plan := world.plan())
    failed = find(world.status, "Failed")
    assert plan.dry_run or (failed and "Probably spec.pod.template is not a valid pod template" in failed.message)


@pytest.mark.parametrize("template", GOOD, ids=str)
def test_valid_pod_templates_are_accepted(template: Json) -> None:
    assert find(world_with_template(template).status, "Failed") is None


FIELDS = (
    "metadata", "spec", "labels", "annotations", "containers", "initContainers", "name", "env", "value", "volumes",
    "volumeMounts", "mountPath", "affinity", "nodeAffinity", "podAntiAffinity", "securityContext", "resources",
    "requiredDuringSchedulingIgnoredDuringExecution", "terminationGracePeriodSeconds", "emptyDir", "image",
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(["", "trainer", "Never"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=DEPTH.of(150, 5000), derandomize=not DEPTH.is_deep)
@given(spec=ANYTHING, metadata=ANYTHING, host=st.booleans())
def test_every_template_is_accepted_or_rejected_without_an_error(spec: Any, metadata: Any, host: bool) -> None:
    """A pass never raises an error for a template: the pass would be repeated forever, and no user would see the
    error."""
    world = World(make_job(spec__pod={"template": {"metadata": metadata, "spec": spec}}))
    if host:
        world.set(network=world.job.spec.network.model_copy(update={"host_network": True}))
    world.carry_out(world.plan())
    assert find(world.status, "Accepted") is not None


def _stored(bad: BadJob) -> PseudoRealJob | None:
    """Return the job if an API server without the policy stores it; None if the definition refuses it."""
    try:
        job = PseudoRealJob.from_object(bad.body | {"metadata": bad.body["metadata"] | {"uid": UID, "generation": 1}})
    except ValidationError:
        return None
    return job if broken_rules(job.metadata, job.spec) else None


STORED = [bad for bad in bad_jobs() if _stored(bad)]


def test_most_bad_jobs_of_the_table_break_rules() -> None:
    assert len(STORED) > 100


@pytest.mark.parametrize("bad", STORED, ids=lambda bad: bad.name)
def test_job_that_the_api_server_took_without_the_policy_is_refused_with_the_same_sentences(bad: BadJob) -> None:
    job = _stored(bad)
    assert job
    world = World(job)
    world.settle()
    accepted, failed = find(world.status, "Accepted"), find(world.status, "Failed")
    assert accepted
    assert failed
    assert (accepted.status, failed.reason, world.objects) == ("False", "InvalidSpec", {})
    assert accepted.message == failed.message
    for piece in bad.says:
        assert piece.lower() in accepted.message.lower()


def _accepted(world: World) -> tuple[str, str]:
    condition = find(world.status, "Accepted")
    assert condition
    return condition.status, condition.message


NOT_FINER = "spec.phases[longer].sharing must refine the sharing of phase real: its 2 blocks must be a multiple of 8"


def test_phase_that_breaks_a_rule_is_named_when_it_is_added_and_fails_the_job_when_its_turn_comes() -> None:
    world = run_until(World(make_job()), "pseudo")
    world.set(phases=[*world.job.spec.phases, _phase("longer", 30, sharing={"blocks": 2})])
    world.settle()
    assert _accepted(world)[0] == "False"
    assert NOT_FINER in _accepted(world)[1]
    assert world.status.state == "Training", "the phases before it train on"
    world.run_fairly()
    failed = find(world.status, "Failed")
    assert failed
    assert (failed.reason, [phase.state for phase in world.status.phases]) == (
        "InvalidSpec",
        ["Complete", "Complete", "Failed"],
    )
    assert NOT_FINER in failed.message


def _phase(name: str, step: int, **fields: Any) -> Phase:
    return Phase.model_validate({"name": name, "until": {"step": step}, "batch": {"sequences": 8}, **fields})


def test_all_rules_are_evaluated_for_a_job_of_six_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "spec.phases[longer].sharing must refine the sharing of phase real-60"
    longer = _phase("longer", 90, sharing={"blocks": 2})
    spec = make_job().spec
    phases = [spec.phases[0], *(_phase(f"real-{step}", step) for step in (30, 40, 50, 60)), longer]
    spec = spec.model_copy(update={"phases": phases})
    assert says in (acceptance.find_broken_rules(spec, "a", 0) or "")
    monkeypatch.setattr(acceptance, "_MOST_EVALUATIONS", 250)
    assert acceptance.find_broken_rules(spec, "b", 0) is None, "the maximum counts"


def test_rules_are_evaluated_once_for_each_generation_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that takes over parses all jobs again, so it has no results of its own."""
    world = run_until(World(make_job()), "pseudo")
    world.settle()
    evaluated = list[str]()

    def record(metadata: JobMetadata, *arguments: Any, **options: Any) -> dict[Rule, str]:
        evaluated.append(metadata.name)
        return broken_rules(metadata, *arguments, **options)

    monkeypatch.setattr(acceptance, "broken_rules", record)
    world.job = PseudoRealJob.from_object(world.job.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert world.plan().status == world.status
    assert evaluated == []
    world.set(phases=[*world.job.spec.phases, _phase("longer", 30)])
    world.settle()
    assert len(evaluated) == 1


def test_job_that_trains_goes_on_whatever_rules_a_new_release_has() -> None:
    """Such as the rule on epsilon: release 0.3.0 took smaller numbers."""
    world = run_until(World(make_job()), "pseudo")
    world.set(optimizer=world.job.spec.optimizer.model_copy(update={"epsilon": "1e-38"}))
    world.run_fairly()
    assert (world.status.state, _accepted(world)[0]) == ("Complete", "True")
