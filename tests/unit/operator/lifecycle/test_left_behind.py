"""What is left of executions that are over, and of those that an earlier release began."""

from collections import Counter

from tests.support.names import bare
from tests.unit.operator.lifecycle.steps import begun, run_pods
from tests.unit.operator.world import World


def preempt(world: World) -> None:
    """Until the next execution runs."""
    world.disrupt(world.alive()[0])
    world.control()
    world.settle()
    world.tick(301)
    run_pods(world)


def test_preemptions_leave_a_bounded_number_of_children() -> None:
    world = begun()
    for _ in range(30):
        preempt(world)
    assert world.status.execution == 31
    assert Counter(kind for kind, _ in world.objects) == {"Service": 1, "NetworkPolicy": 1, "Job": 6}


def test_an_execution_of_release_0_2_0_goes_on() -> None:
    """Its Job has another name, and the same labels."""
    world = begun(spec__restart={"backoffSeconds": 0})
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
