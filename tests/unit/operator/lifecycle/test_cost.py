"""No plan for a job that the API server accepts takes more than 50 ms of CPU time, because all other jobs wait for
it."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import PodReport, RankReport
from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.loop.planning_thread import PLANNING_SECONDS
from pseudoreal_operator.observe.fetch import build_observed
from pseudoreal_operator.observe.memory import Memory
from pseudoreal_operator.observe.reading import COMPLETION_INDEX, read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, ReportStore
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import LastReport, Observed, Pod, PodPhase, Pods, Termination
from pseudoreal_operator.observe.worker_assignment import with_worker_indices

from tests.support.cpu_time import seconds, slowness, spin
from tests.support.depth import DEPTH
from tests.unit.operator.observe.support.reports import PODS
from tests.unit.operator.support.world import SETTINGS, UID, World

Json = dict[str, Any]

MOST_SECONDS = 0.05
pytestmark = pytest.mark.solo

MOST_LAYERS = MOST_WORKERS = 10_000
MOST_PHASES = 16


def check(act: Callable[[], object], prepare: Callable[[], object] = lambda: None, most: float = MOST_SECONDS) -> None:
    """Check that the best of some runs of `act` takes at most `most` seconds on the machine that the bound was set
    for."""
    found: list[float] = []
    while len(found) < 6 and (not found or min(found) > most):
        prepare()
        taken = seconds(act, 1)
        found.append(taken if taken <= most else taken / slowness())
    assert min(found) <= most, f"{[round(each, 3) for each in found]} s"


def body(**spec: Any) -> Json:
    model = {
        "layers": 8,
        "hiddenSize": 64,
        "sequenceLength": 128,
        "attention": {"heads": 2},
        "feedForward": {"size": 256},
    }
    metadata = {"name": "a", "namespace": "default", "uid": UID, "generation": 1}
    given = {"data": {"path": "corpus"}} | spec | {"model": model | spec.get("model", {})}
    return {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": given}


def phases(number: int = 1, **fields: Any) -> list[Json]:
    return [{"name": f"p{i}", "until": {"step": 10 + i}, "batch": {"sequences": 8}, **fields} for i in range(number)]


def experts(**top_k: Any) -> Json:
    return {"experts": {"type": "TopK", "count": 2, "topK": {"perToken": 1, **top_k}}}


COMPOSITE = 8_648_640
"""The number below ten million with the most divisors, 448."""
OF_STEPS = {"balanceOver": "Step", "auxiliaryLoss": "0.01"}
HOMES = [{"unit": f"blocks.{MOST_LAYERS - 1 - i}.experts", "home": "Host"} for i in range(DEPTH.of(256, 1024))]
EXPENSIVE: dict[str, Json] = {
    # Found with the operator of before: 34 s.
    "a number of workers that fits is looked for": body(
        model=experts(**OF_STEPS),
        phases=phases(
            workers=MOST_WORKERS,
            elastic={"minWorkers": 1},
            batch={"sequences": COMPOSITE},
            parallelism={"schedule": "1F1B"},
        ),
    ),
    # 3.3 s in each pass.
    "a prime number of workers": body(
        phases=phases(workers=9973, elastic={"minWorkers": 841}, batch={"sequences": 9973 * 840, "microBatches": 840})
    ),
    # 1.7 s in each pass.
    "homes of experts": body(
        model={"layers": MOST_LAYERS} | experts(), phases=phases(MOST_PHASES, offload={"homes": HOMES})
    ),
    "layers that share experts in segments": body(
        model={"layers": MOST_LAYERS} | {"experts": {"type": "TopK", "count": 2, "topK": {"perToken": 1}}},
        phases=[
            phase | {"sharing": {"blocks": blocks, "pattern": "Segment", "parts": ["Experts"]}}
            for phase, blocks in zip(phases(6), (1, 10, 100, 1000, 5000, 10_000), strict=True)
        ],
    ),
    **{
        f"layers that begin as others, {pattern} with {part}": body(
            model={"layers": MOST_LAYERS} | {"experts": experts()["experts"] | {"denseLayers": []}},
            phases=[
                phase | {"layers": 1000 - 16 + index, "growth": {"pattern": pattern} if index else None}
                for index, phase in enumerate(phases(MOST_PHASES - 1))
            ]
            + [phases(MOST_PHASES)[-1] | {"sharing": {"blocks": MOST_LAYERS, "pattern": "Segment", "parts": [part]}}],
        )
        for pattern, part in (("Stack", "Blocks"), ("Interleave", "Experts"))
    },
    "a layout to choose for many ranks": body(
        model={"layers": 97},
        phases=phases(
            workers=MOST_WORKERS,
            processesPerWorker=64,
            elastic={"minWorkers": 1},
            batch={"sequences": 9973},
            parallelism={"layout": "Auto"},
        ),
    ),
    "sequences to cut over many ranks": body(
        model={"layers": 97, "sequenceLength": 1_441_440},
        phases=phases(
            workers=8008,
            processesPerWorker=60,
            elastic={"minWorkers": 1},
            batch={"sequences": 7},
            parallelism={"layout": "Auto"},
        ),
    ),
    "everything at once": body(
        model={"layers": MOST_LAYERS},
        phases=phases(MOST_PHASES, workers=MOST_WORKERS, offload={"home": "Disk"}, batch={"sequences": 10_000_000}),
    ),
}


@pytest.mark.parametrize("expensive", EXPENSIVE)
def test_plans_of_an_expensive_job_are_cheap(expensive: str) -> None:
    check_costs(EXPENSIVE[expensive])


def check_costs(job: Json) -> None:
    """Check the first plan for a job, without cached results, and the plans that follow while the job waits."""
    check_job(job)
    read = json.loads(json.dumps(job))
    worlds: list[World] = []
    check(lambda: PseudoRealJob.from_object(read))
    check(lambda: worlds[-1].plan(), lambda: worlds.append(World(PseudoRealJob.from_object(read))))
    world = World(PseudoRealJob.from_object(read), nodes=0)
    for _ in range(3):
        world.carry_out(world.plan())
        world.now += timedelta(seconds=1)
        check(world.plan)


def draw_job(seed: int) -> Json:
    """Return a job with numbers at their bounds, which most often all models and rules accept."""
    chance = Random(seed)
    layers, number = chance.choice([12, 5040, 9973, MOST_LAYERS]), chance.choice([1, 1, 2, MOST_PHASES])
    model: Json = {"layers": layers}
    if chance.random() < 0.6:
        model |= experts(**chance.choice([OF_STEPS, {}]))
        model["experts"]["denseLayers"] = chance.choice([[], [0], [*range(min(layers - 1, 256))]])
    found = [_draw_phase(chance, index, layers) for index in range(number)]
    if chance.random() < 0.3 and not model.get("experts", {}).get("denseLayers"):
        blocks = chance.choice([divisor for divisor in (1, 2, 12, 100, 5040, layers) if layers % divisor == 0])
        found[0]["sharing"] = {"blocks": blocks, "pattern": chance.choice(["Cycle", "Segment"])}
    return body(model=model, phases=found)


def _draw_phase(chance: Random, index: int, layers: int) -> Json:
    workers, is_chosen = chance.choice([2, 9973, MOST_WORKERS]), chance.random() < 0.2
    micro_batches = 1 if is_chosen else chance.choice([1, 1, 840])
    # As many as there are workers: then hardly any other number of workers fits.
    each = chance.choice([workers, workers, 9973, COMPOSITE // micro_batches])
    phase: Json = {
        "name": f"p{index}",
        "until": {"step": 10 + index},
        "workers": workers,
        "batch": {"sequences": micro_batches * each, "microBatches": micro_batches},
        "parallelism": {"layout": "Auto"},
    }
    if not is_chosen:
        schedule = chance.choice(["Layered", "GPipe", "1F1B", "1F1B", "Interleaved"])
        phase["parallelism"] = {"schedule": schedule, "pipeline": chance.choice([1, 1, 1, 2, "AllRanks"])}
    if chance.random() < 0.8:
        phase["elastic"] = {"minWorkers": chance.choice([1, workers // 2, workers - 1])}
    if chance.random() < 0.3:
        units = chance.sample(range(layers), min(layers, 30))
        phase["offload"] = {"homes": [{"unit": f"blocks.{unit}", "home": "Host"} for unit in units]}
    return phase


@settings(max_examples=DEPTH.of(30, 3000), derandomize=not DEPTH.is_deep, deadline=None)
@given(job=st.integers(0, 2**32).map(draw_job))
def test_plans_of_every_accepted_job_are_cheap(job: Json) -> None:
    try:
        check_job(job)
    except InvalidJob:
        return
    check_costs(job)


def test_cost_check_finds_an_expensive_function() -> None:
    with pytest.raises(AssertionError):
        check(lambda: spin(40))
    assert MOST_SECONDS <= PLANNING_SECONDS / 10


def large_world() -> tuple[World, tuple[Pod, ...]]:
    """Return a job of 10,000 workers, and its pods."""
    fields = {"elastic": {"minWorkers": 1}, "batch": {"sequences": 16 * MOST_WORKERS}}
    small, large = (
        World(PseudoRealJob.from_object(body(phases=phases(2, workers=workers, **fields))), nodes=0)
        for workers in (2, MOST_WORKERS)
    )
    for _ in range(3):
        for world in (small, large):
            world.carry_out(world.plan())
        small.control()
    pod = small.observe().pods[0]
    pods = (
        replace(pod, name=f"{pod.name}-{index}", index=index, workers=MOST_WORKERS, node=f"node-{index}")
        for index in range(MOST_WORKERS)
    )
    return large, tuple(replace(pod, phase=PodPhase.RUNNING, ready=True) for pod in pods)


@pytest.mark.parametrize("after", [30, 3600], ids=["all report", "all are silent"])
@pytest.mark.parametrize("ended", [0, 1, MOST_WORKERS])
def test_plan_with_ten_thousand_pods_is_cheap(ended: int, after: int) -> None:
    """Every pod is examined, so the bound is higher. With silent pods a plan once took 2.9 s."""
    world, pods = large_world()
    termination = Termination(1, "Error", "", None, "2030-01-01T00:00:05Z")
    reports = tuple(
        LastReport(
            pod.execution,
            pod.index,
            pod.name,
            world.now,
            world.now,
            PodReport(ranks=[RankReport(rank=pod.index, activity="computing", seconds=0, step=3)]),
            training_since=world.now,
            progressed=world.now,
        )
        for pod in pods
    )
    over = [replace(pod, phase=PodPhase.FAILED, ready=False, termination=termination) for pod in pods[:ended]]
    seen = with_worker_indices(replace(world.observe(), pods=Pods((*over, *pods[ended:])), last_reports=reports))

    def act() -> Plan:
        return plan(seen, world.now + timedelta(seconds=after), SETTINGS)

    check(act, most=3 * MOST_SECONDS)


def test_pass_from_memory_over_ten_thousand_pods_is_cheap() -> None:
    """The watches tell one pod in each round, and all pods report. A pass once listed and parsed all pods."""
    world, pods = large_world()
    small = World(PseudoRealJob.from_object(body(phases=phases(1, workers=2, batch={"sequences": 32}))))
    small.settle()
    small.control()
    first, family = next(iter(small.pods.values())), Memory()
    name = Name("default", world.job.metadata.name)
    bodies = [
        {
            "metadata": first["metadata"]
            | {"name": pod.name, "namespace": "default", "uid": pod.name, "resourceVersion": "7"}
            | {"annotations": {COMPLETION_INDEX: str(pod.index)}},
            "spec": first["spec"] | {"nodeName": pod.node},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for pod in pods
    ]
    parsing = seconds(lambda: [read_pod(each) for each in bodies], 1)
    for each in bodies:
        family.child_changed("Pod", "ADDED", each)
    store, key, sightings = ReportStore(), ("default", UID), Sightings()
    store.follow(key, PODS)
    jobs = [*world.observe().jobs]
    for pod in pods:
        rank = RankReport(rank=pod.index, activity="computing", seconds=0, step=3)
        store.store(ReportingPod(key, pod.execution, pod.index, pod.name), PodReport(ranks=[rank]), world.now)

    def act() -> Plan:
        known = family.children(name, UID)
        assert known is not None
        assert len(known.pods_without(frozenset())) == MOST_WORKERS
        return plan(observe_once(known.pods_without(frozenset())), world.now + timedelta(seconds=10), SETTINGS)

    def observe_once(told: Pods) -> Observed:
        dated = sightings.with_bounded_times(key, world.status, jobs, told, world.now)
        return build_observed(store, world.job, world.status, *dated, world.now)

    def tell() -> None:
        family.child_changed("Pod", "MODIFIED", bodies[0] | {"metadata": bodies[0]["metadata"] | {"labels": {}}})
        family.child_changed("Pod", "MODIFIED", bodies[0])

    tell()
    act()
    unchanged = seconds(act, 5)
    taken = []
    for _ in range(5):
        tell()
        taken.append(seconds(act, 1))
    changed = min(taken)
    print(f"parsing {parsing * 1000:.0f} ms; a pass {unchanged * 1000:.0f} ms, after a change {changed * 1000:.0f} ms")
    check(act, tell, most=1.5 * MOST_SECONDS)
    check(act, most=MOST_SECONDS)


def test_answers_to_reports_of_ten_thousand_pods_are_cheap() -> None:
    """All pods were restarted in place, and report every few seconds. An answer once looked at all reports: 3 ms."""
    store, key, now = ReportStore(), ("default", UID), datetime(2030, 1, 1, tzinfo=UTC)
    store.follow(key, PODS)
    execution = Execution("pseudo", StageKind.TRAIN, 1)
    pods = [ReportingPod(key, execution, index, f"pod-{index}") for index in range(MOST_WORKERS)]
    in_place = InPlace(restarts=2, peer_lost=True, message="killed")

    def act() -> None:
        for pod in pods[:500]:
            rank = RankReport(rank=pod.index, activity="computing", seconds=0, step=3)
            store.store(pod, PodReport(ranks=[rank], in_place=in_place), now)
            assert store.answer(pod, now).restarts_in_place == 2

    for pod in pods:
        store.store(pod, PodReport(in_place=in_place), now)
    check(act, most=2 * MOST_SECONDS)


def test_properties_of_pods_are_those_of_each_pod() -> None:
    _, many = large_world()
    chance = Random(3)
    pods = Pods(
        replace(
            pod,
            execution=pod.execution._replace(number=chance.choice([1, 1, 2])),
            index=index % 40,
            phase=chance.choice([*PodPhase]),
            ready=chance.random() < 0.5,
            node=chance.choice(["", "a", "b"]),
            deletion_deadline=chance.choice([None, "2030-01-01T00:00:05Z"]),
            sidecars=chance.choice([(), ("proxy",)]),
            termination=chance.choice([None, Termination(1, "Error", "", None)]),
        )
        for index, pod in enumerate(many[:80])
    )
    for subset in (pods, Pods(pods[:1]), Pods()):
        alive = [pod for pod in subset if pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)]
        assert [*subset.alive] == alive
        assert [*subset.leaving] == [pod for pod in alive if pod.deletion_deadline]
        assert [*subset.pending] == [pod for pod in subset if pod.phase is PodPhase.PENDING]
        assert [*subset.failed] == [pod for pod in subset if pod.phase is PodPhase.FAILED]
        assert [*subset.succeeded] == [pod for pod in subset if pod.phase is PodPhase.SUCCEEDED]
        assert [*subset.terminated] == [pod for pod in subset if pod.termination]
        assert [*subset.without_node] == [pod for pod in subset if pod.node == ""]
        assert [*subset.with_sidecars] == [pod for pod in subset if pod.sidecars]
        assert subset.ready == len([pod for pod in subset if pod.ready])
        assert sorted(subset.indices) == sorted({pod.index for pod in subset})
        assert sorted(subset.names) == sorted(pod.name for pod in subset)
        timed = [pod for pod in subset if pod.deletion_deadline or pod.sidecars or pod.phase is PodPhase.FAILED]
        assert [*subset.timed] == timed
        for execution in {pod.execution for pod in subset}:
            own = sorted((pod for pod in subset if pod.execution == execution), key=lambda pod: pod.index)
            assert [*subset.of(execution)] == own
    known = {pod.index: pod.node for pod in pods if pod.node and not pod.is_alive}
    assert pods.nodes == known | {pod.index: pod.node for pod in pods if pod.node and pod.is_alive}
    assert pods.of(pods[0].execution._replace(number=9)) == ()
