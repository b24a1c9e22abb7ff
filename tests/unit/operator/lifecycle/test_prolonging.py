"""Jobs that train longer than first requested: phases are added, or the last one is prolonged."""

import json
from typing import Any

from pseudoreal_api.spec.phase import Phase
from pseudoreal_operator.status.conditions import find

from tests.unit.operator.lifecycle.support.steps import config, run_until, settle_without_orphans
from tests.unit.operator.support.world import World, make_job


def prolong(world: World, step: int) -> None:
    """Move the end of the last phase."""
    *others, last = world.job.spec.phases
    bound = last.until.model_copy(update={"step": step})
    world.set(phases=[*others, last.model_copy(update={"until": bound})])


def add_phase(world: World, **changes: Any) -> None:
    batch = {"sequences": 8, "microBatches": 2}
    phase = {"name": "longer", "until": {"step": 30}, "batch": batch} | changes
    world.set(phases=[*world.job.spec.phases, Phase.model_validate(phase)])


def steps_of(world: World, name: str) -> tuple[int, int]:
    """Return the last step of the phase and of the job, as the pods are told."""
    found = config(world, name)
    return found["phaseSteps"], found["totalSteps"]


def test_prolonged_phase_continues_with_its_new_last_step() -> None:
    world = run_until(World(make_job()), "real")
    assert steps_of(world, "sim-real-e1") == (20, 20)
    prolong(world, 40)
    settle_without_orphans(world)
    assert world.active_jobs() == ["sim-real-e2"]
    assert steps_of(world, "sim-real-e2") == (40, 40)
    assert (world.status.restarts, world.status.retries) == (0, None), "it is no fault"
    assert list(world.events.values()).count("SpecChanged") == 1
    world.run_fairly()
    assert (world.status.state, world.status.phases[1].step) == ("Complete", 40)


def test_earlier_phases_learn_the_new_last_step() -> None:
    """The learning rate follows one schedule until the end of the job."""
    world = run_until(World(make_job()), "pseudo")
    prolong(world, 40)
    settle_without_orphans(world)
    assert steps_of(world, "sim-pseudo-e2") == (10, 40)
    world.run_fairly()
    assert [phase.step for phase in world.status.phases] == [10, 40]


def test_prolonging_does_not_interrupt_a_delink() -> None:
    world = run_until(World(make_job()), "real-delink")
    prolong(world, 40)
    world.settle()
    assert (world.active_jobs(), world.status.execution) == (["sim-real-delink-e1"], 1)
    run_until(world, "real")
    assert steps_of(world, "sim-real-e1") == (40, 40)


def test_phase_that_ended_while_it_was_prolonged_continues() -> None:
    world = run_until(World(make_job()), "real")
    world.finish_all()
    prolong(world, 40)
    settle_without_orphans(world)
    assert (world.active_jobs(), world.status.phases[1].state) == (["sim-real-e2"], "Training")
    assert "PhaseProlonged" in world.events.values()
    checkpoint = world.status.checkpoint
    assert checkpoint
    assert checkpoint.latest == "real-20", "that at the end of the phase as it was"
    world.run_fairly()
    assert (world.status.state, world.status.phases[1].end_checkpoint) == ("Complete", "real-40")


def test_phase_that_ended_early_stays_complete_when_prolonged() -> None:
    """A phase may end early by its loss or by a request: more steps do not change that."""
    world = run_until(World(make_job()), "real")
    job = world.objects["Job", "sim-real-e1"]
    (key,) = job["metadata"]["annotations"]
    job["metadata"]["annotations"][key] = "19/19"
    world.finish_all()
    job["metadata"]["annotations"][key] = "20/20"
    prolong(world, 40)
    world.settle()
    assert (world.status.state, world.status.phases[1].step) == ("Complete", 19)


def test_phases_can_be_added_while_another_trains() -> None:
    world = run_until(World(make_job()), "pseudo")
    add_phase(world)
    settle_without_orphans(world)
    assert [phase.name for phase in world.status.phases] == ["pseudo", "real", "longer"]
    assert steps_of(world, "sim-pseudo-e2") == (10, 30)
    world.run_fairly()
    assert (world.status.state, [phase.step for phase in world.status.phases]) == ("Complete", [10, 20, 30])


def test_phases_can_be_added_just_before_the_end() -> None:
    world = run_until(World(make_job()), "real")
    world.finish_all()
    add_phase(world)
    settle_without_orphans(world)
    assert world.status.current_phase == "longer"
    world.run_fairly()
    assert world.status.state == "Complete"


def test_an_added_phase_that_cannot_run_fails_the_job_when_it_is_reached() -> None:
    """An added phase cannot be removed; results of the trained phases stay."""
    world = run_until(World(make_job()), "pseudo")
    add_phase(world, workers=2, parallelism={"pipeline": 4})
    settle_without_orphans(world)
    accepted = find(world.status, "Accepted")
    assert accepted
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert (world.active_jobs(), world.status.state) == (["sim-pseudo-e1"], "Training"), "nothing else changes yet"
    world.run_fairly()
    assert [phase.state for phase in world.status.phases] == ["Complete", "Complete", "Failed"]
    failed = find(world.status, "Failed")
    assert failed
    assert failed.reason == "InvalidSpec"
    assert "a multiple of parallelism.pipeline 4" in failed.message


def test_job_without_a_valid_last_steps_annotation_is_not_restarted() -> None:
    for said in ({}, {"pseudoreal.dev/last-steps": "ten"}):
        world = run_until(World(make_job()), "real")
        world.objects["Job", "sim-real-e1"]["metadata"]["annotations"] = said
        prolong(world, 40)
        world.settle()
        assert world.status.execution == 1, json.dumps(said)


def test_invalid_edit_keeps_a_suspended_job_suspended() -> None:
    world = run_until(World(make_job()), "real")
    world.set(suspend=True)
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    broken = world.job.spec.pod.model_copy(update={"template": {"spec": {"restartPolicy": "Always"}}})
    world.set(pod=broken, suspend=False)
    world.settle()
    suspended, accepted = find(world.status, "Suspended"), find(world.status, "Accepted")
    assert suspended
    assert accepted
    assert (suspended.status, suspended.reason, accepted.status) == ("True", "InvalidSpec", "False")
    assert "spec.pod.template.spec.restartPolicy" in suspended.message
    assert world.active_jobs() == []
    world.set(suspend=True)
    world.settle()
    world.set(pod=broken.model_copy(update={"template": {}}), suspend=False)
    world.settle()
    assert (world.active_jobs(), world.status.state) == (["sim-real-e2"], "Training")


def test_resumed_job_gets_a_dry_run_before_its_children() -> None:
    world = run_until(World(make_job()), "real")
    world.set(suspend=True)
    world.settle()
    for pod in world.orphans():
        world.vanish(pod)
    world.set(suspend=False)
    assert {manifest["kind"] for manifest in world.plan().dry_run} >= {"Job"}
