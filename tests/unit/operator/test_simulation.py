"""Random worlds: pods that fail and vanish, an operator that dies between any two requests and reads stale lists.

That stages keep their order, that attempts do not overlap and that no name is used twice, the world itself checks.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_api.status import PseudoRealJobStatus
from pseudoreal_operator.conditions import has_ended
from pseudoreal_operator.plan import plan

from tests.unit.operator.world import SETTINGS, World, make_job

STEPS = 100
STEPS_AFTER_THE_END = 20
WORLDS = 160
STATES = ("Pending", "Delinking", "Running", "Succeeded")
PHASES = [
    {"name": "one", "sharing": {"blocks": 2}, "until": {"steps": 10}, "batch": {"sequences": 8}},
    {"name": "two", "sharing": {"blocks": 4}, "until": {"steps": 20}, "batch": {"sequences": 8}, "workers": 2},
    {"name": "three", "until": {"steps": 30}, "batch": {"sequences": 8}, "workers": 3},
]
BAD_ENDS: list[dict[str, Any]] = [
    {"outcome": "Failed"},
    {"outcome": "Yielded"},
    {"outcome": "Failed", "exit_code": 139},
    {"outcome": "Failed", "exit_code": 137, "reason": "OOMKilled"},
]


class Simulation:
    """What can happen, at random; `seed` makes it happen again."""

    def __init__(self, seed: int) -> None:
        # Those with few restarts fail, the others go far.
        restart = {"maxRestarts": seed % 3, "backoffSeconds": 5}
        self.world = World(make_job(spec__phases=PHASES, spec__restart=restart))
        self.random = random.Random(seed)

    def step(self) -> None:
        usual: list[Callable[[], None]] = [
            self.a_pass,
            self.world.control,
            self.world.start_pods,
            self.time_passes,
            self.all_pods_succeed,
            self.the_user_resumes,
        ]
        rare = [
            self.a_pass_that_dies,
            self.a_pass_with_a_stale_list,
            self.come_to_rest,
            self.a_pod_succeeds,
            *3 * [self.a_pod_ends_badly],
            self.a_pod_is_preempted,
            self.a_pod_vanishes,
            self.a_child_is_deleted,
            self.orphans_end,
            self.the_user_suspends,
        ]
        self.random.choice(usual if self.random.random() < 0.75 else rare)()

    def a_pass(self) -> None:
        self.world.carry_out(self.world.plan())

    def a_pass_that_dies(self) -> None:
        self.world.carry_out(self.world.plan(), self.random.randint(0, 6))

    def a_pass_with_a_stale_list(self) -> None:
        """The world moves on after the Jobs are read, and again before the plan is carried out."""
        jobs = self.world.jobs_list()
        self.world.control()
        wanted = plan(self.world.observe(jobs), self.world.now, SETTINGS)
        self.world.start_pods()
        self.world.carry_out(wanted)

    def come_to_rest(self) -> None:
        self.world.settle()
        assert not self.world.changes(self.world.plan())
        if self.world.job.spec.suspend:
            assert not self.world.active_jobs()

    def time_passes(self) -> None:
        self.world.tick(self.random.randint(1, 30))

    def all_pods_succeed(self) -> None:
        for pod in self.world.alive():
            self.world.finish(pod)

    def a_pod_succeeds(self) -> None:
        self._for_one(self.world.alive(), self.world.finish)

    def a_pod_ends_badly(self) -> None:
        end = self.random.choice(BAD_ENDS)
        self._for_one(self.world.alive(), lambda pod: self.world.finish(pod, **end))

    def a_pod_is_preempted(self) -> None:
        self._for_one(self.world.alive(), self.world.disrupt)

    def a_pod_vanishes(self) -> None:
        self._for_one(list(self.world.pods.values()), self.world.vanish)

    def a_child_is_deleted(self) -> None:
        self._for_one(sorted(self.world.objects), self.world.objects.pop)

    def orphans_end(self) -> None:
        for pod in self.world.orphans():
            self.world.vanish(pod)

    def the_user_suspends(self) -> None:
        self.world.set(suspend=True)

    def the_user_resumes(self) -> None:
        if self.world.job.spec.suspend:
            self.world.set(suspend=False)

    def _for_one(self, things: list[Any], act: Callable[[Any], object]) -> None:
        if things:
            act(self.random.choice(things))


@pytest.mark.parametrize("first_seed", range(0, WORLDS, 40))
def test_every_world_ends_well(first_seed: int) -> None:
    worlds = [_lived(seed) for seed in range(first_seed, first_seed + 40)]
    # Otherwise this would show little.
    assert sum(world.status.phase == "Succeeded" for world in worlds) > 5
    assert sum(world.status.phase == "Failed" for world in worlds) > 0
    assert sum(world.status.execution_attempt > 3 for world in worlds) > 5
    assert sum("Resumed" in world.events.values() for world in worlds) > 5


def _lived(seed: int) -> World:
    simulation = Simulation(seed)
    for _ in range(STEPS):
        _step(simulation)
    # Whatever happened: once everybody does his part, the job ends.
    simulation.world.set(suspend=False)
    simulation.world.run_fairly()
    _judge(simulation.world)
    for _ in range(STEPS_AFTER_THE_END):
        _step(simulation)
    return simulation.world


def _step(simulation: Simulation) -> None:
    before = simulation.world.status
    simulation.step()
    after = simulation.world.status
    _never_back(before, after)
    assert after.restarts <= simulation.world.job.spec.restart.max_restarts
    if has_ended(before):
        assert after == before
        assert not simulation.world.plan().apply


def _never_back(old: PseudoRealJobStatus, new: PseudoRealJobStatus) -> None:
    assert new.execution_attempt >= old.execution_attempt
    assert new.restarts >= old.restarts
    for before, after in zip(old.phases, new.phases, strict=False):
        assert after.state == "Failed" or STATES.index(after.state) >= STATES.index(before.state)
        assert after.start_checkpoint or not before.start_checkpoint


def _judge(world: World) -> None:
    status, reasons = world.status, list(world.events.values())
    assert status.phase in ("Succeeded", "Failed")
    assert not world.changes(world.plan())
    assert not world.active_jobs()
    assert (reasons.count("Accepted"), reasons.count(status.phase)) == (1, 1)
    if status.phase == "Succeeded":
        assert reasons.count("PhaseStarted") == reasons.count("PhaseSucceeded") == 3
        assert reasons.count("DelinkStarted") == reasons.count("DelinkCompleted") == 2
        assert [p.start_checkpoint for p in status.phases] == [None, "two-20", "three-30"]
        assert [p.end_checkpoint for p in status.phases] == ["one-10", "two-20", "three-30"]
    else:
        assert {c.reason for c in status.conditions if c.type == "Failed"} == {"RestartsExhausted"}
        assert status.restarts == world.job.spec.restart.max_restarts
