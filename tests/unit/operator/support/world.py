"""A small simulated cluster for tests of the plan: API server, Job controller, kubelets and trainers, all able to
misbehave.

It holds objects as the API server would return them, so the operator's own parsers are tested too. Its trainers claim
the real fence on the checkpoint volume whenever ranks start, and check the fence when they end with a checkpoint; a
rank that is refused fails the test. The world knows the content of the volume and checks, whenever a pod is created,
that the stages run in order and that executions never overlap.
"""

import copy
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudoreal_api.names import CONFIG_FILE, CONTAINER, file_annotation
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus, Spares
from pseudoreal_api.wire.messages import EXIT_CODES, ExitCode, InPlace, Outcome, TerminationMessage
from pseudoreal_api.wire.reports import Activity, PodReport, RankReport
from pseudoreal_operator import clock
from pseudoreal_operator.lifecycle.clocks import STOP_SECONDS
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.observe.reading import belongs_to, is_orphan, read_job, read_pod
from pseudoreal_operator.observe.report_store import ReportingPod, merge_report, with_told
from pseudoreal_operator.observe.sightings import Sightings
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import (
    SIDECAR_SECONDS,
    ChildJob,
    JobState,
    LastReport,
    Observed,
    Pod,
    PodPhase,
    Pods,
)
from pseudoreal_operator.observe.worker_assignment import memberships, with_worker_indices, worker_of
from pseudoreal_operator.settings import Settings
from pseudoreal_operator.status.conditions import has_ended
from pseudoreal_trainer.checkpoint.fence import Fence

from tests.support.jobs import good_job
from tests.support.names import bare

if TYPE_CHECKING:
    from tests.unit.operator.support.watched import Watches

Json = dict[str, Any]
Key = tuple[str, str]

SETTINGS = Settings("registry.example/trainer:test", "IfNotPresent", ())
UID = "0a1b2c3d-0000-4000-8000-000000000000"


def make_job(**changes: Any) -> PseudoRealJob:
    body = good_job("sim", **changes)
    body["metadata"] |= {"namespace": "default", "uid": UID, "generation": 1}
    return PseudoRealJob.from_object(body)


@dataclass
class World:
    job: PseudoRealJob
    status: PseudoRealJobStatus = field(default_factory=PseudoRealJobStatus)
    now: datetime = datetime(2030, 1, 1, tzinfo=UTC)
    objects: dict[Key, Json] = field(default_factory=dict)
    """Objects by kind and bare name."""
    pods: dict[str, Json] = field(default_factory=dict)
    events: dict[str, str] = field(default_factory=dict)
    done: set[tuple[str, str]] = field(default_factory=set)
    """(phase, kind of stage) of each stage with its result on the checkpoint volume."""
    begun: set[str] = field(default_factory=set)
    """Names of created Jobs; a new Job must have another name."""
    reports: dict[str, LastReport] = field(default_factory=dict)
    """Reports that the operator has received, by name of the pod; an operator that dies loses them."""
    made: int = 0
    nodes: int | None = None
    """Number of nodes, each with room for one training pod; None: there is room for all, and nodes have no names."""
    queues: bool = False
    """Whether the queue is full: it holds each new Job that waits in it, until the Job is admitted."""
    proxies: bool = False
    """Whether a mesh injects a proxy into each pod, which keeps running when the trainer has ended."""
    late_nodes: bool = False
    """Whether kubelets report the end of a trainer before the end of its pod, as they do from Kubernetes 1.27 on:
    the Job controller acts between the two."""
    node_skew: float = 0.0
    """Seconds by which the clocks of nodes are ahead of the operator's."""
    api_skew: float = 0.0
    """Seconds by which the clock of the API server is ahead of the operator's."""
    sightings: Sightings = field(default_factory=Sightings)
    """Times that the operator has observed; an operator that dies loses them."""
    watches: "Watches | None" = None
    """Watches that tell the operator of Jobs and pods; None: each pass reads them."""

    # Actions of the operator.

    def jobs_list(self) -> list[Json]:
        return copy.deepcopy([body for (kind, _), body in self.objects.items() if kind == "Job"])

    @cached_property
    def volume(self) -> Path:
        """Work directory of the job, with the real files of the fence."""
        folder = tempfile.mkdtemp(prefix="world-")
        weakref.finalize(self, shutil.rmtree, folder)
        return Path(folder)

    def observe(
        self,
        jobs: list[Json] | None = None,
        read: tuple[list[ChildJob], list[Pod]] | None = None,
        behind: timedelta = timedelta(0),
    ) -> Observed:
        """Return the observation of a pass. `jobs`: an earlier list of Jobs, as the lists of a pass are not made at
        one time. `read`: the Jobs and pods that an operator knows of, which may be older by `behind`."""
        if read is None:
            read = self.read("Job") if jobs is None else [read_job(body) for body in jobs], self.read("Pod")
        dated_jobs, dated_pods = self.sightings.with_bounded_times(
            ("default", UID), self.status, read[0], Pods(read[1]), self.now, behind, self.last_reports
        )
        seen = Observed(
            job=self.job,
            status=self.status,
            jobs=tuple(dated_jobs),
            pods=dated_pods,
            existing=frozenset((kind, body["metadata"]["name"]) for (kind, _), body in self.objects.items()),
            last_reports=self.last_reports(),
            orphans=tuple(name for name, body in self.pods.items() if is_orphan(UID, body)),
        )
        return with_worker_indices(seen)

    def read(self, kind: str) -> list[Any]:
        """Return the Jobs or pods of the job as they are."""
        if kind == "Job":
            return [read_job(body) for body in self.jobs_list()]
        return [read_pod(body) for body in self.pods.values() if belongs_to(UID, body)]

    def last_reports(self) -> tuple[LastReport, ...]:
        pods = [read_pod(body) for body in self.pods.values()]
        return tuple(self.reports[pod.name] for pod in pods if pod.name in self.reports)

    def report(
        self, pod: Json, step: int, activity: Activity = "computing", in_place: InPlace | None = None, ranks: int = 1
    ) -> None:
        """Deliver a report of a pod to the operator, which answers with the membership in the status."""
        read, worker = read_pod(pod), self.worker_of(pod)
        sign = RankReport(rank=read.index if worker is None else worker, activity=activity, seconds=0, step=step)
        known = self.reports.get(read.name)
        reporter = ReportingPod(("default", UID), read.execution, read.index, read.name)
        report = PodReport(ranks=[sign] * ranks, in_place=in_place or pod.get("in_place"))
        self.reports[read.name] = merge_report(known, reporter, report, self.now)
        if (membership := memberships(self.status).get(read.execution)) is not None:
            self.reports[read.name] = with_told(self.reports[read.name], membership.restart, self.now)

    def plan(self) -> Plan:
        return self.watches.plan() if self.watches else plan(self.observe(), self.now, SETTINGS)

    def carry_out(self, wanted: Plan, effects: int = 1000) -> None:
        """Carry out a plan up to `effects` requests; then the operator dies."""
        assert not wanted.events or wanted.status != self.status, "every event announces a change of the status"
        is_takeover = wanted.status.spares != self.status.spares
        assert not is_takeover or not (wanted.stop or wanted.fail_jobs), "a takeover lets the other pods live"
        if self.watches:
            self.watches.check(wanted)
        steps: list[Callable[[], object]] = [partial(self._stop, name) for name in wanted.stop]
        steps += [partial(self._fail_job, name) for name in wanted.fail_jobs]
        steps += [partial(self._delete_job, name) for name in wanted.delete]
        steps += [partial(self._apply, manifest) for manifest in wanted.apply]
        steps.append(partial(self._tell, wanted))
        for step in steps[:effects]:
            step()

    def settle(self) -> int:
        """Make passes until one changes nothing; return how many changed something."""
        for passes in range(20):
            wanted = self.plan()
            self.carry_out(wanted)
            if not self.changes(wanted):
                return passes
        raise AssertionError(f"the operator does not come to rest: {self.status}")

    def changes(self, wanted: Plan) -> bool:
        return bool(
            wanted.stop
            or wanted.fail_jobs
            or wanted.apply
            or wanted.delete
            or wanted.events
            or wanted.status != self.status
            or wanted.requeue_after == 0
        )

    def _tell(self, wanted: Plan) -> None:
        """Write the status, and then post its events. An operator that dies in between posts none; this case is not
        simulated."""
        self._write(wanted.status)
        for event in wanted.events:
            self._post(event)

    def _write(self, status: PseudoRealJobStatus) -> None:
        self.status = PseudoRealJobStatus.model_validate(status.to_dict())

    def delete_behind_the_operator(self, key: Key) -> None:
        """Delete a child. Nothing is left of a Job without pods if no status has recorded its start yet, so its name
        may be used again."""
        body = self.objects.pop(key)
        if key[0] == "Job" and not self._is_recorded(read_job(body).execution) and not self.pods_of(body):
            self.begun.remove(body["metadata"]["name"])

    def _is_recorded(self, execution: Execution) -> bool:
        phase = next((phase for phase in self.status.phases if phase.name == execution.phase), None)
        state = "Training" if execution.kind is StageKind.TRAIN else "Delinking"
        return phase is not None and execution.number == self.status.execution and phase.state == state

    def _post(self, event: Any) -> None:
        self.events.setdefault(event.name(self.job.metadata), event.reason.value)

    def _apply(self, manifest: Json) -> None:
        name = manifest["metadata"]["name"]
        key = (manifest["kind"], bare(name))
        if key not in self.objects:
            assert key[0] != "Job" or name not in self.begun, f"no Job named {name} was created before"
            if key[0] == "Job":
                self.begun.add(name)
            self.objects[key] = copy.deepcopy(manifest)
            if key[0] == "Job" and manifest["spec"].get("suspend"):
                (self.hold if self.queues else self.admit)(key[1])
            if self.watches and key[0] == "Job":
                self.watches.wrote("Job", name)

    def _stop(self, name: str) -> None:
        if name in self.pods:
            assert self._is_doomed(self.pods[name]), f"{name} is stopped only if its execution can save nothing"
            self._ask_to_end(self.pods[name], STOP_SECONDS)
            if self.watches:
                self.watches.deleted("Pod", name)

    def _is_doomed(self, pod: Json) -> bool:
        """Return whether the pod's execution can save nothing: a rank is gone without having saved, or was found to
        hang; or a spare pod has replaced the pod; or only its proxy is left, and the status has moved on."""
        read = read_pod(pod)
        known = self.reports.get(read.name)
        was_worker = read.index < read.workers or (known and (known.report.ranks or known.report.in_place))
        if self.worker_of(pod) is None and was_worker:
            return True  # a spare pod has replaced it
        if not _trainer_lives(pod):
            return "proxy" in pod and self._has_outcome_in_status(read_pod(pod).execution, pod)
        others = [read_pod(other) for other in self.pods.values() if other["metadata"]["job"] == pod["metadata"]["job"]]
        bad = [other for other in others if other.phase is PodPhase.FAILED and exit_code_of(other) != ExitCode.YIELDED]
        lost = any(_is_lost(other) for other in self.pods.values())
        waits = [self.reports[other.name].waits_to_restart for other in others if other.name in self.reports]
        return (
            bool(bad)
            or lost
            or any(waits)
            or any(
                fault.execution == read_pod(pod).execution.number and fault.restart_in_place is None
                for fault in self.status.faults
            )
        )

    def _has_outcome_in_status(self, execution: Execution, pod: Json) -> bool:
        """Return whether the status has the outcome of the execution, or a spare pod has replaced the pod."""
        if has_ended(self.status) or execution.number < self.status.execution or self.worker_of(pod) is None:
            return True
        phase = next(phase for phase in self.status.phases if phase.name == execution.phase)
        return bool(phase.start_checkpoint) if execution.kind is StageKind.DELINK else phase.state == "Complete"

    def _ask_to_end(self, pod: Json, seconds: int) -> None:
        """Ask a pod to end. A grace period that has begun can only become shorter."""
        metadata, since = pod["metadata"], self.now + timedelta(seconds=self.api_skew)
        if "deletionTimestamp" in metadata:
            grace = metadata.get("deletionGracePeriodSeconds", 0)
            since = clock.from_text(metadata["deletionTimestamp"]) - timedelta(seconds=grace)
            seconds = min(seconds, grace)
        leaves = clock.to_text(since + timedelta(seconds=seconds))
        metadata |= {"deletionTimestamp": leaves, "deletionGracePeriodSeconds": seconds}

    def _fail_job(self, name: str) -> None:
        if ("Job", bare(name)) in self.objects:
            self.objects["Job", bare(name)]["spec"]["maxFailedIndexes"] = 0
            if self.watches:
                self.watches.wrote("Job", name)

    def _delete_job(self, name: str) -> None:
        self.objects.pop(("Job", bare(name)), None)
        if self.watches:
            self.watches.deleted("Job", name)

    # Actions of a queue.

    def hold(self, name: str) -> None:
        """Suspend a Job. If it runs already, its pods save and end."""
        job = self.objects["Job", name]
        job["spec"]["suspend"] = True
        for pod in filterfalse(_is_lost, self.pods_of(job)):
            self._ask_to_end(pod, 120)

    def admit(self, name: str) -> None:
        job = self.objects["Job", name]
        job["spec"]["suspend"] = False
        job.pop("started", None)

    def held(self) -> list[str]:
        return [name for (kind, name), body in self.objects.items() if kind == "Job" and read_job(body).queued]

    # Actions of the Job controller.

    def control(self) -> None:
        """Let kubelets end pods that were asked to end, except on lost nodes, and let the Job controller act."""
        left = [*self.alive(), *self.kept_by_proxies()]
        for pod in [pod for pod in left if "deletionTimestamp" in pod["metadata"] and not _is_lost(pod)]:
            self.vanish(pod)
        for body in [body for (kind, _), body in self.objects.items() if kind == "Job"]:
            if read_job(body).ended is None:
                self._control(body)
        for pod in (pod for pod in self.pods.values() if "over" in pod):
            pod["status"]["phase"] = pod.pop("over")

    def _control(self, job: Json) -> None:
        pods = self.pods_of(job)
        if self._is_suspended(job):
            return
        if not pods and "started" not in job:
            job["started"] = True
            for index in range(job["spec"]["completions"]):
                self._make_pod(job, index)
            return
        phases = [pod["status"]["phase"] for pod in pods]
        if phases == ["Succeeded"] * job["spec"]["completions"]:
            self._end(job, "Complete")
            return
        alive = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        failed = "Failed" in phases or len(phases) < job["spec"]["completions"]
        if alive and phases.count("Succeeded") == read_job(job).workers:
            # The Job's success policy is met: its spare pods end, and the Job waits for the end of each.
            for pod in filterfalse(_is_lost, alive):
                self.vanish(pod)
            if not any(map(_is_lost, alive)):
                self._end(job, "Complete")
            return
        if failed and job["spec"].get("maxFailedIndexes") == 0:
            for pod in filterfalse(_is_lost, alive):
                self.vanish(pod)
            for pod in filter(_is_lost, alive):
                self._ask_to_end(pod, 30)
            alive = list(filter(_is_lost, alive))
        if failed and not alive:
            self._end(job, "Failed")

    def _is_suspended(self, job: Json) -> bool:
        """Return whether the Job is suspended, and record this in a condition, which a Job that was never suspended
        does not have."""
        suspended = bool(job["spec"].get("suspend"))
        known = next((c["status"] for c in job.get("status", {}).get("conditions", ())), "False")
        if (known == "True") != suspended:
            self._say(job, "Suspended", str(suspended))
        return suspended

    def _end(self, job: Json, kind: str) -> None:
        self._say(job, kind, "True")

    def _say(self, job: Json, kind: str, truth: str) -> None:
        condition = {"type": kind, "status": truth, "lastTransitionTime": clock.to_text(self.now)}
        job["status"] = {"conditions": [condition]}

    def _make_pod(self, job: Json, index: int) -> None:
        execution = read_job(job).execution
        for other in self.alive():
            ours = read_pod(other).execution == execution or self._has_lost_peers(other)
            assert ours, f"{execution} starts after the end of {other['metadata']['name']}"
        self._check_order(execution)
        self.made += 1
        name = f"{job['metadata']['name']}-{index}-{self.made}"
        self.pods[name] = {
            "metadata": {
                "name": name,
                "labels": job["spec"]["template"]["metadata"]["labels"],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [{"kind": "Job", "name": job["metadata"]["name"], "uid": "j", "controller": True}],
                "job": job["metadata"]["name"],
                "made": self.made,
            },
            "spec": {"containers": job["spec"]["template"]["spec"]["containers"]},
            "status": {"phase": "Pending"},
        }

    def _check_order(self, execution: Execution) -> None:
        names = [phase.name for phase in self.job.spec.phases]
        stages = [stage for name in names for stage in ((name, "delink"), (name, "train"))][1:]
        place = stages.index((execution.phase, execution.kind.value))
        missing = set(stages[:place]) - self.done
        assert not missing, f"{execution} starts after {missing}"
        # Results of later stages came from an earlier run of this stage, and do not follow from its new result.
        self.done -= set(stages[place + 1 :])

    # Actions of kubelets and trainers.

    def pods_of(self, job: Json) -> list[Json]:
        return [pod for pod in self.pods.values() if pod["metadata"]["job"] == job["metadata"]["name"]]

    def alive(self) -> list[Json]:
        return [pod for pod in self.pods.values() if _trainer_lives(pod)]

    def kept_by_proxies(self) -> list[Json]:
        """Return the pods that still hold their nodes after the end of their trainer."""
        running = (pod for pod in self.pods.values() if pod["status"]["phase"] == "Running" and "over" not in pod)
        return [pod for pod in running if not _trainer_lives(pod)]

    def living_workers(self) -> list[Json]:
        """Return all live pods except waiting spare pods, which never succeed."""
        return [pod for pod in self.alive() if self.worker_of(pod) is not None]

    def _has_lost_peers(self, pod: Json) -> bool:
        """Return whether the pod is on a lost node and one of its peers has ended, so that it can neither train nor
        save."""
        partners = [other for other in self.alive() if other["metadata"]["job"] == pod["metadata"]["job"]]
        workers = [other for other in partners if self.worker_of(other) is not None]
        return _is_lost(pod) and len(workers) < read_pod(pod).workers

    def schedule(self) -> None:
        """Assign free nodes to pods without one. Lost nodes are not counted as nodes any more."""
        if self.nodes is None:
            return
        living = [pod for pod in filterfalse(_is_lost, self.alive()) if _trains(pod)]
        free = self.nodes - sum("nodeName" in pod["spec"] for pod in living)
        for pod in [pod for pod in living if "nodeName" not in pod["spec"]][: max(0, free)]:
            pod["spec"] = pod["spec"] | {"nodeName": f"node-{pod['metadata']['made']}"}

    def limit_nodes(self, count: int | None) -> None:
        """Make `count` the number of nodes; pods that run keep theirs, as on nodes that are cordoned."""
        if count is not None:
            for pod in (pod for pod in self.alive() if pod["status"]["phase"] == "Running"):
                pod["spec"] = {"nodeName": f"node-{pod['metadata']['made']}"} | pod["spec"]
        self.nodes = count

    def _waits_for_a_node(self, pod: Json) -> bool:
        return self.nodes is not None and _trains(pod) and "nodeName" not in pod["spec"]

    def start_pods(self) -> None:
        self.schedule()
        for pod in filterfalse(_is_lost, filterfalse(self._waits_for_a_node, self.alive())):
            if "fence" not in pod and self.worker_of(pod) is not None:
                self._begin_ranks(pod)
            pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}

    def _begin_ranks(self, pod: Json) -> None:
        """Let the pod's ranks claim the fence, with the membership that the operator announced."""
        execution = read_pod(pod).execution
        membership = memberships(self.status).get(execution)
        position = [phase.name for phase in self.job.spec.phases].index(execution.phase)
        restart = membership.restart if membership else 0
        pod["fence"] = Fence(self.volume, execution.number, restart, phase=position)
        pod["fence"].claim()

    def finish(
        self,
        pod: Json,
        outcome: Outcome = "Succeeded",
        exit_code: int | None = None,
        peer_lost: bool = False,
        in_place: InPlace | None = None,
        **terminated: Any,
    ) -> None:
        """End a pod. With `exit_code` it leaves no termination message of its own."""
        execution = read_pod(pod).execution
        step = self._last_step(execution)
        known = memberships(self.status).get(execution)
        if "fence" in pod and known and known.restart > pod["fence"].membership:
            # The pod's ranks are from before a takeover: they can save nothing, and succeed only after another
            # rendezvous.
            if outcome == "Succeeded":
                self._begin_ranks(pod)
            outcome = "Failed" if outcome == "Yielded" else outcome
        if outcome in ("Succeeded", "Yielded") and "fence" in pod:
            pod["fence"].check()
        if outcome == "Succeeded":
            self.done.add((execution.phase, execution.kind.value))
        message = TerminationMessage(
            outcome=outcome,
            phase=execution.phase,
            execution=execution.number,
            step=step if execution.kind is StageKind.TRAIN else step - 10,
            loss=1.0,
            validation_loss=1.5,
            checkpoint=f"{execution.phase}-{step}" if outcome in ("Succeeded", "Yielded") else None,
            message="" if outcome == "Succeeded" else f"it {outcome}",
            peer_lost=peer_lost,
            in_place=in_place or pod.get("in_place"),
        )
        code = EXIT_CODES[outcome].value if exit_code is None else exit_code
        end = {"exitCode": code, "finishedAt": clock.to_text(self.now + timedelta(seconds=self.node_skew))} | terminated
        if exit_code is None:
            end["message"] = message.to_json()
        pod["status"] = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": CONTAINER, "state": {"terminated": end}}],
        }
        if self.late_nodes and not self.proxies:
            pod["over"] = pod["status"]["phase"]
            pod["status"]["phase"] = "Running"
        if self.proxies:
            pod["proxy"] = True
            pod["status"]["phase"] = "Running"
            proxy = {"name": "istio-proxy", "state": {"running": {"startedAt": end["finishedAt"]}}}
            pod["status"]["containerStatuses"].insert(0, proxy)

    def restart_in_place(self, origin: int, *, heard: bool) -> None:
        """Let a rank of pod `origin` die. All pods of its execution restart their ranks in place, if all of them run
        and may restart. `heard`: whether their reports arrive."""
        pods = self.living_workers()
        ready = [pod for pod in pods if read_pod(pod).ready and "deletionTimestamp" not in pod["metadata"]]
        job = self.objects.get(("Job", bare(pods[0]["metadata"]["job"]))) if pods else None
        if job is None or len(ready) != read_job(job).workers or ready != pods:
            return
        if not self._own_restarts(pods[0]):
            return
        for index, pod in enumerate(pods):
            pod["in_place"] = self._decide_on_restart(pod, peer_lost=index != origin % len(pods))
            if heard:
                self.report(pod, 0, "starting", pod["in_place"])

    def lose_peer(self, pod: Json) -> None:
        """Let the pod lose its peer: it waits for a new rendezvous if it may restart, and ends otherwise."""
        if self._own_restarts(pod):
            self.report(pod, 0, in_place=self._decide_on_restart(pod, peer_lost=True), ranks=0)
        else:
            self.finish(pod, outcome="Failed", peer_lost=True)

    def meet(self, pod: Json, spares: Spares) -> None:
        """Let the pod start with the membership that the operator announced, if this one is new to it."""
        execution = read_pod(pod).execution
        if (spares.phase_name, spares.execution) != (execution.phase, execution.number):
            return
        if pod.get("restarts", 0) >= spares.restart:
            return
        pod["restarts"], pod["own_restarts"] = spares.restart, spares.own_restarts
        pod["in_place"] = InPlace(restarts=spares.restart, peer_lost=True, message="met")
        self._begin_ranks(pod)
        self.report(pod, 1)

    def _decide_on_restart(self, pod: Json, *, peer_lost: bool) -> InPlace:
        pod["own_restarts"] = self._own_restarts(pod) - 1
        pod["restarts"] = pod.get("restarts", 0) + 1
        return InPlace(restarts=pod["restarts"], peer_lost=peer_lost, message="killed")

    def _own_restarts(self, pod: Json) -> int:
        """Return the number of restarts in place that the pod may still decide on; at first the number in its
        configuration."""
        job = self.objects.get(("Job", bare(pod["metadata"]["job"])))
        if "own_restarts" in pod or job is None:
            return int(pod.get("own_restarts", 0))
        told = job["spec"]["template"]["metadata"]["annotations"][file_annotation(CONFIG_FILE)]
        return int(json.loads(told).get("inPlace", 0))

    def _last_step(self, execution: Execution) -> int:
        """Return the last step of the phase, as announced to its pods; for a delink, the last step of the next
        phase."""
        for body in self.jobs_list():
            if (told := read_job(body).last_steps) and read_job(body).execution == execution:
                return int(told.partition("/")[0])
        return 10 * (1 + [phase.name for phase in self.job.spec.phases].index(execution.phase))

    def finish_all(self) -> None:
        """Let every running pod and its Job succeed, except pods on lost nodes."""
        workers = self.living_workers()
        if any(map(self._waits_for_a_node, workers)):
            return
        for pod in filterfalse(_is_lost, workers):
            self._begin_ranks(pod)  # they can only end together, as members of the newest membership
            self.finish(pod)
        self.control()
        if self.late_nodes:
            self.control()

    def worker_of(self, pod: Json) -> int | None:
        """Return the number of the pod's worker; None: the pod waits as a spare, or was replaced."""
        return worker_of(self.status, read_pod(pod))

    def disrupt(self, pod: Json, why: str = "PreemptionByScheduler") -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": why}
        pod["status"] = {"phase": "Failed", "conditions": [condition]}

    def waiting(self) -> list[Json]:
        """Return pods that do not run yet."""
        return [pod for pod in self.alive() if pod["status"]["phase"] == "Pending" and not _is_lost(pod)]

    def reject(self, pod: Json, why: str = "UnexpectedAdmissionError") -> None:
        """Let the pod's node refuse to run it."""
        pod["spec"] = {"nodeName": f"node-{pod['metadata']['made']}"} | pod["spec"]
        pod["status"] = {"phase": "Failed", "reason": why, "message": "Pod was rejected: no healthy devices present"}

    def lose(self, pod: Json) -> None:
        """Switch off the pod's node: Kubernetes asks the pod to end, and no kubelet does it."""
        self._ask_to_end(pod, 30)
        pod["lost"] = True
        pod["status"].setdefault("conditions", []).append(
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        )

    def delete_job_and_leave_pods(self, name: str) -> None:
        """Delete a Job as `kubectl delete job --cascade=orphan` does."""
        for pod in self.pods_of(self.objects.pop(("Job", name))):
            del pod["metadata"]["ownerReferences"]

    def vanish(self, pod: Json) -> None:
        self.pods.pop(pod["metadata"]["name"], None)

    def active_jobs(self) -> list[str]:
        jobs = [read_job(body) for body in self.jobs_list()]
        return [bare(job.name) for job in jobs if job.state is JobState.ACTIVE]

    def ends_by_itself(self, name: str) -> bool:
        """Return whether all workers of a Job have succeeded: the Job only waits for the end of spare pods."""
        job = self.objects["Job", name]
        phases = [read_pod(pod).phase for pod in self.pods_of(job)]
        return phases.count(PodPhase.SUCCEEDED) == read_job(job).workers

    def orphans(self) -> list[Json]:
        """Return live pods whose Job is deleted."""
        return [pod for pod in self.alive() if ("Job", bare(pod["metadata"]["job"])) not in self.objects]

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def wait_out(self) -> None:
        """Wait until the backoff, if there is one, is over."""
        if self.status.restart_after:
            self.now = max(self.now, clock.from_text(self.status.restart_after))

    def set(self, **changes: Any) -> None:
        """Change the spec as the user does."""
        spec = self.job.spec.model_copy(update=changes)
        metadata = self.job.metadata.model_copy(update={"generation": self.job.metadata.generation + 1})
        self.job = self.job.model_copy(update={"spec": spec, "metadata": metadata})

    def run_fairly(self, rounds: int = 60) -> None:
        """Let all parties do their part from here on; orphans end only after the operator has had its chance to act.
        Watches tell everything, before each pass."""
        if self.watches:
            self.watches.is_prompt = True
        for _ in range(rounds):
            self.settle()
            # Longer than any backoff.
            self.tick(301)
            self.settle()
            for name in self.held():
                self.admit(name)
            self.control()
            for pod in self.orphans():
                self.vanish(pod)
            self.start_pods()
            self.settle()
            self.finish_all()
            if self.proxies:
                self.settle()
                self.tick(SIDECAR_SECONDS)
                self.settle()
                for pod in self.orphans():
                    self.vanish(pod)
            if self.status.completion_time:
                return


def exit_code_of(pod: Pod) -> int | None:
    return pod.termination.exit_code if pod.termination else None


def _trains(pod: Json) -> bool:
    return read_pod(pod).execution.kind is StageKind.TRAIN


def _trainer_lives(pod: Json) -> bool:
    states = {one["name"]: one["state"] for one in pod["status"].get("containerStatuses", ())}
    return pod["status"]["phase"] in ("Pending", "Running") and "terminated" not in states.get(CONTAINER, {})


def _is_lost(pod: Json) -> bool:
    return "lost" in pod and read_pod(pod).is_alive
