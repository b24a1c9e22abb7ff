"""Random worlds: pods that fail and vanish, an operator that dies between any two requests and reads stale lists."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pseudoreal_api.status import PseudoRealJobStatus
from pseudoreal_operator.conditions import has_ended
from pseudoreal_operator.plan import plan

from tests.unit.operator.world import SETTINGS, World, make_job

STATES = ("Pending", "Delinking", "Running", "Succeeded")
PHASES = [
    {"name": "one", "sharing": {"blocks": 2}, "until": {"steps": 10}, "batch": {"sequences": 8}},
    {"name": "two", "sharing": {"blocks": 4}, "until": {"steps": 20}, "batch": {"sequences": 8}, "workers": 2},
    {"name": "three", "until": {"steps": 30}, "batch": {"sequences": 8}, "workers": 3},
]
BAD_ENDS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"outcome": "Failed"},
        {"outcome": "Yielded"},
        {"outcome": "Failed", "exit_code": 139},
        {"outcome": "Failed", "exit_code": 137, "reason": "OOMKilled"},
    ]
)


class Operator(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(make_job(spec__phases=PHASES, spec__restart={"maxRestarts": 2, "backoffSeconds": 10}))
        self.before = self.world.status
        self.final: PseudoRealJobStatus | None = None

    # The operator, in good and in bad health.

    @rule()
    def a_pass(self) -> None:
        self.world.carry_out(self.world.plan())

    @rule(effects=st.integers(0, 6))
    def a_pass_that_dies(self, effects: int) -> None:
        self.world.carry_out(self.world.plan(), effects)

    @rule()
    def a_pass_during_which_jobs_end(self) -> None:
        jobs = self.world.jobs_list()
        self.world.control()
        wanted = plan(self.world.observe(jobs), self.world.now, SETTINGS)
        self.world.start_pods()
        self.world.carry_out(wanted)

    @rule()
    def passes_until_nothing_is_left_to_do(self) -> None:
        self.world.settle()
        wanted = self.world.plan()
        assert not self.world.changes(wanted)

    # The cluster.

    @rule()
    def the_job_controller_works(self) -> None:
        self.world.control()

    @rule()
    def pods_start(self) -> None:
        self.world.start_pods()

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.world.tick(seconds)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def a_pod_succeeds(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.alive())))

    @precondition(lambda self: self.world.alive())
    @rule()
    def all_pods_succeed(self) -> None:
        for pod in self.world.alive():
            self.world.finish(pod)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), end=BAD_ENDS)
    def a_pod_ends_badly(self, data: st.DataObject, end: dict[str, Any]) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.alive())), **end)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def a_pod_is_preempted(self, data: st.DataObject) -> None:
        self.world.disrupt(data.draw(st.sampled_from(self.world.alive())))

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        self.world.vanish(data.draw(st.sampled_from(list(self.world.pods.values()))))

    @precondition(lambda self: self.world.jobs_list())
    @rule(data=st.data())
    def a_child_is_deleted(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.objects)))
        del self.world.objects[key]

    @precondition(lambda self: self.world.orphans())
    @rule()
    def orphans_end(self) -> None:
        for pod in self.world.orphans():
            self.world.vanish(pod)

    # The user.

    @rule(value=st.booleans())
    def the_user_suspends_or_resumes(self, value: bool) -> None:
        if self.world.job.spec.suspend != value:
            self.world.set(suspend=value)

    # What holds at any time. That stages keep their order and attempts do not overlap, the world itself checks.

    @invariant()
    def phases_and_counters_never_go_back(self) -> None:
        old, new = self.before, self.world.status
        assert new.attempt >= old.attempt
        assert new.restarts >= old.restarts
        assert new.restarts <= 2
        for before, after in zip(old.phases, new.phases, strict=False):
            if after.state != "Failed":
                assert STATES.index(after.state) >= STATES.index(before.state)
            assert after.start_checkpoint or not before.start_checkpoint
        self.before = new

    @invariant()
    def the_end_is_the_end(self) -> None:
        if self.final is not None:
            assert self.world.status == self.final
            assert not self.world.plan().apply
        elif has_ended(self.world.status):
            self.final = self.world.status

    def teardown(self) -> None:
        """Whatever happened: once everybody does his part, the job ends, and its events tell the story once."""
        self.world.set(suspend=False)
        self.world.run_fairly()
        status = self.world.status
        assert status.phase in ("Succeeded", "Failed")
        assert not self.world.changes(self.world.plan())
        reasons = list(self.world.events.values())
        assert reasons.count("Accepted") == 1
        assert reasons.count(status.phase) == 1
        assert len([r for r in reasons if r == "PhaseStarted"]) <= 3
        if status.phase == "Succeeded":
            assert reasons.count("PhaseStarted") == reasons.count("PhaseSucceeded") == 3
            assert reasons.count("DelinkCompleted") == 2
            assert all(phase.end_checkpoint for phase in status.phases)
        else:
            assert {c.reason for c in status.conditions if c.type == "Failed"} == {"RestartsExhausted"}


TestOperator = Operator.TestCase
TestOperator.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
