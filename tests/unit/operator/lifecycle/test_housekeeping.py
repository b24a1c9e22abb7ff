"""Remains of executions that are over, and executions that an earlier release began."""

from collections import Counter
from dataclasses import replace

from pseudoreal_operator.lifecycle.plan import KEPT_JOBS, plan_blocked, plan_conflict, plan_unreadable
from pseudoreal_operator.lifecycle.rules import UNWATCHED_SECONDS
from pseudoreal_operator.observe.view import JobState

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import condition_message, run_pods, start_job
from tests.unit.operator.support.world import World


def preempt(world: World) -> None:
    """Preempt a pod, and run until the next execution runs."""
    world.disrupt(world.alive()[0])
    world.control()
    world.settle()
    world.tick(301)
    run_pods(world)


def test_preemptions_leave_a_bounded_number_of_children() -> None:
    world = start_job()
    for _ in range(30):
        preempt(world)
    assert world.status.execution == 31
    assert Counter(kind for kind, _ in world.objects) == {"Service": 1, "NetworkPolicy": 1, "Job": 6}


def test_phases_and_repetitions_leave_a_bounded_number_of_children() -> None:
    every = {"sharing": {"blocks": 2}, "batch": {"sequences": 8}}
    phases = [every | {"name": f"p{number}", "until": {"step": 10 * number}} for number in range(1, 17)]
    world = start_job(spec__phases=phases)
    most = 0
    while not world.status.completion_time:
        world.finish_all()
        run_pods(world)
        most = max(most, sum(kind == "Job" for kind, _ in world.objects))
    assert world.status.state == "Complete"
    assert most == 1 + KEPT_JOBS[JobState.COMPLETE]
    assert [phase.end_checkpoint is not None for phase in world.status.phases] == [True] * 16, "every result was read"


def test_orphaned_pods_are_waited_for_and_not_touched() -> None:
    """Two executions would compete for the GPUs. Anyone may give a pod these labels, so the operator does not delete
    it."""
    world = start_job(spec__restart={"backoffSeconds": 0})
    (pod,) = world.alive()
    world.delete_job_and_leave_pods(world.active_jobs()[0])
    world.settle()
    world.tick(301)
    run_pods(world)
    assert world.active_jobs() == []
    assert f"kubectl delete pod {pod['metadata']['name']} -n default" in condition_message(world, "Progressing")
    assert "deletionTimestamp" not in pod["metadata"]
    assert world.plan().requeue_after == UNWATCHED_SECONDS
    world.finish(pod)
    run_pods(world)
    assert world.active_jobs() == ["sim-pseudo-e2"]


def test_status_has_the_end_of_a_job_before_its_pods_are_deleted() -> None:
    """If the operator died in between, it would later take the Job for one that someone else deleted, and start
    again."""
    world = start_job(spec__hang={"stepSeconds": 120, "startSeconds": 300, "action": "Fail"})
    for seconds in (0, 130):
        world.tick(seconds)
        world.report(world.alive()[0], 1)
    wanted = world.plan()
    assert (wanted.status.state, wanted.delete) == ("Failed", ())
    for _ in range(3):
        world.carry_out(world.plan(), effects=1)
    world.settle()
    assert (world.status.state, world.status.execution) == ("Failed", 1)
    assert world.active_jobs() == []


def test_observed_generation_is_current_in_every_state() -> None:
    world = start_job()
    metadata = world.job.metadata.model_copy(update={"generation": 7})
    changed = replace(world.observe(), job=world.job.model_copy(update={"metadata": metadata}))
    for wanted in (
        plan_unreadable(metadata, world.status, "x", world.now),
        plan_blocked(changed, "x", world.now),
        plan_conflict(changed, "x", world.now),
    ):
        assert wanted.status.observed_generation == 7
    world.run_fairly()
    assert world.status.state == "Complete"
    world.set(suspend=True)
    world.settle()
    assert world.status.observed_generation == world.job.metadata.generation == 2
    assert world.status.state == "Complete"


def test_execution_created_by_release_0_2_0_continues() -> None:
    """The Job of that release has another name, and the same labels."""
    world = start_job(spec__restart={"backoffSeconds": 0})
    of_old = world.objects["Job", "sim-pseudo-e1"]
    of_old["metadata"]["name"] = "sim-pseudo-e1"
    for pod in world.pods.values():
        pod["metadata"]["job"] = "sim-pseudo-e1"
    assert world.settle() == 0
    world.finish(world.alive()[0], "Failed")
    world.control()
    world.run_fairly()
    assert world.status.state == "Complete"
    jobs = {name: body["metadata"]["name"] for (kind, name), body in world.objects.items() if kind == "Job"}
    assert jobs.pop("sim-pseudo-e1") == "sim-pseudo-e1"
    assert jobs
    assert all(bare(name) == key != name for key, name in jobs.items())
