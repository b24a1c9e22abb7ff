"""For the operator a pod ends with its trainer, whatever else runs in it; containers that keep running are named and
ended."""

from typing import Any

import pytest
from pseudoreal_operator.lifecycle.clocks import STOP_SECONDS
from pseudoreal_operator.observe.view import SIDECAR_SECONDS
from pseudoreal_operator.status.conditions import find

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import (
    condition_message,
    condition_states,
    run_pods,
    run_until,
    start_job,
)
from tests.unit.operator.support.world import World, make_job

QUICK = {"spec__restart": {"backoffSeconds": 10}}


def world_with_proxies(stage: str, **changes: Any) -> World:
    """Return a world in which pods of the stage have a proxy that never ends by itself."""
    world = run_until(World(make_job(**QUICK, **changes)), stage)
    world.proxies = True
    return world


def names(pods: list[dict[str, Any]]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def wait_for_proxies(world: World) -> None:
    """Let the time pass that other containers have to end."""
    world.settle()
    world.tick(SIDECAR_SECONDS)


@pytest.mark.parametrize("stage", ["pseudo", "real-delink", "real"])
def test_stage_completes_when_its_trainers_have_ended(stage: str) -> None:
    world = world_with_proxies(stage)
    for pod in world.alive():
        world.finish(pod)
    world.settle()
    assert condition_states(world)["Progressing"] == ("False", "SidecarRunsOn")
    assert "container istio-proxy still runs" in condition_message(world, "Progressing")
    wait = world.plan().requeue_after
    assert wait is not None
    assert wait <= SIDECAR_SECONDS
    world.tick(SIDECAR_SECONDS)
    wanted = world.plan()
    assert (wanted.stop, wanted.delete) == ((), ()), "what the pods say must be safe first"
    world.carry_out(wanted)
    assert "SidecarEnded" in world.events.values()
    phases = {phase.name: phase for phase in world.status.phases}
    assert (phases["real"].start_checkpoint if "delink" in stage else phases[stage].end_checkpoint) is not None


def test_pods_kept_by_sidecars_are_ended() -> None:
    world = world_with_proxies("pseudo")
    for pod in world.alive():
        world.finish(pod)
    wait_for_proxies(world)
    world.carry_out(world.plan())
    wanted = world.plan()
    assert (list(wanted.stop), [*map(bare, wanted.delete)]) == (names(world.kept_by_proxies()), ["sim-pseudo-e1"])
    world.carry_out(wanted)
    assert {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.kept_by_proxies()} == {STOP_SECONDS}
    assert world.plan().stop == (), "once is enough"
    world.control()
    assert world.kept_by_proxies() == []
    run_pods(world)
    assert world.active_jobs() == ["sim-real-delink-e1"]


def test_job_in_a_service_mesh_completes() -> None:
    world = World(make_job(**QUICK), proxies=True)
    world.run_fairly()
    assert (world.status.state, world.status.restarts, world.status.execution) == ("Complete", 0, 1)
    world.settle()
    world.control()
    assert (world.kept_by_proxies(), world.active_jobs()) == ([], [])


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"outcome": "Failed"}, "PodFailed"),
        ({"outcome": "OutOfMemory"}, "OutOfMemory"),
        ({"outcome": "Failed", "exit_code": 137, "reason": "OOMKilled"}, "OutOfMemory"),
    ],
    ids=str,
)
def test_failure_of_the_trainer_counts_although_a_sidecar_runs(end: dict[str, Any], reason: str) -> None:
    world = world_with_proxies("real")
    failed, other = world.alive()
    world.finish(failed, **end)
    wanted = world.plan()
    assert wanted.stop == tuple(names([other])), "the pod that failed has yet to be read"
    world.carry_out(wanted)
    assert "container istio-proxy still runs" in condition_message(world, "Progressing")
    world.control()
    wait_for_proxies(world)
    world.carry_out(world.plan())
    (fault,) = world.status.faults
    assert (fault.reason, fault.pod, world.status.execution) == (reason, failed["metadata"]["name"], 2)
    assert "SidecarEnded" in world.events.values()
    world.settle()
    assert "sim-real-e1" not in world.active_jobs()
    world.control()
    assert world.kept_by_proxies() == []


def test_failed_pod_with_a_sidecar_is_read_before_its_job_is_failed() -> None:
    """The kubelet reports the end of the trainer before it reports that the pod failed. The Job controller deletes
    pods that it counts as running once the Job is failed."""
    world = run_until(World(make_job(**QUICK)), "real")
    world.late_nodes = True
    failed, other = world.alive()
    world.finish(failed, "OutOfMemory")
    wanted = world.plan()
    assert (wanted.stop, wanted.fail_jobs) == (tuple(names([other])), ())
    world.carry_out(wanted)
    for _ in range(2):
        world.control()
        world.settle()
    (fault,) = world.status.faults
    assert (fault.reason, fault.pod) == ("OutOfMemory", failed["metadata"]["name"])


def test_failed_job_leaves_no_sidecar_running() -> None:
    world = start_job(spec__restart={"maxRestarts": 0})
    world.proxies = True
    (pod,) = world.alive()
    world.finish(pod, "Failed")
    wait_for_proxies(world)
    world.settle()
    world.control()
    assert (world.status.state, world.kept_by_proxies(), world.active_jobs()) == ("Failed", [], [])


def test_pod_of_the_first_finished_worker_stays_until_all_are_done() -> None:
    world = world_with_proxies("real")
    first, second = world.alive()
    world.finish(first)
    wait_for_proxies(world)
    assert (world.plan().stop, world.plan().delete) == ((), ())
    assert condition_states(world)["Progressing"][1] != "SidecarRunsOn", "the other one trains"
    world.finish(second)
    wait_for_proxies(world)
    world.settle()
    assert world.status.phases[1].end_checkpoint == "real-20"


def test_replaced_pod_kept_by_a_sidecar_is_ended() -> None:
    world = world_with_proxies("real", spec__phases__1__spares=1)
    for pod in world.alive():
        world.report(pod, 1, ranks=0 if world.worker_of(pod) is None else 1)
    lost, other, _ = world.alive()
    world.finish(lost, "Failed")
    world.lose_peer(other)
    world.settle()
    assert "SpareTookOver" in world.events.values()
    assert list(world.plan().stop) == [] or world.kept_by_proxies()[0]["metadata"].get("deletionTimestamp")
    world.control()
    assert lost["metadata"]["name"] not in world.pods


def test_sidecars_that_end_after_the_trainer_cause_no_event() -> None:
    """As native sidecars do: the pod, its log and its Job stay as they are."""
    world = world_with_proxies("pseudo")
    (pod,) = world.alive()
    world.finish(pod)
    world.settle()
    pod["status"]["phase"] = "Succeeded"
    del pod["status"]["containerStatuses"][0]
    world.control()
    world.tick(SIDECAR_SECONDS)
    world.settle()
    progressing = find(world.status, "Progressing")
    assert progressing
    assert pod["metadata"]["name"] in world.pods
    assert "SidecarEnded" not in world.events.values()
    assert world.status.phases[0].end_checkpoint == "pseudo-10"


def test_preemption_of_pods_with_sidecars_counts_no_restart() -> None:
    world = world_with_proxies("real", spec__scheduling={"queue": "gpus"})
    world.hold("sim-real-e1")
    for pod in world.alive():
        world.finish(pod, "Yielded")
    wait_for_proxies(world)
    world.settle()
    assert (world.status.state, world.status.execution, world.status.restarts) == ("Queued", 1, 0)
