"""An operator that dies after it created a Job, and before it wrote the status: the execution has started all the same.

Its number is used up: name, rendezvous and checkpoint fence of the next execution must differ.
"""

import pytest
from pseudoreal_operator.lifecycle.plan import plan_rejected

from tests.support.names import bare
from tests.unit.operator.lifecycle.support.steps import condition_states, settle_without_orphans
from tests.unit.operator.lifecycle.test_repeating import request_repetition
from tests.unit.operator.support.world import World, make_job

STAGES = ["sim-pseudo-e1", "sim-real-delink-e1", "sim-real-e1"]


def create_without_record(name: str) -> World:
    """Return a world whose operator died right after it created the Job, and whose pods run."""
    world = World(make_job())
    for _ in range(20):
        wanted = world.plan()
        if any((body["kind"], bare(body["metadata"]["name"])) == ("Job", name) for body in wanted.apply):
            world.carry_out(wanted, effects=len(wanted.stop + wanted.fail_jobs + wanted.delete + wanted.apply))
            world.control()
            world.start_pods()
            return world
        world.carry_out(wanted)
        if not wanted.apply and wanted.status == world.status:
            world.control()
            world.start_pods()
            world.finish_all()
    raise AssertionError(f"no pass creates {name}")


@pytest.mark.parametrize("effects", [0, 1, 2, 1000])
@pytest.mark.parametrize("name", STAGES)
def test_suspension_uses_up_the_number(name: str, effects: int) -> None:
    """The first passes die, too, after `effects` requests."""
    world = create_without_record(name)
    world.set(suspend=True)
    for _ in range(2):
        world.carry_out(world.plan(), effects)
    world.settle()
    settle_without_orphans(world)
    assert (world.status.state, world.active_jobs(), world.alive()) == ("Suspended", [], [])
    world.set(suspend=False)
    world.settle()
    assert (world.status.execution, world.active_jobs()) == (2, [name.replace("-e1", "-e2")])
    assert (world.status.restarts, world.status.faults) == (0, [])
    started = "DelinkStarted" if "delink" in name else "PhaseStarted"
    posted = list(world.events.values())
    assert posted.index("Suspended") > len(posted) - 1 - posted[::-1].index(started)
    world.run_fairly()
    assert world.status.state == "Complete"


def test_rejected_resumption_keeps_a_job_that_has_trained() -> None:
    world = create_without_record("sim-pseudo-e1")
    world.set(suspend=True)
    world.settle()
    settle_without_orphans(world)
    world.set(suspend=False)
    world.carry_out(plan_rejected(world.observe(), "a new policy denies it", world.now))
    assert condition_states(world)["Progressing"] == ("False", "Blocked")


def test_request_to_repeat_the_phase_is_served() -> None:
    world = create_without_record("sim-pseudo-e1")
    request_repetition(world, "pseudo")
    assert "PhaseRepeated" in world.events.values()
    settle_without_orphans(world)
    assert world.status.execution == 2


def test_deleted_job_is_replaced_by_another_one() -> None:
    """Its pods still tell that it existed."""
    world = create_without_record("sim-pseudo-e1")
    world.delete_behind_the_operator(("Job", "sim-pseudo-e1"))
    world.settle()
    world.control()
    settle_without_orphans(world)
    world.wait_out()
    world.settle()
    assert (world.status.execution, world.active_jobs()) == (2, ["sim-pseudo-e2"])
