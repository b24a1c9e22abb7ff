"""Each event is posted once, whichever passes died between the event and its status."""

import copy

import pytest
from pseudoreal_operator.status.events import Event, Reason, shortened, to_manifests

from tests.unit.operator.lifecycle.support.steps import begun, fail_execution
from tests.unit.operator.support.world import World, make_job

BACKOFF = {"spec__restart": {"maxRestarts": 5, "backoffSeconds": 300}}


def told(world: World) -> list[str]:
    return list(world.events.values())


def test_an_execution_that_never_ran_is_not_told_to_have_started() -> None:
    world = begun(**BACKOFF, spec__deadlines={"activeSeconds": 60})
    fail_execution(world)
    world.tick(61)
    world.settle()
    assert told(world) == ["Accepted", "PhaseStarted", "ExecutionFailed", "Failed"]


def test_each_suspension_is_told_also_before_anything_has_started() -> None:
    world = World(make_job(spec__suspend=True))
    world.settle()
    for _ in range(2):
        world.tick(1)
        world.set(suspend=False)
        world.carry_out(world.plan())
        world.tick(1)
        world.set(suspend=True)
        world.settle()
    assert told(world) == ["Accepted", "Suspended", "Resumed", "Suspended", "Resumed", "Suspended"]


def test_a_phase_that_ends_while_the_job_is_suspended_does_not_resume_it() -> None:
    """The Job of the phase is being deleted, and its pods complete as they end."""
    world = begun()
    job = copy.deepcopy(world.objects["Job", "sim-pseudo-e1"])
    world.set(suspend=True)
    world.settle()
    world.objects["Job", "sim-pseudo-e1"] = job
    world.finish_all()
    world.settle()
    assert "PhaseCompleted" in told(world)
    assert "Resumed" not in told(world)


@pytest.mark.parametrize("effects", range(12))
def test_a_pass_that_is_made_again_tells_the_same(effects: int) -> None:
    """The operator dies after `effects` requests, in each kind of pass."""
    calm, world = begun(), World(make_job())
    calm.run_fairly()
    for _ in range(200):
        world.carry_out(world.plan(), effects)
        world.settle()
        world.control()
        world.start_pods()
        world.carry_out(world.plan(), effects)
        world.finish_all()
        if world.status.completion_time:
            break
    assert world.events == calm.events


def test_an_execution_that_ended_before_its_start_was_written_is_told_whole() -> None:
    world = World(make_job(spec__restart={"maxRestarts": 0}))
    world.carry_out(world.plan())
    wanted = world.plan()
    world.carry_out(wanted, effects=len(wanted.apply))
    world.control()
    fail_execution(world)
    assert told(world) == ["Accepted", "PhaseStarted", "Failed"]


def test_the_moments_of_events_are_in_their_order() -> None:
    world = World(make_job())
    events = [Event(reason, "", stage=0, execution=1) for reason in (Reason.FAILED, Reason.ACCEPTED) * 3]
    moments = [manifest["eventTime"] for manifest in to_manifests(events, world.job.metadata, world.now, "me")]
    assert moments == sorted(set(moments))
    assert len(moments) == 6


def test_a_name_is_one_that_kubernetes_takes() -> None:
    event = Event(Reason.NODE_AVOIDED, "", stage=1, execution=12, detail="Node_7.example:" + 80 * "x")
    name = event.name(make_job().metadata)
    assert name.startswith("sim.0a1b2c3d.0012-01-20-nodeavoided-node-7.example-xxx")
    assert len(name) < 253


@pytest.mark.parametrize("text", ["a", "é", "🏖", "\ud800", "a🏖é "])
def test_a_message_is_one_that_kubernetes_takes(text: str) -> None:
    short = shortened(2000 * text)
    assert 800 < len(short.encode(errors="surrogatepass")) <= 1024
    assert shortened("all of it") == "all of it"
