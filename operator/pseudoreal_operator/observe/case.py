"""One look at a job, with what follows from it directly; the rules decide on it. Pure."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from pseudoreal_api.names import ANNOTATION_FINISH_PHASE, LABEL_JOB
from pseudoreal_api.resolved.resolve import resolve_layout
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.foreign import clean
from pseudoreal_operator.observe.observed import ChildJob, Heard, JobState, Observed, Pod, PodPhase, Role, Run
from pseudoreal_operator.observe.queue import with_queue
from pseudoreal_operator.observe.stages import Stage, current_stage

_NAME_CHARACTERS = 64
"""Of what is to be the name of a phase, which has fewer."""


@dataclass(frozen=True)
class Case:
    """`run` and what depends on it exist while a stage is left to do."""

    seen: Observed
    now: datetime

    @property
    def spec(self) -> PseudoRealJobSpec:
        return self.seen.job.spec

    @property
    def metadata(self) -> JobMetadata:
        return self.seen.job.metadata

    @cached_property
    def status(self) -> PseudoRealJobStatus:
        """The status, with an execution that no child is ahead of, even if a status was lost, and with clocks that the
        time in a queue has moved on."""
        runs = [job.run for job in self.seen.jobs] + [pod.run for pod in self.seen.pods]
        newest = max([1, self.seen.status.execution_attempt, *(run.attempt for run in runs)])
        status = self.seen.status.model_copy(update={"execution_attempt": newest})
        stage = current_stage(status.phases)
        return with_queue(status, self._job_of(stage.run(newest)) if stage else None, self.now)

    @cached_property
    def stage(self) -> Stage:
        stage = current_stage(self.status.phases)
        assert stage is not None, "a job whose stages are all done has ended"
        return stage

    @property
    def run(self) -> Run:
        return self.stage.run(self.status.execution_attempt)

    @property
    def workers(self) -> int:
        """Pods that the stage wants."""
        return self.spec.phases[self.stage.index].workers if self.stage.role is Role.TRAIN else 1

    @property
    def job_name(self) -> str:
        """Name of the Job of the present execution, whichever release made it."""
        return self.job.name if self.job else self.run.name(self.metadata)

    @cached_property
    def job(self) -> ChildJob | None:
        """The Job of the present execution. One that somebody deletes while it runs is as good as gone."""
        return self._job_of(self.run)

    def _job_of(self, run: Run) -> ChildJob | None:
        found = next((job for job in self.seen.jobs if job.run == run), None)
        return None if found and found.deleting and found.state is JobState.ACTIVE else found

    @cached_property
    def pods(self) -> list[Pod]:
        return sorted((pod for pod in self.seen.pods if pod.run == self.run), key=lambda pod: pod.index)

    @property
    def gone(self) -> list[int]:
        """Workers whose pods are gone, though nobody of us has ended them."""
        if self.job is None or self.job.given_up:
            return []
        return sorted(set(range(self.workers)) - {pod.index for pod in self.pods})

    @cached_property
    def words(self) -> list[Pod]:
        """The pods, and those that are gone and whose last words are known."""
        return self.pods + [pod for pod in self.seen.gone if pod.run == self.run]

    @cached_property
    def heard(self) -> list[Heard]:
        """Of the present execution, in the order of the pods."""
        return sorted((heard for heard in self.seen.heard if heard.run == self.run), key=lambda heard: heard.index)

    @property
    def started_pods(self) -> int:
        """Pods whose container runs or has run."""
        return sum(pod.phase is not PodPhase.PENDING for pod in self.pods)

    def pod_of_rank(self, rank: int) -> Pod | None:
        return next((pod for pod in self.pods if pod.index == rank // self._ranks_per_pod), None)

    def first_rank(self, pod: Pod) -> int:
        return pod.index * self._ranks_per_pod

    @property
    def _ranks_per_pod(self) -> int:
        return resolve_layout(self.spec, self.spec.phases[self.stage.index]).processes_per_worker

    @property
    def asked_to_finish(self) -> str | None:
        """The phase that the user wants to end now."""
        wish = self.metadata.annotations.get(ANNOTATION_FINISH_PHASE)
        return None if wish is None else clean(wish, _NAME_CHARACTERS)

    @property
    def logs_command(self) -> str:
        return f"kubectl logs -n {self.metadata.namespace} -l {LABEL_JOB}={self.metadata.name} --prefix --tail=50"
