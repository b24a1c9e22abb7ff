"""A spare pod replaces a lost worker: the execution continues, and everything is counted as without spare pods."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import Membership
from pseudoreal_operator.lifecycle.clocks import JOIN_SECONDS, SPARE_SECONDS, STOP_SECONDS, STUCK_SECONDS
from pseudoreal_operator.observe.reading import read_pod
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.worker_assignment import memberships
from pseudoreal_trainer.errors import TrainingError

from tests.support.jobs import good_job
from tests.unit.operator.lifecycle.support.steps import condition_message, config, run_until, start_job
from tests.unit.operator.support.world import World

Json = dict[str, Any]
FIRST = Execution("real", StageKind.TRAIN, 1)


def with_spares(spares: int = 1, workers: int = 2, **changes: Any) -> World:
    """Return a world in which the phase real trains on `workers` pods, each on its own node, beside waiting spare
    pods."""
    changes = {"spec__phases__1__workers": workers, "spec__phases__1__spares": spares} | changes
    world = run_until(start_job(**changes), "real")
    for number, pod in enumerate(world.alive()):
        pod["spec"] |= {"nodeName": f"node-{number}"}
    report_from_all_pods(world)
    world.settle()
    return world


def report_from_all_pods(world: World, step: int = 12) -> None:
    """Let all pods report; a waiting spare pod has no ranks."""
    for pod in world.alive():
        waits = index_of(pod) >= 2 and "place" not in pod
        world.report(pod, step, ranks=0 if waits else 1)


def index_of(pod: Json) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def pod_at(world: World, index: int) -> Json:
    return next(pod for pod in world.pods.values() if index_of(pod) == index and read_pod(pod).execution == FIRST)


def name_of(pod: Json) -> str:
    name: str = pod["metadata"]["name"]
    return name


def report_lost_peer_at(world: World, index: int, restarts: int = 1) -> None:
    report_lost_peer(world, pod_at(world, index), restarts)


def report_lost_peer(world: World, pod: Json, restarts: int = 1) -> None:
    """Let the pod report that it lost its connection to a peer, and waits to restart its ranks."""
    lost = InPlace(restarts=restarts, peer_lost=True, message="connection closed")
    world.report(pod, 0, in_place=lost, ranks=0)


def membership(world: World) -> Membership | None:
    return memberships(world.status).get(FIRST)


def complete_takeover(world: World, *indices: int, restart: int = 2) -> None:
    """Let the pods with these indices report that they have met and train."""
    for index in indices:
        pod = pod_at(world, index)
        pod["place"] = True
        pod["in_place"] = InPlace(restarts=restart, peer_lost=True, message="took a place")
        world.report(pod, 13)
    world.settle()


def takeovers(world: World) -> dict[int, int]:
    found = membership(world)
    return {one.worker: one.pod for one in found.takeovers} if found else {}


def test_job_runs_spares_but_its_success_policy_counts_workers_only() -> None:
    world = with_spares(spares=2)
    spec = world.objects["Job", "sim-real-e1"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    env = {entry["name"]: entry.get("value") for entry in spec["template"]["spec"]["containers"][0]["env"]}
    assert env["PET_NNODES"] == "2", "spare pods do not meet the others"
    assert config(world, "sim-real-e1")["spares"] == 2
    assert "successPolicy" not in world.objects["Job", "sim-pseudo-e1"]["spec"]


def test_status_replicas_and_placement_exclude_idle_spares() -> None:
    world = with_spares()
    assert (world.status.replicas.desired, world.status.replicas.ready) == (2, 2)
    assert "1 of 1 spare pods waits to replace a worker" in condition_message(world, "Progressing")
    assert world.status.placement is not None
    assert [node.node for node in world.status.placement.nodes] == ["node-0", "node-1"]


@pytest.mark.parametrize("lost", [0, 1])
def test_spare_replaces_disrupted_worker_within_the_same_execution(lost: int) -> None:
    world = with_spares()
    names = {name_of(pod) for pod in world.alive()}
    world.disrupt(pod_at(world, lost))
    world.settle()
    assert (world.status.execution, membership(world)) == (1, None), "the other one has not said that it waits"
    report_lost_peer_at(world, 1 - lost)
    world.settle()
    assert takeovers(world) == {lost: 2}
    found = membership(world)
    assert found is not None
    assert (found.restart, found.own_restarts) == (2, 3)
    assert (world.status.execution, world.status.restarts, world.status.faults) == (1, 0, [])
    assert list(world.events.values()).count("SpareTookOver") == 1
    complete_takeover(world, 1 - lost, 2)
    assert {name_of(pod) for pod in world.alive()} == names - {name_of(pod_at(world, lost))}
    assert (world.status.state, world.status.execution, world.status.restarts) == ("Training", 1, 0)
    assert world.status.placement is not None
    assert {node.node for node in world.status.placement.nodes} == {f"node-{1 - lost}", "node-2"}


def test_phase_completes_when_all_workers_succeed_even_if_the_kubernetes_job_failed() -> None:
    """The Job controller notices that an index has failed before it counts how many have succeeded."""
    world = with_spares()
    world.disrupt(pod_at(world, 0))
    report_lost_peer_at(world, 1)
    world.settle()
    complete_takeover(world, 1, 2)
    world.finish_all()
    assert world.objects["Job", "sim-real-e1"]["status"]["conditions"][0]["type"] == "Failed"
    world.settle()
    assert (world.status.state, world.status.restarts) == ("Complete", 0)


def test_stages_after_a_takeover_succeed_in_the_same_execution() -> None:
    """Delink and next phase keep the execution's number, but have their own memberships."""
    phases = good_job("sim")["spec"]["phases"]
    half = phases[1] | {"name": "half", "sharing": {"blocks": 2}, "workers": 2, "spares": 1}
    half["until"] = {"step": phases[1]["until"]["step"] - 1}
    world = run_until(start_job(spec__phases=[phases[0], half, phases[1] | {"workers": 2, "spares": 1}]), "half")
    for phase in ("half", "real"):
        for number, pod in enumerate(world.alive()):
            pod["spec"] |= {"nodeName": f"node-{number}"}
        report_from_all_pods(world)
        world.settle()
        lost, other, spare = world.alive()
        world.disrupt(lost)
        report_lost_peer(world, other)
        world.settle()
        assert world.status.spares is not None
        assert world.status.spares.phase_name == phase
        for pod in (other, spare):
            world.meet(pod, world.status.spares)
        world.settle()
        with pytest.raises(TrainingError, match="these ranks are from before"):
            lost["fence"].check()
        world.finish_all()
        world.settle()
        if phase == "half":
            run_until(world, "real")
            with pytest.raises(TrainingError, match="these ranks are of phase 1"):
                lost["fence"].check()
    world.settle()
    assert (world.status.state, world.status.execution, world.status.restarts) == ("Complete", 1, 0)


def test_unused_spares_end_with_the_workers() -> None:
    world = with_spares()
    for index in (0, 1):
        world.finish(pod_at(world, index))
    world.control()
    world.settle()
    assert (world.status.state, world.alive()) == ("Complete", [])


def test_losing_an_idle_spare_does_not_interrupt_training() -> None:
    world = with_spares()
    world.disrupt(pod_at(world, 2))
    world.settle()
    world.tick(SPARE_SECONDS)
    world.settle()
    assert (world.status.execution, world.status.state, len(world.alive())) == (1, "Training", 2)
    assert "0 of 1 spare pods wait to replace a worker" in condition_message(world, "Progressing")
    world.finish_all()
    world.settle()
    assert (world.status.state, world.status.restarts) == ("Complete", 0)


def test_spare_replaces_a_deleted_worker_once_a_peer_waits() -> None:
    world = with_spares()
    world.vanish(pod_at(world, 1))
    world.settle()
    assert membership(world) is None
    report_lost_peer_at(world, 0)
    world.settle()
    assert (takeovers(world), world.status.execution) == ({1: 2}, 1)
    assert world.status.spares is not None
    assert world.status.spares.message.startswith("The pod of worker 1 of sim-real-")


def test_spare_replaces_a_worker_that_is_stuck_on_an_unreachable_node() -> None:
    """The stuck pod's ranks may still run, so no peer reports a lost connection."""
    world = with_spares()
    world.lose(pod_at(world, 0))
    world.settle()
    world.tick(30 + STUCK_SECONDS)
    report_from_all_pods(world)
    world.settle()
    found = membership(world)
    assert found is not None
    assert takeovers(world) == {0: 2}
    assert found.restart == 2, "another one may wait for restart 1 unheard"
    complete_takeover(world, 1, 2)
    assert (world.status.execution, world.status.state) == (1, "Training")


def test_out_of_memory_starts_a_new_execution_instead_of_using_a_spare() -> None:
    world = with_spares()
    world.finish(pod_at(world, 1), "OutOfMemory")
    report_lost_peer_at(world, 0)
    world.settle()
    world.control()
    world.settle()
    assert (membership(world), world.status.execution, world.status.restarts) == (None, 2, 1)


def test_worker_fault_counts_as_one_restart_when_a_spare_takes_over() -> None:
    world = with_spares()
    world.finish(pod_at(world, 1), "Failed")
    report_lost_peer_at(world, 0)
    world.settle()
    assert (takeovers(world), world.status.execution, world.status.restarts) == ({1: 2}, 1, 1)
    (fault,) = world.status.faults
    assert (fault.reason, fault.node, fault.restart_in_place) == ("PodFailed", "node-1", 2)
    complete_takeover(world, 0, 2)
    assert (world.status.execution, world.status.restarts) == (1, 1), "pods that say so again are not counted"


def test_job_fails_when_takeovers_have_used_up_max_restarts() -> None:
    world = with_spares(spec__restart={"maxRestarts": 1, "inPlace": 1})
    world.finish(pod_at(world, 1), "Failed")
    report_lost_peer_at(world, 0)
    world.settle()
    complete_takeover(world, 0, 2)
    world.finish(pod_at(world, 2), "Failed")
    report_lost_peer_at(world, 0, 3)
    world.settle()
    world.control()
    world.settle()
    assert world.status.state == "Failed"


def test_new_execution_starts_if_no_surviving_worker_waits_for_a_takeover() -> None:
    world = with_spares()
    world.finish(pod_at(world, 1), "Failed")
    world.settle()
    assert world.status.execution == 1
    world.tick(SPARE_SECONDS)
    world.report(pod_at(world, 2), 0, ranks=0)
    world.settle()
    world.control()
    world.settle()
    assert (membership(world), world.status.execution, world.status.restarts) == (None, 2, 1)


def test_takeover_after_an_outage_stops_no_pod_and_counts_the_loss_once() -> None:
    """The API server did not answer, so the operator sees the loss only after SPARE_SECONDS. The peer waits still."""
    world = with_spares()
    world.finish(pod_at(world, 1), "Failed")
    world.tick(2 * SPARE_SECONDS)
    report_lost_peer_at(world, 0)
    world.report(pod_at(world, 2), 0, ranks=0)
    wanted = world.plan()
    assert (wanted.stop, wanted.fail_jobs) == ((), ())
    world.carry_out(wanted)
    assert list(world.events.values()).count("SpareTookOver") == 1
    world.settle()
    complete_takeover(world, 0, 2)
    assert (takeovers(world), world.status.execution, world.status.restarts) == ({1: 2}, 1, 1)


def test_spare_replaces_a_deleted_worker_whose_peer_has_lost_ranks_of_its_own() -> None:
    """A restart in place proves that all pods have met, even if it began with the loss of the pod's own rank."""
    world = with_spares()
    world.vanish(pod_at(world, 1))
    died = InPlace(restarts=1, peer_lost=False, message="local rank 0 ended without a message")
    world.report(pod_at(world, 0), 0, in_place=died, ranks=0)
    world.settle()
    assert (takeovers(world), world.status.execution) == ({1: 2}, 1)


def test_new_execution_starts_if_all_workers_have_ended() -> None:
    world = with_spares()
    for index in (0, 1):
        world.finish(pod_at(world, index), "Yielded")
    world.settle()
    world.control()
    world.settle()
    assert (world.status.execution, world.status.restarts, membership(world)) == (2, 0, None)


def test_second_lost_worker_uses_the_next_spare_or_a_new_execution() -> None:
    world = with_spares(spares=2)
    world.disrupt(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    complete_takeover(world, 0, 2)
    pod_at(world, 3).pop("place", None)
    world.report(pod_at(world, 3), 0, ranks=0)
    world.disrupt(pod_at(world, 2))
    report_lost_peer_at(world, 0, 3)
    world.settle()
    found = membership(world)
    assert found is not None
    assert (takeovers(world), found.restart) == ({1: 3}, 4)
    complete_takeover(world, 0, 3, restart=4)
    assert world.status.execution == 1
    world.disrupt(pod_at(world, 3))
    report_lost_peer_at(world, 0, 5)
    world.settle()
    world.control()
    world.settle()
    assert world.status.execution == 2, "no spare pod is left"


def test_silent_spare_does_not_take_over() -> None:
    world = with_spares()
    world.tick(25)
    for index in (0, 1):
        world.report(pod_at(world, index), 12)
    world.disrupt(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    world.control()
    world.settle()
    assert (membership(world), world.status.execution) == (None, 2)


def test_restarts_in_place_after_a_takeover_count_from_its_number() -> None:
    world = with_spares(spec__restart={"maxRestarts": 5, "inPlace": 2})
    world.disrupt(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    complete_takeover(world, 0, 2)
    assert world.status.restarts == 0
    for index, peer in ((0, False), (2, True)):
        said = InPlace(restarts=3, peer_lost=peer, message="local rank 0 ended without a message")
        world.report(pod_at(world, index), 10, "starting", said)
    world.settle()
    assert [(fault.reason, fault.restart_in_place) for fault in world.status.faults] == [("PodFailed", 3)]
    assert world.status.restarts == 1


def test_gang_includes_the_spares() -> None:
    """With room for fewer pods, spare pods might get the nodes of workers."""
    world = with_spares(spec__scheduling={"gang": {"policy": "SchedulerPlugins"}})
    sizes = [body["spec"]["minMember"] for (kind, name), body in world.objects.items() if kind == "PodGroup"]
    assert sizes == [1, 3], "of the pseudo and the real phase"


def make_stuck(world: World, index: int) -> None:
    """Switch off the pod's node: the pod is to be deleted, and cannot be."""
    world.lose(pod_at(world, index))
    world.tick(30 + STUCK_SECONDS)
    report_from_all_pods(world)
    world.settle()


def test_stuck_spare_does_not_delay_the_end_of_a_failed_execution() -> None:
    world = with_spares()
    make_stuck(world, 2)
    assert world.status.execution == 1, "the workers train on"
    for index in (0, 1):
        world.finish(pod_at(world, index), "Failed", peer_lost=index == 1)
    world.control()
    world.settle()
    assert (world.status.execution, world.status.restarts) == (2, 1)
    world.wait_out()
    world.settle()
    world.control()
    assert [index_of(pod) for pod in world.alive() if read_pod(pod).execution.number == 2] == [0, 1, 2]


@pytest.mark.parametrize("lost", [0, 2])
def test_stuck_pod_that_is_not_a_worker_does_not_delay_the_end_of_a_phase(lost: int) -> None:
    world = with_spares()
    make_stuck(world, lost)
    if lost == 0:
        assert takeovers(world) == {0: 2}
        complete_takeover(world, 1, 2)
    for index in {0, 1, 2} - {lost}:
        world.finish(pod_at(world, index))
    world.control()
    world.settle()
    assert world.status.state == "Complete"


def test_requeue_comes_when_a_spare_counts_as_stuck() -> None:
    world = with_spares()
    for index in (0, 1):
        world.finish(pod_at(world, index), "Failed", peer_lost=index == 1)
    world.lose(pod_at(world, 2))
    world.settle()
    world.control()
    while world.status.execution == 1:
        wait = world.plan().requeue_after or 0
        assert 0 < wait <= 30 + STUCK_SECONDS, "nothing else would wake it"
        world.tick(wait)
        world.settle()
    assert (world.status.execution, world.status.restarts) == (2, 1)


def test_next_stage_waits_for_a_terminating_spare_until_it_counts_as_stuck() -> None:
    world = start_job(spec__phases__0__workers=2, spec__phases__0__spares=1)
    workers, spare = world.alive()[:2], world.alive()[2]
    world.lose(spare)
    for pod in workers:
        world.finish(pod)
    world.control()
    world.settle()
    assert world.status.phases[0].state == "Complete"
    assert name_of(spare) in condition_message(world, "Progressing"), "it may still end"
    wait = world.plan().requeue_after
    assert wait == 30 + STUCK_SECONDS
    world.tick(wait)
    world.settle()
    assert ("Job", "sim-real-delink-e1") in world.objects


@pytest.mark.parametrize("other", ["Succeeded", "gone"])
def test_new_execution_starts_when_only_spares_are_left(other: str) -> None:
    world = with_spares()
    world.vanish(pod_at(world, 0))
    world.finish(pod_at(world, 1)) if other == "Succeeded" else world.vanish(pod_at(world, 1))
    world.settle()
    world.control()
    world.settle()
    assert world.status.execution == 2


@pytest.mark.parametrize("phase", ["pseudo", "real"])
def test_job_whose_workers_succeeded_is_not_deleted(phase: str) -> None:
    """The job's result is in its pods until the status has it."""
    world = start_job(spec__phases__0__workers=2, spec__phases__0__spares=1) if phase == "pseudo" else with_spares()
    for pod in [pod for pod in world.alive() if index_of(pod) < 2]:
        world.finish(pod)
    world.settle()
    assert f"sim-{phase}-e1" in world.active_jobs()
    world.control()
    assert f"sim-{phase}-e1" not in world.active_jobs()
    assert ("Job", f"sim-{phase}-e1") in world.objects


HANG = {"stepSeconds": 60, "startSeconds": 300}


def hang(world: World, hung: int, silent: tuple[int, ...] = ()) -> None:
    """Let the other workers wait for worker `hung`, which computes, for longer than hang.stepSeconds. The pods with the
    indices `silent` do not report any more."""
    for seconds in (61, 0):
        for pod in (pod for pod in world.alive() if index_of(pod) not in silent):
            worker = world.worker_of(pod)
            world.report(pod, 12, "computing" if worker == hung else "waiting", ranks=0 if worker is None else 1)
        world.tick(seconds)
    world.settle()


@pytest.mark.parametrize("hung", [0, 1])
def test_spare_replaces_the_pod_of_a_hung_rank_within_the_same_execution(hung: int) -> None:
    world = with_spares(spec__hang=HANG)
    hang(world, hung)
    found = membership(world)
    assert found is not None
    assert (takeovers(world), found.restart, world.status.execution) == ({hung: 2}, 2, 1)
    (fault,) = world.status.faults
    assert (fault.reason, fault.node, fault.restart_in_place) == ("StepStalled", f"node-{hung}", 2)
    assert (world.status.restarts, world.status.state) == (1, "Training")
    told = list(world.events.values())
    assert (told.count("HangDetected"), told.count("SpareTookOver"), told.count("ExecutionFailed")) == (1, 1, 0)
    assert "No step for 60 s (spec.hang.stepSeconds)" in condition_message(world, "Progressing")
    complete_takeover(world, 1 - hung, 2)
    assert (world.status.execution, world.status.restarts) == (1, 1)
    world.finish_all()
    world.settle()
    assert (world.status.state, world.status.execution) == ("Complete", 1)


def test_replaced_pod_of_a_hung_rank_is_ended_and_can_commit_nothing() -> None:
    world = with_spares(spec__hang=HANG)
    hung, others = pod_at(world, 1), [pod_at(world, 0), pod_at(world, 2)]
    hang(world, 1)
    assert hung["metadata"]["deletionGracePeriodSeconds"] == STOP_SECONDS
    assert all("deletionTimestamp" not in pod["metadata"] for pod in others)
    assert world.status.spares is not None
    world.meet(others[0], world.status.spares)
    with pytest.raises(TrainingError, match="these ranks are from before"):
        hung["fence"].check()


def test_hang_clocks_of_new_members_start_from_zero() -> None:
    """Reports from before the takeover show the same hang, for pods that have yet to learn of it."""
    world = with_spares(spec__hang=HANG)
    hang(world, 1)
    for _ in range(4):
        world.tick(5)
        world.report(pod_at(world, 0), 12, "waiting")
        report_lost_peer_at(world, 2, restarts=2)
        world.settle()
        assert (world.status.execution, world.status.restarts) == (1, 1)
    complete_takeover(world, 0, 2)
    world.tick(59)
    for index in (0, 2):
        world.report(pod_at(world, index), 13, "waiting")
    world.settle()
    assert (world.status.execution, world.status.restarts) == (1, 1)


@pytest.mark.parametrize("follows", [True, False])
def test_new_execution_starts_if_told_pods_do_not_join_their_new_peer(follows: bool) -> None:
    """A pod may not learn of the takeover, for instance if its disk is full. Its new peer may be gone by then."""
    world = with_spares(spec__hang=HANG)
    hang(world, 1)
    if not follows:
        world.vanish(pod_at(world, 2))
    for _ in range(40):
        world.tick(10)
        world.report(pod_at(world, 0), 12, "waiting")
        if follows:
            report_lost_peer_at(world, 2, restarts=2)
        world.settle()
        if world.status.execution > 1:
            break
    assert (world.status.execution, world.status.restarts) == (2, 2)
    found = {(fault.reason, fault.node) for fault in world.status.faults}
    assert found == {("StepStalled", "node-1"), ("StartStalled", "node-0" if follows else None)}
    if follows:
        assert "rank 0 on pod" in condition_message(world, "Progressing")
        assert "has not joined its new peers" in condition_message(world, "Progressing")


def test_message_of_a_takeover_says_how_a_pod_ended_that_blames_a_peer() -> None:
    world = with_spares()
    world.finish(pod_at(world, 1), "Failed", peer_lost=True)
    report_lost_peer_at(world, 0)
    world.settle()
    assert takeovers(world) == {1: 2}
    assert world.status.spares is not None
    assert "(worker 1) ended with exit code" in world.status.spares.message


@pytest.mark.parametrize("ended", ["missing", "failed", "stuck"])
def test_message_of_a_takeover_tells_a_lost_pod_from_a_pod_that_has_not_joined_its_new_peers(ended: str) -> None:
    world = with_spares(spares=3, workers=3)
    world.report(pod_at(world, 2), 12)
    world.vanish(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    assert takeovers(world) == {1: 3}
    complete_takeover(world, 0, 3)
    report_lost_peer_at(world, 2)
    if ended == "stuck":
        world.lose(pod_at(world, 3))
    world.tick(JOIN_SECONDS + 1)
    for index in (4, 5):
        world.report(pod_at(world, index), 0, ranks=0)
    report_lost_peer_at(world, 2)
    report_lost_peer_at(world, 0, 3)
    if ended == "missing":
        world.vanish(pod_at(world, 3))
    elif ended == "failed":
        world.finish(pod_at(world, 3), "Failed")
    world.settle()
    assert takeovers(world) == {1: 4, 2: 5}
    assert world.status.spares is not None
    text = world.status.spares.message
    assert text.startswith("The pod of worker 1 of sim-real-" if ended == "missing" else "Pod sim-real-")
    assert " Worker 2 has not joined its new peers in time. Spare pod " in text


def test_message_of_a_takeover_names_each_missing_worker() -> None:
    world = with_spares(spares=2, workers=3)
    world.report(pod_at(world, 2), 12)
    for index in (1, 2):
        world.vanish(pod_at(world, index))
    report_lost_peer_at(world, 0)
    world.settle()
    assert takeovers(world) == {1: 3, 2: 4}
    assert world.status.spares is not None
    assert world.status.spares.message.startswith("The pods of workers 1 and 2 of sim-real-")


def test_takeover_long_after_another_is_no_hang() -> None:
    """A waiting spare pod is told of each membership and begins none. Its clock of the first takeover once made a hang
    of the second."""
    world = with_spares(spares=2, spec__hang=HANG)
    world.disrupt(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    complete_takeover(world, 0, 2)
    for step in range(13, 53):
        world.tick(10)
        for index in (0, 2):
            world.report(pod_at(world, index), step)
        world.report(pod_at(world, 3), 0, ranks=0)
        world.settle()
    world.disrupt(pod_at(world, 2))
    report_lost_peer_at(world, 0, restarts=3)
    world.settle()
    assert (world.status.execution, takeovers(world)) == (1, {1: 3})
    assert {fault.reason for fault in world.status.faults} == set(), "disruptions do not count"


def test_spare_pod_that_lost_its_place_is_ended_and_takes_no_other() -> None:
    world = with_spares(spares=2, spec__hang=HANG)
    hang(world, 1)
    complete_takeover(world, 0, 2)
    second = pod_at(world, 2)
    hang(world, 1)
    assert takeovers(world) == {1: 3}
    assert second["metadata"]["deletionGracePeriodSeconds"] == STOP_SECONDS
    assert [pod.name for pod in world.observe().spares] == []
    assert {pod.index for pod in world.observe().replaced} <= {1, 2}


def test_pod_that_does_not_follow_is_lost_before_the_pods_that_wait_for_it() -> None:
    """The pods that followed give their wait up, and once were replaced in its stead."""
    world = with_spares(spares=2, workers=3, spec__hang=HANG)
    for pod in world.alive():
        world.report(pod, 12, ranks=0 if world.worker_of(pod) is None else 1)
    hang(world, 2)
    assert takeovers(world) == {2: 3}
    for _ in range(9):
        world.tick(10)
        world.report(pod_at(world, 0), 12, "waiting")
        for index in (1, 3):
            report_lost_peer_at(world, index, restarts=2)
        world.report(pod_at(world, 4), 0, ranks=0)
        world.settle()
    world.finish(pod_at(world, 1), "Failed", peer_lost=True)
    world.settle()
    assert (takeovers(world), world.status.restarts) == ({2: 3}, 1), "one spare pod cannot replace two workers"


def test_hang_in_a_save_uses_no_spare() -> None:
    """The pod that hangs may still write files that the new members would write, too."""
    world = with_spares(spec__hang=HANG | {"checkpointSeconds": 60})
    for name, known in world.reports.items():
        sign = {"saving_seconds": 70.0} if name == name_of(pod_at(world, 1)) else {"activity": "waiting"}
        ranks = [rank.model_copy(update=sign) for rank in known.report.ranks]
        world.reports[name] = replace(known, report=known.report.model_copy(update={"ranks": ranks}))
    world.settle()
    assert (membership(world), world.status.execution) == (None, 2)
    assert [(fault.reason, fault.node) for fault in world.status.faults] == [("CheckpointStalled", "node-1")]


def test_hang_that_only_the_log_shows_uses_no_spare() -> None:
    """Workers that do not report learn of no takeover."""
    world = with_spares(spec__hang=HANG)
    for _ in range(10):
        world.tick(20)
        first = read_pod(pod_at(world, 0)).name
        world.reports[first] = replace(world.reports[first], log_unchanged=world.now)
        world.report(pod_at(world, 2), 0, ranks=0)
        world.settle()
        if world.status.execution > 1:
            break
    assert (membership(world), world.status.execution) == (None, 2)


def test_new_execution_starts_after_a_hang_without_a_suspect() -> None:
    world = with_spares(spec__hang=HANG)
    hang(world, 7)
    assert (membership(world), world.status.execution) == (None, 2), "all ranks wait"


def test_new_execution_starts_after_a_hang_of_more_silent_pods_than_spares() -> None:
    """Silent pods cannot be told to restart their ranks, so each of them needs a spare pod."""
    for spares, expected in ((1, (2, {})), (2, (1, {0: 3, 2: 4}))):
        world = with_spares(spares=spares, workers=3, spec__hang=HANG)
        for pod in world.alive():
            world.report(pod, 12, ranks=0 if world.worker_of(pod) is None else 1)
        hang(world, 7, silent=(0, 2))
        assert (world.status.execution, takeovers(world)) == expected


@pytest.mark.parametrize(("action", "state", "faults"), [("Fail", "Failed", 0), ("Report", "Training", 0)])
def test_hang_action_decides_before_spares(action: str, state: str, faults: int) -> None:
    world = with_spares(spec__hang=HANG | {"action": action})
    hang(world, 1)
    assert (membership(world), world.status.state, len(world.status.faults)) == (None, state, faults)


def test_hang_beside_a_pod_without_memory_starts_a_new_execution() -> None:
    world = with_spares(spares=2, workers=3, spec__hang=HANG)
    world.finish(pod_at(world, 2), "OutOfMemory", peer_lost=False)
    hang(world, 1)
    world.control()
    world.settle()
    assert (membership(world), world.status.execution) == (None, 2)


def test_hang_after_the_last_restart_fails_the_job_despite_a_spare() -> None:
    world = with_spares(spec__hang=HANG, spec__restart={"maxRestarts": 0})
    hang(world, 1)
    assert (membership(world), world.status.state) == (None, "Failed")


def test_held_job_uses_no_spare_for_a_hang() -> None:
    world = with_spares(spec__hang=HANG)
    world.hold("sim-real-e1")
    hang(world, 1)
    assert (membership(world), world.status.execution) == (None, 1), "its pods save and end"


def admit_again_after_a_takeover(spares: int = 1) -> tuple[World, Json]:
    """Let spare pod 2 replace pod 1, and then let a queue take the execution back and admit it again. Return the world
    without pod 2, as if the Job controller had yet to create it, and pod 2."""
    world = with_spares(spares=spares)
    world.vanish(pod_at(world, 1))
    report_lost_peer_at(world, 0)
    world.settle()
    complete_takeover(world, 0, 2)
    world.hold("sim-real-e1")
    world.settle()
    world.control()
    world.settle()
    world.tick(7200)
    world.admit("sim-real-e1")
    world.control()
    world.start_pods()
    return world, world.pods.pop(name_of(pod_at(world, 2)))


def wait_for_pods(world: World, seconds: float) -> None:
    """Let some seconds pass, then let the existing pods report that they wait for the others. The pods of workers have
    begun the membership, but never had ranks."""
    world.tick(seconds)
    for pod in world.alive():
        worker = world.worker_of(pod)
        begun = None if worker is None else InPlace(restarts=2, peer_lost=False, message=f"began as worker {worker}")
        world.report(pod, 0, in_place=begun, ranks=0)
    world.settle()
    world.control()


@pytest.mark.parametrize("spares", [1, 2])
def test_execution_admitted_again_after_a_takeover_waits_until_its_pods_are_created(spares: int) -> None:
    """A missing pod was once taken for a lost one: a spare pod was spent, or the admission given up."""
    world, late = admit_again_after_a_takeover(spares)
    for seconds in (1, 30, 100, 300):
        wait_for_pods(world, seconds)
        assert (world.status.execution, takeovers(world)) == (1, {1: 2})
    world.pods[name_of(late)] = late
    world.settle()
    complete_takeover(world, 0, 2)
    assert (world.status.execution, world.status.state, world.status.restarts) == (1, "Training", 0)


def test_execution_admitted_again_after_a_takeover_has_the_startup_deadline() -> None:
    world, _ = admit_again_after_a_takeover()
    wait_for_pods(world, 3599)
    assert world.status.execution == 1
    wait_for_pods(world, 1)
    assert (world.status.execution, world.status.restarts) == (2, 0)
    assert "1 of 2 pods ran 3600 s after their creation" in condition_message(world, "Progressing")


def test_worker_deleted_after_pods_admitted_again_have_met_is_replaced() -> None:
    world, late = admit_again_after_a_takeover(spares=2)
    world.pods[name_of(late)] = late
    wait_for_pods(world, 1)
    complete_takeover(world, 0, 2)
    world.vanish(late)
    report_lost_peer_at(world, 0, restarts=3)
    world.report(pod_at(world, 3), 0, ranks=0)
    world.settle()
    assert (takeovers(world), world.status.execution) == ({1: 3}, 1)
