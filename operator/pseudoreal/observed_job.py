"""A job and its pods as read at one moment, with values derived from them. Pure."""

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
from pseudoreal_operator.observe.ranks import recorded_first_ranks
from pseudoreal_operator.observe.reading import belongs_to, read_pod
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Pod
from pseudoreal_operator.observe.worker_assignment import worker_of
from pseudoreal_operator.status.conditions import find, is_true
from pseudoreal_operator.untrusted_text import sanitize
from pydantic import ValidationError

Json = dict[str, Any]

_SHOWN = ("Failed", "Complete", "Suspended", "Progressing")
"""Types of the conditions to show, in order of precedence: the first condition that is True, else Progressing."""


@dataclass(frozen=True)
class ObservedJob:
    """One PseudoRealJob as read from the API server."""

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
        """Sentence on the reason why this release cannot read the status; None if the status can be read."""
        try:
            PseudoRealJobStatus.model_validate(self.body.get("status") or {})
        except ValidationError as error:
            return one_line(str(error))
        return None

    @cached_property
    def spec(self) -> PseudoRealJobSpec | None:
        """The parsed spec; None if this release cannot read the spec, or the job cannot run."""
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
        """Condition to show: the first of _SHOWN that is True, else Progressing; None: the status has neither."""
        return find(self.status, next((kind for kind in _SHOWN if is_true(self.status, kind)), "Progressing"))

    def phase(self, name: str | None) -> Phase | None:
        return next((phase for phase in self.spec.phases if phase.name == name), None) if self.spec else None

    def phase_status(self, name: str | None) -> PhaseStatus | None:
        return next((phase for phase in self.status.phases if phase.name == name), None)

    def first_rank(self, pod: Pod) -> int | None:
        """Return the first rank of a pod; None if the pod has no worker index, or if a topology decides the ranks and
        the status has no placement of the pod."""
        if pod.execution.kind is StageKind.DELINK:
            return 0
        worker = worker_of(self.status, pod)
        if worker is None:
            return None
        known = recorded_first_ranks(self.status.placement, pod.execution)
        is_by_place = self.spec is not None and self.spec.scheduling.topology is not None
        by_number = None if is_by_place else worker * self.ranks_per_pod(pod.execution.phase)
        return known.get(worker, by_number)

    def is_spare(self, pod: Pod) -> bool:
        """Return whether the pod is an idle spare, without a worker index."""
        return pod.is_alive and worker_of(self.status, pod) is None

    def ranks_per_pod(self, phase: str) -> int:
        """Return the number of ranks per pod of the phase; 1 if unknown."""
        found = self.phase(phase)
        try:
            return rank_counts(self.spec, found).processes_per_worker if self.spec and found else 1
        except UnresolvableJob:
            return 1

    def remaining_of_phase(self, now: datetime) -> float | None:
        """Return the remaining seconds of the current phase, from the newest report; None if nothing trains."""
        progress = self.status.progress
        if self.status.state != "Training" or progress is None or progress.phase_remaining_seconds is None:
            return None
        said = datetime.fromisoformat(progress.last_updated_time)
        return max(0.0, progress.phase_remaining_seconds - (now - said).total_seconds())

    def remaining_of_job(self, now: datetime) -> float | None:
        """Return the remaining seconds of the job, assuming the current tokens per second for later phases too; None if
        unknown."""
        own, progress = self.remaining_of_phase(now), self.status.progress
        rate = float(progress.tokens_per_second) if progress and progress.tokens_per_second else 0.0
        if own is None or self.spec is None or self.status.current_phase not in self.phase_names:
            return None
        later = sum(_tokens(self.spec)[self.phase_names.index(self.status.current_phase) + 1 :])
        if later == 0:
            return own
        return own + later / rate if rate > 0 else None

    def pods(self, bodies: Iterable[Json]) -> list[Pod]:
        """Return the job's pods among the bodies, sorted by pod index."""
        own = [read_pod(body) for body in bodies if belongs_to(self.uid, body)]
        return sorted(own, key=lambda pod: (pod.index, pod.name))

    def executions(self, bodies: Iterable[Json]) -> list[list[Pod]]:
        """Return the job's pods grouped by execution, in the order of the executions' starts."""
        pods = self.pods(bodies)
        found = sorted({pod.execution for pod in pods}, key=self._order)
        return [[pod for pod in pods if pod.execution == execution] for execution in found]

    def current_pods(self, bodies: Iterable[Json]) -> list[Pod]:
        """Return the pods of the newest execution with pods."""
        return next(reversed(self.executions(bodies)), [])

    def _order(self, execution: Execution) -> tuple[int, int, bool]:
        names = self.phase_names
        place = names.index(execution.phase) if execution.phase in names else -1
        return execution.number, place, execution.kind is StageKind.TRAIN

    @property
    def selector(self) -> str:
        """Label selector for the pods of this job's executions."""
        return f"{LABEL_JOB_UID}={self.uid},{LABEL_EXECUTION}"


def _tokens(spec: PseudoRealJobSpec) -> list[int]:
    """Return the number of tokens of each phase, if each phase ends at its last step."""
    ends = [0, *last_steps(spec)]
    return [
        (ends[i + 1] - ends[i]) * phase.batch.sequences * spec.model.sequence_length
        for i, phase in enumerate(spec.phases)
    ]


def one_line(text: str) -> str:
    """Return text from outside as one line, without terminal control characters."""
    return " ".join(sanitize(text).split())


def share(progress: Progress) -> str:
    """Return a text such as "5 of 20 (25%)"."""
    whole = f" of {progress.total_steps:,}" if progress.total_steps is not None else ""
    return f"{progress.step:,}{whole}" + (f" ({progress.percent}%)" if progress.percent is not None else "")
