"""A growth is a transition like a delink; events, conditions and configurations say what it does."""

from dataclasses import dataclass, field

from pseudoreal_operator.status.events import Event

from tests.unit.operator.lifecycle.support.steps import condition_message, config, run_until, start_job
from tests.unit.operator.support.world import World, make_job

BATCH = {"sequences": 8, "microBatches": 2}
PHASES = [
    {"name": "pseudo", "layers": 2, "sharing": {"blocks": 1}, "until": {"step": 5}, "batch": BATCH},
    {
        "name": "deep",
        "growth": {"pattern": "Interleave"},
        "sharing": {"blocks": 1},
        "until": {"step": 10},
        "batch": BATCH,
    },
    {"name": "real", "until": {"step": 20}, "batch": BATCH},
]


@dataclass
class _Told(World):
    """A world that keeps the messages of events."""

    messages: list[str] = field(default_factory=list)

    def _post(self, event: Event) -> None:
        super()._post(event)
        self.messages.append(event.message)


def test_events_and_condition_say_how_many_layers_there_are() -> None:
    world = _Told(make_job(spec__phases=PHASES))
    run_until(world, "deep")
    texts = "\n".join(world.messages)
    assert "The delink into phase deep starts: it is grown from 2 to 8 layers (Interleave)." in texts
    assert "Phase deep will start from the checkpoint deep-" in texts
    assert ", grown from 2 to 8 layers (Interleave)." in texts
    assert condition_message(world, "Delinked") == "1 of 2 delinks are done."
    world.run_fairly()
    assert world.status.state == "Complete"
    texts = "\n".join(world.messages)
    assert "The delink into phase real starts." in texts
    assert "Phase real will start from the delinked checkpoint" in texts
    assert condition_message(world, "Delinked").startswith("Phase real starts from the delinked checkpoint")


def test_condition_after_the_last_growth_names_it() -> None:
    world = start_job(spec__phases=[PHASES[0], PHASES[2]])
    world.run_fairly()
    assert condition_message(world, "Delinked").endswith(", grown from 2 to 8 layers (Stack).")


def test_pods_of_each_stage_get_the_layers_of_their_phase() -> None:
    world = run_until(World(make_job(spec__phases=PHASES)), "pseudo")
    assert config(world, "sim-pseudo-e1")["model"]["layers"] == 2
    run_until(world, "deep-delink")
    delink = config(world, "sim-deep-delink-e1")
    assert (delink["toModel"]["layers"], delink["growth"]["pattern"], delink["contractVersion"]) == (8, "Interleave", 4)
    run_until(world, "deep")
    assert config(world, "sim-deep-e1")["model"]["layers"] == 8
    run_until(world, "real-delink")
    assert {"toModel", "growth"}.isdisjoint(config(world, "sim-real-delink-e1"))
