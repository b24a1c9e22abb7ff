"""Random interleavings of pods, Jobs, clocks, users and dying operators: the invariants hold.

The world itself checks that stages keep their order and start from committed checkpoints, that executions do not
overlap, and that no name is used twice.
"""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pseudoreal_api.spec.request import Request
from pseudoreal_api.status.status import Discard, PhaseStatus, PseudoRealJobStatus
from pseudoreal_api.wire.reports import Activity
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.observe.memory import KINDS
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.view import SIDECAR_SECONDS
from pseudoreal_operator.status.conditions import has_ended, is_true

from tests.support.depth import DEPTH
from tests.unit.operator.lifecycle.support.initial_states import (
    BAD_ENDS,
    HANG,
    Beginning,
    beginnings,
    beginnings_with_losses,
)
from tests.unit.operator.support.watched import Watches
from tests.unit.operator.support.world import SETTINGS, World, make_job

STATES = ("Pending", "Delinking", "Training", "Complete")
STORIES: Counter[str] = Counter()
"""Number of lives in which each event or reason of failure occurred: a test without such events would prove nothing."""
SOURCES: Counter[str] = Counter()
"""Number of plans by their source, in lives with watches."""
LOOKS_LATER = 3600.0
"""Upper bound in seconds of every wait for a time: deadlines and backoffs of the jobs here are shorter."""


class Life(RuleBasedStateMachine):
    """One job from its creation on; hypothesis chooses the actions."""

    @initialize(beginning=beginnings())
    def create(self, beginning: Beginning) -> None:
        self._begin(beginning)

    def _begin(self, beginning: Beginning) -> None:
        self.world = World(
            make_job(**beginning.spec),
            proxies=beginning.proxies,
            late_nodes=beginning.late_nodes,
            node_skew=beginning.node_skew,
            api_skew=beginning.api_skew,
        )
        self.before = self.world.status
        for _ in range(beginning.stages):
            self.a_stage_is_done()
        for end in beginning.losses:
            if end is HANG:
                self.a_rank_hangs(0, meet=True)
            else:
                self.a_worker_is_lost_and_the_others_wait(end, 0, meet=True)
        for trouble in beginning.troubles:
            self.a_trouble_comes_and_passes(trouble)
        self.world.limit_nodes(beginning.nodes)

    # The operator.

    @rule()
    def a_pass(self) -> None:
        self.world.carry_out(self.world.plan())

    @rule(effects=st.integers(0, 6))
    def a_pass_that_dies(self, effects: int) -> None:
        self.world.carry_out(self.world.plan(), effects)
        self.world.reports.clear()
        self.world.sightings = Sightings()

    @rule()
    def a_pass_with_a_stale_list(self) -> None:
        """The world changes after the Jobs are read, and again before the plan is carried out."""
        jobs = self.world.jobs_list()
        self.world.control()
        wanted = plan(self.world.observe(jobs), self.world.now, SETTINGS)
        self.world.start_pods()
        self.world.carry_out(wanted)

    @rule()
    def come_to_rest(self) -> None:
        self.world.settle()
        again = self.world.plan()
        assert not self.world.changes(again), "planning twice changes nothing"
        assert _waits_for_something_named(self.world, again)
        if self.world.job.spec.suspend:
            assert all(map(self.world.ends_by_itself, self.world.active_jobs()))

    # Kubernetes.

    @rule()
    def jobs_are_controlled(self) -> None:
        self.world.control()

    @rule()
    def pods_start(self) -> None:
        self.world.start_pods()

    @rule(seconds=st.sampled_from([1, 10, 30, 130, 301, 450]))
    def time_passes(self, seconds: int) -> None:
        self.world.tick(seconds)

    @rule()
    def all_pods_succeed(self) -> None:
        for pod in self.world.living_workers():
            self.world.finish(pod)

    def _one_of(self, data: st.DataObject, pods: list[dict[str, Any]]) -> dict[str, Any]:
        """Draw a pod by its name, so that the report of a failure shows the name."""
        return self.world.pods[data.draw(st.sampled_from([pod["metadata"]["name"] for pod in pods]))]

    @precondition(lambda self: self.world.living_workers())
    @rule(data=st.data())
    def a_pod_succeeds(self, data: st.DataObject) -> None:
        self.world.finish(self._one_of(data, self.world.living_workers()))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), end=st.sampled_from(BAD_ENDS))
    def a_pod_ends_badly(self, data: st.DataObject, end: dict[str, Any]) -> None:
        self.world.finish(self._one_of(data, self.world.alive()), **end)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def a_pod_is_preempted(self, data: st.DataObject) -> None:
        self.world.disrupt(self._one_of(data, self.world.alive()))

    @precondition(lambda self: self.world.waiting())
    @rule(data=st.data())
    def a_node_rejects_a_pod(self, data: st.DataObject) -> None:
        self.world.reject(self._one_of(data, self.world.waiting()))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        self.world.lose(self._one_of(data, self.world.alive()))

    @rule(nodes=st.integers(0, 3))
    def nodes_come_and_go(self, nodes: int) -> None:
        """Pods keep the nodes that they have."""
        self.world.limit_nodes(nodes)

    @precondition(lambda self: self.world.active_jobs())
    @rule(data=st.data())
    def a_queue_holds_or_admits(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.world.active_jobs()))
        (self.world.admit if name in self.world.held() else self.world.hold)(name)

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        self.world.vanish(self._one_of(data, list(self.world.pods.values())))

    @precondition(lambda self: self.world.objects)
    @rule(data=st.data())
    def a_child_is_deleted(self, data: st.DataObject) -> None:
        self.world.delete_behind_the_operator(data.draw(st.sampled_from(sorted(self.world.objects))))

    @rule()
    def orphans_end(self) -> None:
        for pod in self.world.orphans():
            self.world.vanish(pod)

    @precondition(lambda self: self.world.alive())
    @rule(step=st.integers(0, 30), data=st.data())
    def a_pod_reports(self, step: int, data: st.DataObject) -> None:
        activity: Activity = "computing" if step else "starting"
        self.world.report(self._one_of(data, self.world.alive()), step, activity)

    # What mostly happens, so that lives get on.

    @rule()
    def work_goes_on(self) -> None:
        self.world.settle()
        self.world.control()
        self.world.start_pods()
        self.world.carry_out(self.world.plan())

    @rule()
    def a_stage_is_done(self) -> None:
        self.work_goes_on()
        self.world.finish_all()
        if self.world.proxies:
            self.world.carry_out(self.world.plan())
            self.world.tick(SIDECAR_SECONDS)
        self.world.carry_out(self.world.plan())

    @rule(end=st.sampled_from(BAD_ENDS))
    def an_execution_fails(self, end: dict[str, Any]) -> None:
        self.work_goes_on()
        for pod in self.world.alive()[:1]:
            self.world.finish(pod, **end)
        self.world.control()
        self.world.carry_out(self.world.plan())

    def a_trouble_comes_and_passes(self, trouble: str) -> None:
        if trouble == "failure":
            self.an_execution_fails({"outcome": "Failed"})
        elif trouble == "restart in place":
            self.ranks_are_restarted_in_place(0, heard=True)
        else:
            self.work_goes_on()
            for name in self.world.active_jobs():
                self.world.hold(name)
                self.world.settle()
                if name in self.world.held():
                    self.world.admit(name)
        self.world.tick(301)

    @rule(origin=st.integers(0, 2), heard=st.booleans())
    def ranks_are_restarted_in_place(self, origin: int, heard: bool) -> None:
        self.work_goes_on()
        self.world.restart_in_place(origin, heard=heard)
        self.world.carry_out(self.world.plan())

    @rule(end=st.sampled_from([None, *BAD_ENDS]), lost=st.integers(0, 1), meet=st.booleans())
    def a_worker_is_lost_and_the_others_wait(self, end: dict[str, Any] | None, lost: int, meet: bool) -> None:
        self.work_goes_on()
        world = self.world
        pods = [pod for pod in world.alive() if "nodeName" in pod["spec"] or not world.nodes]
        for pod in pods:
            world.report(pod, 1, ranks=0 if world.worker_of(pod) is None else 1)
        for pod in [pod for pod in pods if world.worker_of(pod) == lost]:
            world.disrupt(pod) if end is None else world.finish(pod, **end)
        for pod in world.living_workers():
            world.lose_peer(pod)
        world.settle()
        if meet:
            self._members_meet()

    def _members_meet(self) -> None:
        if (spares := self.world.status.spares) is not None:
            for pod in self.world.living_workers():
                self.world.meet(pod, spares)
            self.world.carry_out(self.world.plan())

    @rule(hung=st.integers(0, 1), meet=st.booleans())
    def a_rank_hangs(self, hung: int, meet: bool) -> None:
        """All pods report, and the others wait for the rank that computes."""
        self.work_goes_on()
        world, before = self.world, self.world.status
        for seconds in (130, 0):
            for pod in world.alive():
                worker = world.worker_of(pod)
                activity: Activity = "computing" if worker == hung else "waiting"
                world.report(pod, 1, activity, ranks=0 if worker is None else 1)
            world.tick(seconds)
        world.settle()
        if world.status.execution == before.execution and world.status.spares != before.spares:
            STORIES["HangReplaced"] += 1
        if meet:
            self._members_meet()

    @precondition(lambda self: self.world.alive())
    @rule(activity=st.sampled_from(["computing", "starting"]), seconds=st.sampled_from([130, 301]))
    def training_stands_still(self, activity: Activity, seconds: int) -> None:
        for pod in self.world.alive():
            self.world.report(pod, 1, activity)
        self.world.tick(seconds)
        self.world.carry_out(self.world.plan())

    # The user.

    @rule(value=st.sampled_from([True, False, False, False]))
    def the_user_suspends_or_resumes(self, value: bool) -> None:
        if value != self.world.job.spec.suspend:
            self.world.set(suspend=value)

    @rule(phase=st.sampled_from(["one", "two", "three"]))
    def the_user_wants_a_phase_again(self, phase: str) -> None:
        request = str(self.world.job.metadata.generation)
        self.world.set(requests=[Request(id=request, type="RepeatPhase", phase=phase)])

    @rule(phase=st.sampled_from(["one", "two", "three"]))
    def the_user_wants_a_phase_to_end(self, phase: str) -> None:
        request = str(self.world.job.metadata.generation)
        self.world.set(requests=[Request(id=request, type="FinishPhase", phase=phase)])

    @rule()
    def the_user_prolongs_the_job(self) -> None:
        # The API server refuses it for a job that has ended.
        if not has_ended(self.world.status):
            *others, last = self.world.job.spec.phases
            until = last.until.model_copy(update={"step": 40})
            self.world.set(phases=[*others, last.model_copy(update={"until": until})])

    # What always holds.

    @invariant()
    def nothing_goes_back_without_a_reason(self) -> None:
        if not hasattr(self, "world"):
            return
        old, new = self.before, self.world.status
        self.before = new
        assert new.execution >= old.execution
        assert new.restarts >= old.restarts
        for before, after in zip(old.phases, new.phases, strict=False):
            assert _is_later(before, after) or _is_done_again(old, new, before, after)
        if has_ended(old):
            seen = {"observed_generation": new.observed_generation}
            assert new == old.model_copy(update=seen), "an end is an end"
            assert not self.world.plan().apply

    @invariant()
    def restarts_are_bounded(self) -> None:
        if not hasattr(self, "world"):
            return
        restart, status = self.world.job.spec.restart, self.world.status
        if restart.window_seconds is None:
            assert status.restarts <= restart.max_restarts
        else:
            times = [clock.from_text(fault.time).timestamp() for fault in status.faults]
            assert len([t for t in times if times[-1] - t < restart.window_seconds]) <= max(1, restart.max_restarts)

    def teardown(self) -> None:
        """Check that, whatever happened, the job ends and its end is documented, once all parties do their part. One
        node is missing then; phase three can run without it."""
        if not hasattr(self, "world"):
            return
        self.world.limit_nodes(2)
        self.world.set(suspend=False)
        self.world.run_fairly()
        _judge(self.world)


class LifeWithLosses(Life):
    """A life that begins with lost workers, which spare pods may replace."""

    @initialize(beginning=beginnings_with_losses())
    def create(self, beginning: Beginning) -> None:
        self._begin(beginning)


class LifeWithWatches(Life):
    """A life whose operator is told of Jobs and pods by watches: late, in another order for each kind, and with
    connections that are cut at any point."""

    def _begin(self, beginning: Beginning) -> None:
        self.watches: Watches | None = None
        super()._begin(beginning)
        self.watches = Watches(self.world)

    @rule()
    def a_pass_with_a_stale_list(self) -> None:
        """Not here: the plan of a stale list is not the plan of the objects, by intent."""

    @rule(kind=st.sampled_from(KINDS), most=st.integers(1, 5))
    def a_watch_tells(self, kind: str, most: int) -> None:
        assert self.watches
        self.watches.tell(kind, most)

    @rule()
    def all_watches_tell(self) -> None:
        assert self.watches
        self.watches.tell_all()

    @rule(kind=st.sampled_from(KINDS))
    def a_watch_is_cut(self, kind: str) -> None:
        assert self.watches
        self.watches.cut(kind)

    @rule(kind=st.sampled_from(KINDS), expired=st.booleans())
    def a_watch_is_connected_again(self, kind: str, expired: bool) -> None:
        assert self.watches
        (self.watches.list_again if expired else self.watches.resume)(kind)

    @rule(effects=st.integers(0, 6))
    def a_pass_that_dies(self, effects: int) -> None:
        super().a_pass_that_dies(effects)
        assert self.watches
        self.watches.die()

    def teardown(self) -> None:
        super().teardown()
        if getattr(self, "watches", None):
            assert self.watches
            SOURCES.update(self.watches.sources)


def _is_later(before: PhaseStatus, after: PhaseStatus) -> bool:
    forward = after.state == "Failed" or STATES.index(after.state) >= STATES.index(before.state)
    return forward and bool(after.start_checkpoint or not before.start_checkpoint)


def _is_done_again(old: PseudoRealJobStatus, new: PseudoRealJobStatus, before: PhaseStatus, after: PhaseStatus) -> bool:
    """Return whether a phase is trained again for a reason: a new request of the user, or a delink that timed out.
    Its old checkpoints are discarded."""
    asked = new.served_requests != old.served_requests
    rolled_back = any(f.reason == "DelinkTimeout" and f.execution >= old.execution for f in new.faults)
    # One rule may make several passes.
    marked = after.discards is not None and after.discards[-1].before_execution > old.execution
    kept = all(any(_covers(new_rule, rule) for new_rule in after.discards or ()) for rule in before.discards or ())
    return (asked or rolled_back) and marked and kept and after.discards != before.discards


def _covers(rule: Discard, other: Discard) -> bool:
    later = rule.before_execution >= other.before_execution and rule.from_step <= other.from_step
    return later and (rule.continued or not other.continued)


def _waits_for_something_named(world: World, again: Plan) -> bool:
    """Return whether a plan without a next pass is right. Without one, the operator may only wait for the user, who
    is told so, or for a Job or pod that is still active, which is watched."""
    if again.requeue_after is not None:
        return again.requeue_after <= LOOKS_LATER
    goes_on = bool(world.active_jobs() or world.alive())
    return goes_on or has_ended(world.status) or is_true(world.status, "Suspended")


def _judge(world: World) -> None:
    status, reasons = world.status, list(world.events.values())
    STORIES.update(set(reasons) | {c.reason for c in status.conditions if c.type == "Failed"})
    assert status.state in ("Complete", "Failed")
    assert not world.changes(world.plan())
    world.control()
    assert not world.kept_by_proxies()
    assert all(map(world.ends_by_itself, world.active_jobs()))
    assert (reasons.count("Accepted"), reasons.count({"Complete": "Completed"}.get(status.state, status.state))) == (
        1,
        1,
    )
    if status.state == "Complete":
        rounds = 1 + reasons.count("PhaseRepeated") + reasons.count("DelinkRolledBack")
        assert 3 <= reasons.count("PhaseCompleted") <= 3 * rounds
        assert [p.start_checkpoint for p in status.phases] == [None, "two-20", "three-30"]
        last = world.job.spec.phases[-1].until.step
        assert [p.end_checkpoint for p in status.phases] == ["one-10", "two-20", f"three-{last}"]
    else:
        words = {c.reason for c in status.conditions if c.type == "Failed"}
        assert words <= {
            "RestartsExhausted", "DelinkTimeout", "StepStalled", "StartStalled", "StartupDeadlineExceeded",
            "DeadlineExceeded",
        }  # fmt: skip


CHOICES = settings(
    max_examples=DEPTH.of(200, 3000),
    stateful_step_count=60,
    deadline=None,
    derandomize=not DEPTH.is_deep,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_every_life_ends_well() -> None:
    _live(Life, 0.8)
    assert all(
        STORIES[story]
        for story in (
            "PhaseRepeated", "Resumed", "RestartsExhausted", "Completed", "Preempted", "RestartedInPlace", "Resized",
            "SidecarEnded",
        )
    ), STORIES  # fmt: skip
    assert any(STORIES[story] for story in ("StartupDeadlineExceeded", "DeadlineExceeded")), STORIES
    assert any(STORIES[story] for story in ("HangDetected", "DelinkRolledBack", "DelinkTimeout")), STORIES


def test_every_life_that_began_with_lost_workers_ends_well() -> None:
    _live(LifeWithLosses, 0.2)
    assert all(STORIES[story] for story in ("SpareTookOver", "HangReplaced", "Completed")), STORIES


def test_every_life_ends_well_whatever_the_watches_are_late_with() -> None:
    SOURCES.clear()
    _live(LifeWithWatches, 0.2)
    assert all(STORIES[story] for story in ("Completed", "ExecutionFailed")), STORIES
    assert all(SOURCES[source] for source in ("memory", "pods", "live")), SOURCES


def _live(life: type[Life], part: float) -> None:
    """Run random lives. The drawn numbers depend on the literals of all imported modules, and so on the other tests
    of the run."""
    STORIES.clear()
    run_state_machine_as_test(life, settings=settings(CHOICES, max_examples=int(part * CHOICES.max_examples)))
