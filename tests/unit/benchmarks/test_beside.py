"""The comparison with Kubeflow's operators: figures read from an audit log, and the report's section."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.operator.audit import Request, job_name, parse
from benchmarks.operator.beside.deployed import Deployment, webhooks
from benchmarks.operator.beside.measures import caused, ends, per_job, policy, reactions, writes
from benchmarks.operator.beside.report import draw, section
from benchmarks.operator.beside.results import Idle, Life, Lives, Reporting
from benchmarks.operator.beside.stacks import ONE_PHASE, STACKS, TRAINER, TRAINING_OPERATOR, TWO_PHASES
from benchmarks.operator.results import Quantiles

JOB = job_name(3)


def request(done: float, verb: str, resource: str, name: str = JOB, **marks: Any) -> Request:
    marks = {"ends_pod": False} | marks
    return Request(done - 0.1, done, "trainer", verb, resource, JOB if JOB in name else "", name=name, **marks)


def life(stack: str, **changes: Any) -> Life:
    idle = Idle(seconds=60, processor_share=0.001, requests=0, writes=0)
    values = {
        "stack": stack,
        "jobs": 1000,
        "workers": 2,
        "seconds": 100.0,
        "requests": {"patch trainjobs/status": 3.0},
        "writes": 8.0,
        "processor_seconds": 50.0,
        "servers_seconds": 100.0,
        "peak_bytes": 100_000_000,
        "reaction": Quantiles(count=1000, p50=1.0, p99=2.0),
        "others": 0.05,
        "idle": idle,
    }
    return Life.model_validate(values | changes)


def test_a_write_changes_something_and_is_neither_tried_nor_refused_nor_an_event() -> None:
    log = [
        request(1, "create", "jobs", is_trial=True),
        request(2, "create", "jobs"),
        request(3, "create", "services", is_refused=True),
        request(4, "create", "events", f"{JOB}.1"),
        request(5, "update", "trainjobs/status"),
        request(6, "get", "trainjobs"),
    ]
    assert writes(log) == 2
    found = per_job(log, 2)
    assert found["create jobs, tried only"] == found["create services, refused"] == found["create jobs"] == 0.5


def test_lists_with_which_a_program_starts_and_renewals_are_not_caused_by_jobs() -> None:
    own = request(1, "update", "trainjobs/status")
    log = [own, request(1, "list", "pods", ""), request(1, "update", "leases"), request(1, "watch", "pods")]
    assert caused(log, ["trainer"]) == [own]
    assert caused(log, ["jobset"]) == []


def test_a_reaction_is_from_the_last_end_that_decides_to_the_first_word_of_the_jobs_end() -> None:
    log = [
        request(10, "patch", "pods/status", f"{JOB}-master-0", ends_pod=True),
        request(12, "patch", "pods/status", f"{JOB}-worker-0", ends_pod=True),
        request(13, "update", "pytorchjobs/status", finishes=True),
        request(15, "update", "pytorchjobs/status", finishes=True),
    ]
    assert ends(log) == {JOB: 13}
    assert reactions(log, TRAINER.decides).p99 == 1
    assert reactions(log, TRAINING_OPERATOR.decides).p99 == 3


@pytest.mark.parametrize(
    ("kind", "status", "finishes"),
    [("Complete", "True", True), ("Succeeded", "True", True), ("Complete", "False", False), ("Running", "True", False)],
)
def test_the_end_of_a_job_is_a_condition_of_its_status(kind: str, status: str, finishes: bool) -> None:
    entry = {
        "stage": "ResponseComplete",
        "requestReceivedTimestamp": "2026-01-02T03:04:05.000000Z",
        "stageTimestamp": "2026-01-02T03:04:05.250000Z",
        "user": {"username": "trainer"},
        "verb": "update",
        "requestURI": f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/load/trainjobs/{JOB}/status",
        "objectRef": {"resource": "trainjobs", "subresource": "status", "name": JOB},
        "responseStatus": {"code": 409},
        "requestObject": {"status": {"conditions": [{"type": kind, "status": status}]}},
    }
    found = parse(entry)
    assert found is not None
    # A rejected request finishes nothing.
    assert (found.finishes, found.is_refused) == (False, True)
    accepted = parse(entry | {"responseStatus": {"code": 200}})
    assert accepted is not None
    assert accepted.finishes is finishes


def test_the_log_has_the_bodies_of_statuses_alone() -> None:
    rules = policy(["trainer"])["rules"]
    (bodies,) = [rule for rule in rules if rule["level"] == "Request"]
    assert [kind["resources"] for kind in bodies["resources"]] == [
        [f"{stack.jobs.split('/')[2]}/status"] for stack in (ONE_PHASE, TRAINING_OPERATOR, TRAINER)
    ]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.title)
def test_every_job_has_as_many_pods_as_it_was_asked_for(stack: Any) -> None:
    spec = stack.job("a", 5)["spec"]
    replicas = spec.get("pytorchReplicaSpecs", {}).values()
    counts = [phase["workers"] for phase in spec.get("phases", [])]
    counts += [sum(one["replicas"] for one in replicas)] if replicas else []
    counts += [spec["trainer"]["numNodes"]] if "trainer" in spec else []
    assert counts == [5] * (2 if stack is TWO_PHASES else 1)


def test_webhooks_are_called_by_their_service_and_for_what_the_manifests_name(tmp_path: Path) -> None:
    hook = {"name": "mpod.kb.io", "clientConfig": {"service": {"name": "x", "namespace": "y", "path": "/mutate"}}}
    other = {"name": "vpod.kb.io", "clientConfig": {"service": {"path": "/validate"}}}
    file = tmp_path / "webhooks.yaml"
    file.write_text(yaml.safe_dump({"kind": "Hooks", "metadata": {"name": "x"}, "webhooks": [hook, other]}))
    selector = {"matchLabels": {"a": "b"}}
    deployment = Deployment(
        "n", "space", "service", "secret", {"Hooks": "real"}, lambda *_: (), {"mpod.kb.io": selector}
    )
    (found,) = webhooks(deployment, file, 7)
    assert found["metadata"] == {"name": "real"}
    called = {"namespace": "space", "name": "service", "path": "/mutate", "port": 7}
    assert found["webhooks"][0] == {
        "name": "mpod.kb.io",
        "clientConfig": {"service": called},
        "objectSelector": selector,
    }
    assert "objectSelector" not in found["webhooks"][1]


def test_the_section_shows_losses_and_what_was_not_measured() -> None:
    lives = [
        life(ONE_PHASE.title),
        life(TRAINER.title),
        life(TRAINING_OPERATOR.title, seconds=50.0),
        life(TWO_PHASES.title, writes=21),
    ]
    text = section(Lives(lives=lives))
    assert "**not reached**: 0.50× at 1,000 jobs" in text
    assert "| writes for a job: pseudoreal | at most 12 | reached: 8 |" in text
    assert "at most 20 | **not reached**: 21 |" in text
    assert "not measured at 5,000 jobs; 100 MB at 1,000" in text
    assert "Other programs ran" not in text
    assert "reached: 1.00× at 1,000 jobs" in section(Lives(lives=lives[:2]))
    loud = [*lives, life(ONE_PHASE.title, jobs=5000, others=1.0, peak_bytes=300_000_000)]
    assert "**not reached**: 300 MB" in section(Lives(lives=loud))
    assert "Other programs ran" in section(Lives(lives=loud))


def test_the_share_of_a_core_for_the_reports_of_5000_pods_is_reckoned_by_what_one_report_takes() -> None:
    def said(share: float) -> str:
        found = Reporting(
            pods=1000, reports_per_second=500, refused=0, processor_share=share, writes_per_minute=4, peak_bytes=10**8
        )
        return section(Lives(lives=[life(ONE_PHASE.title)], reporting=found))

    assert "| at most 50 % | reached: 40 % |" in said(0.2)
    assert "0.40 ms of a processor for each" in said(0.2)
    assert "| at most 50 % | **not reached**: 60 % |" in said(0.3)


def test_a_new_life_takes_the_place_of_that_of_the_same_stack_and_load() -> None:
    found = Lives(lives=[life("a"), life("b")]).with_life(life("a", seconds=1.0)).with_life(life("a", jobs=1))
    assert [(one.stack, one.jobs, one.seconds) for one in found.lives] == [
        ("b", 1000, 100),
        ("a", 1000, 1),
        ("a", 1, 100),
    ]


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        draw([life(stack.title) for stack in STACKS], tmp_path / name / "beside.svg")
    assert (tmp_path / "first/beside.svg").read_bytes() == (tmp_path / "second/beside.svg").read_bytes()
