"""Stages of a job, and the pods of their executions."""

from pseudoreal_operator.observe.stages import most_pods

from tests.unit.operator.lifecycle.test_elastic import PATIENCE, elastic_world, run_for
from tests.unit.operator.lifecycle.test_spares import with_spares
from tests.unit.operator.support.world import World


def completions(world: World) -> dict[str, int]:
    """Return phase name -> largest `completions` of its training Jobs."""
    found: dict[str, int] = {}
    for body in world.jobs_list():
        labels = body["metadata"]["labels"]
        if labels["pseudoreal.dev/stage"] == "train":
            phase = labels["pseudoreal.dev/phase"]
            found[phase] = max(found.get(phase, 0), body["spec"]["completions"])
    return found


def test_most_pods_are_the_completions_of_the_jobs() -> None:
    world = with_spares(spares=2)
    assert most_pods(world.job.spec) == completions(world)


def test_elastic_phase_may_have_as_many_pods_as_at_its_full_size() -> None:
    world = elastic_world(nodes=2)
    assert most_pods(world.job.spec) == completions(world)
    run_for(world, PATIENCE)
    assert world.status.elastic is not None
    assert most_pods(world.job.spec)["real"] == 4
