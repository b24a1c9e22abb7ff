"""A job and its pods as they were seen at one look, and what follows from it directly. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pseudoreal_api.names import LABEL_EXECUTION, LABEL_JOB_UID
from pseudoreal_api.resolved.resolve import UnresolvableJob, last_steps, rank_counts
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase
from pseudoreal_api.status.status import Condition, PhaseStatus, Progress, PseudoRealJobStatus
from pseudoreal_operator.foreign import clean
from pseudoreal_operator.observe.ranks import first_ranks_of
from pseudoreal_operator.observe.reading import belongs_to, read_pod
from pseudoreal_operator.observe.seats import worker_of
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Pod
from pydantic import ValidationError

Json = dict[str, Any]

_SHOWN = ("Failed", "Complete", "Suspended", "Progressing")
"""Conditions that say what a job is doing; the first that is True, or else the last, is shown."""


@dataclass(frozen=True)
class SeenJob:
    """One PseudoRealJob."""

    body: Json

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.body["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def created(self) -> str:
        return str(self.body["metadata"]["creationTimestamp"])

    @cached_property
    def status(self) -> PseudoRealJobStatus:
        return PseudoRealJobStatus.model_validate(self.body.get("status") or {})

    @property
    def unreadable(self) -> str | None:
        """Why this release cannot read the status; None: it can."""
        try:
            PseudoRealJobStatus.model_validate(self.body.get("status") or {})
        except ValidationError as error:
            return cleaned(str(error))
        return None

    @cached_property
    def spec(self) -> PseudoRealJobSpec | None:
        """The spec; None where it is that of another release, or of a job that cannot run."""
        try:
            spec = PseudoRealJob.from_object(self.body).spec
            last_steps(spec)
        except (ValidationError, UnresolvableJob):
            return None
        return spec

    @property
    def phase_names(self) -> list[str]:
        return [str(phase["name"]) for phase in self.body["spec"]["phases"]]

    @property
    def is_over(self) -> bool:
        return self.status.completion_time is not None

    @property
    def is_suspended(self) -> bool:
        return bool(self.body["spec"].get("suspend"))

    @property
    def reason(self) -> Condition | None:
        """The condition that says what the job is doing, and why."""
        found = {condition.type: condition for condition in self.status.conditions}
        true = [found[kind] for kind in _SHOWN if kind in found and found[kind].status == "True"]
        return true[0] if true else found.get("Progressing")

    def phase(self, name: str | None) -> Phase | None:
        return next((phase for phase in self.spec.phases if phase.name == name), None) if self.spec else None

    def phase_status(self, name: str | None) -> PhaseStatus | None:
        return next((phase for phase in self.status.phases if phase.name == name), None)

    def first_rank(self, pod: Pod) -> int | None:
        """The number of a pod's first rank; None where only the pods know it, and for one that has no place."""
        if pod.execution.kind is StageKind.DELINK:
            return 0
        worker = worker_of(self.status, pod)
        if worker is None:
            return None
        known = first_ranks_of(self.status.placement, pod.execution)
        is_by_place = self.spec is not None and self.spec.scheduling.topology is not None
        by_number = None if is_by_place else worker * self.ranks_per_pod(pod.execution.phase)
        return known.get(worker, by_number)

    def is_spare(self, pod: Pod) -> bool:
        """Whether the pod waits to take the place of another one."""
        return pod.is_alive and worker_of(self.status, pod) is None

    def ranks_per_pod(self, phase: str) -> int:
        """1 where it is not known."""
        found = self.phase(phase)
        try:
            return rank_counts(self.spec, found).processes_per_worker if self.spec and found else 1
        except UnresolvableJob:
            return 1

    def remaining_of_phase(self, now: datetime) -> float | None:
        """Seconds that the current phase still takes, by the newest report; None when nothing trains."""
        progress = self.status.progress
        if self.status.state != "Training" or progress is None or progress.phase_remaining_seconds is None:
            return None
        said = datetime.fromisoformat(progress.last_updated_time)
        return max(0.0, progress.phase_remaining_seconds - (now - said).total_seconds())

    def remaining_of_job(self, now: datetime) -> float | None:
        """Seconds that the job still takes, if later phases train as many tokens a second as the current one."""
        own, progress = self.remaining_of_phase(now), self.status.progress
        rate = float(progress.tokens_per_second) if progress and progress.tokens_per_second else 0.0
        if own is None or self.spec is None or self.status.current_phase not in self.phase_names:
            return None
        later = sum(_tokens(self.spec)[self.phase_names.index(self.status.current_phase) + 1 :])
        if later == 0:
            return own
        return own + later / rate if rate > 0 else None

    def pods(self, bodies: Iterable[Json]) -> list[Pod]:
        """Its pods among the bodies, in the order of their ranks."""
        own = [read_pod(body) for body in bodies if belongs_to(self.uid, body)]
        return sorted(own, key=lambda pod: (pod.index, pod.name))

    def executions(self, bodies: Iterable[Json]) -> list[list[Pod]]:
        """Its pods by their executions, in the order in which these began."""
        pods = self.pods(bodies)
        found = sorted({pod.execution for pod in pods}, key=self._order)
        return [[pod for pod in pods if pod.execution == execution] for execution in found]

    def current_pods(self, bodies: Iterable[Json]) -> list[Pod]:
        """The pods of the newest execution that has any."""
        return next(reversed(self.executions(bodies)), [])

    def _order(self, execution: Execution) -> tuple[int, int, bool]:
        names = self.phase_names
        place = names.index(execution.phase) if execution.phase in names else -1
        return execution.number, place, execution.kind is StageKind.TRAIN

    @property
    def selector(self) -> str:
        """What selects its pods, and no other's."""
        return f"{LABEL_JOB_UID}={self.uid},{LABEL_EXECUTION}"


def _tokens(spec: PseudoRealJobSpec) -> list[int]:
    """Tokens of each phase, if it is as long as it may be."""
    ends = [0, *last_steps(spec)]
    return [
        (ends[i + 1] - ends[i]) * phase.batch.sequences * spec.model.sequence_length
        for i, phase in enumerate(spec.phases)
    ]


def cleaned(text: str) -> str:
    """A text of others in one line, without what a terminal would obey."""
    return " ".join(clean(text).split())


def share(progress: Progress) -> str:
    """5 of 20 (25%)."""
    whole = f" of {progress.total_steps:,}" if progress.total_steps is not None else ""
    return f"{progress.step:,}{whole}" + (f" ({progress.percent}%)" if progress.percent is not None else "")
