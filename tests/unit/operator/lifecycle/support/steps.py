"""Steps that bring a job to the start of a test, and accessors for its conditions."""

import json
from typing import Any

from pseudoreal_operator.status.conditions import find

from tests.unit.operator.manifests.support.rendered import files_of
from tests.unit.operator.support.world import World, make_job


def run_pods(world: World) -> None:
    """Create the requested children and start their pods."""
    world.settle()
    world.control()
    world.start_pods()
    world.settle()


def run_until(world: World, stage: str) -> World:
    """Run the job until this stage runs, in whatever execution."""
    for _ in range(20):
        world.settle()
        world.wait_out()
        run_pods(world)
        if any(name.startswith(f"sim-{stage}-e") for name in world.active_jobs()):
            return world
        world.finish_all()
    raise AssertionError(f"{stage} never runs: {world.status}")


def start_job(**changes: Any) -> World:
    """Return a world in which the first execution of the first phase runs."""
    world = World(make_job(**changes))
    run_pods(world)
    return world


def fail_execution(world: World, **end: Any) -> None:
    """Make one pod fail, after which the others are ended."""
    world.finish(world.alive()[0], **({"outcome": "Failed"} | end))
    if world.alive():
        world.carry_out(world.plan())
    world.control()
    world.carry_out(world.plan())


def condition_message(world: World, kind: str) -> str:
    condition = find(world.status, kind)
    assert condition is not None
    return condition.message


def condition_states(world: World) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in world.status.conditions}


def settle_without_orphans(world: World) -> None:
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    world.settle()


def config(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files_of(world.objects["Job", name])["config.json"])
    return found
