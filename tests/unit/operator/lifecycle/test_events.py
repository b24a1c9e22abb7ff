"""Each event is posted once, whichever passes died between the event and its status."""

import copy

import pytest
from pseudoreal_operator.status.events import Event, Reason, shortened, to_manifests

from tests.unit.operator.lifecycle.support.steps import fail_execution, start_job
from tests.unit.operator.support.world import World, make_job

BACKOFF = {"spec__restart": {"maxRestarts": 5, "backoffSeconds": 300}}


def event_reasons(world: World) -> list[str]:
    return list(world.events.values())


def test_execution_that_never_ran_has_no_start_event() -> None:
    world = start_job(**BACKOFF, spec__deadlines={"activeSeconds": 60})
    fail_execution(world)
    world.tick(61)
    world.settle()
    assert event_reasons(world) == ["Accepted", "PhaseStarted", "ExecutionFailed", "Failed"]


def test_each_suspension_has_its_event_even_before_the_first_start() -> None:
    world = World(make_job(spec__suspend=True))
    world.settle()
    for _ in range(2):
        world.tick(1)
        world.set(suspend=False)
        world.carry_out(world.plan())
        world.tick(1)
        world.set(suspend=True)
        world.settle()
    assert event_reasons(world) == ["Accepted", "Suspended", "Resumed", "Suspended", "Resumed", "Suspended"]


def test_a_phase_that_ends_while_the_job_is_suspended_does_not_resume_it() -> None:
    """The Job of the phase is being deleted, and its pods complete as they end."""
    world = start_job()
    job = copy.deepcopy(world.objects["Job", "sim-pseudo-e1"])
    world.set(suspend=True)
    world.settle()
    world.objects["Job", "sim-pseudo-e1"] = job
    world.finish_all()
    world.settle()
    assert "PhaseCompleted" in event_reasons(world)
    assert "Resumed" not in event_reasons(world)


@pytest.mark.parametrize("effects", range(12))
def test_repeated_pass_posts_the_same_events(effects: int) -> None:
    """The operator dies after `effects` requests, in each kind of pass."""
    calm, world = start_job(), World(make_job())
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


def test_execution_that_ended_before_its_start_was_written_has_all_events() -> None:
    world = World(make_job(spec__restart={"maxRestarts": 0}))
    world.carry_out(world.plan())
    wanted = world.plan()
    world.carry_out(wanted, effects=len(wanted.apply))
    world.control()
    fail_execution(world)
    assert event_reasons(world) == ["Accepted", "PhaseStarted", "Failed"]


def test_event_times_follow_the_order_of_the_events() -> None:
    world = World(make_job())
    events = [Event(reason, "", stage=0, execution=1) for reason in (Reason.FAILED, Reason.ACCEPTED) * 3]
    moments = [manifest["eventTime"] for manifest in to_manifests(events, world.job.metadata, world.now, "me")]
    assert moments == sorted(set(moments))
    assert len(moments) == 6


def test_event_names_are_valid_in_kubernetes() -> None:
    event = Event(Reason.NODE_AVOIDED, "", stage=1, execution=12, detail="Node_7.example:" + 80 * "x")
    name = event.name(make_job().metadata)
    assert name.startswith("sim.0a1b2c3d.0012-01-20-nodeavoided-node-7.example-xxx")
    assert len(name) < 253


@pytest.mark.parametrize("text", ["a", "é", "🏖", "\ud800", "a🏖é "])
def test_event_messages_fit_the_limit_of_kubernetes(text: str) -> None:
    short = shortened(2000 * text)
    assert 800 < len(short.encode(errors="surrogatepass")) <= 1024
    assert shortened("all of it") == "all of it"
