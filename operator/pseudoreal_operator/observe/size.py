"""Number of workers of a stage: from the spec, or fewer in an elastic phase. Pure."""

from pseudoreal_api.resolved.elastic import resized
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.observe.stages import Stage, StageKind


def workers_of(spec: PseudoRealJobSpec, status: PseudoRealJobStatus, stage: Stage) -> int:
    """Return the number of workers that an execution of the stage is created with."""
    if stage.kind is StageKind.DELINK:
        return 1
    known = status.elastic
    return known.workers if known and known.phase_name == stage.phase else spec.phases[stage.index].workers


def job_at_size(job: PseudoRealJob, status: PseudoRealJobStatus, stage: Stage) -> PseudoRealJob:
    """Return the job with the phase of the stage laid out over its present number of workers."""
    if stage.kind is StageKind.DELINK or status.elastic is None:
        return job
    spec = resized(job.spec, stage.index, workers_of(job.spec, status, stage))
    return job.model_copy(update={"spec": spec})
