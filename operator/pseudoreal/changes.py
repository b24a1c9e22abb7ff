"""User requests as patches of a job's spec; a request without effect is rejected with a sentence. Pure."""

from dataclasses import dataclass
from itertools import count
from typing import Any

from pseudoreal_api.spec.request import RequestType

from pseudoreal.errors import NoEffect, NotFound
from pseudoreal.observed_job import ObservedJob

Json = dict[str, Any]

_MOST_REQUESTS = 100
"""Maximum number of entries of spec.requests."""
_NOT_STARTED = ("Pending", "Delinking")


@dataclass(frozen=True)
class Change:
    spec: Json
    """Field of the spec -> new value."""
    effect: str
    """Sentence on the effect, printed after the patch."""

    def patch(self, job: ObservedJob) -> Json:
        """Return a merge patch with the resourceVersion: the API server rejects the patch if the job has changed."""
        return {"metadata": {"resourceVersion": job.body["metadata"]["resourceVersion"]}, "spec": self.spec}


def suspend(job: ObservedJob) -> Change:
    """Return the patch to suspend the job. Raises NoEffect if the job has ended, or is suspended already."""
    _check_not_ended(job)
    if job.is_suspended:
        raise NoEffect(
            f"{job.name} is suspended already; pseudoreal resume {job.name} -n {job.namespace} lets it go on"
        )
    return Change({"suspend": True}, f"{job.name} saves a checkpoint and frees its pods")


def resume(job: ObservedJob) -> Change:
    """Return the patch to resume the job. Raises NoEffect if the job has ended, or is not suspended."""
    _check_not_ended(job)
    if not job.is_suspended:
        raise NoEffect(f"{job.name} is not suspended; its state is {job.status.state}")
    saved = job.status.checkpoint
    return Change({"suspend": False}, f"{job.name} goes on{f' from checkpoint {saved.latest}' if saved else ''}")


def finish_phase(job: ObservedJob, phase: str | None) -> Change:
    """Return the request to end `phase`, by default the current phase.

    Raises NoEffect if there is nothing to end.
    """
    _check_not_ended(job)
    name = phase or job.status.current_phase
    if name is None:
        raise NoEffect(f"no phase of {job.name} trains; name one of {', '.join(job.phase_names)}")
    _check_phase(job, name)
    _check_not_requested(job, "FinishPhase", name)
    found = job.phase_status(name)
    if found and found.state == "Complete":
        raise NoEffect(
            f"phase {name} of {job.name} is complete; pseudoreal repeat-phase {job.name} {name} -n {job.namespace}"
            " would train it again"
        )
    trains = job.status.state == "Training" and name == job.status.current_phase
    when = "ends at its next step" if trains else "will end as soon as it trains"
    return _request(job, "FinishPhase", name, f"phase {name} of {job.name} {when}, through a committed checkpoint")


def repeat_phase(job: ObservedJob, phase: str) -> Change:
    """Return the request to train `phase` and all later phases again.

    Raises NoEffect if the phase has not started.
    """
    _check_not_ended(job)
    _check_phase(job, phase)
    _check_not_requested(job, "RepeatPhase", phase)
    found = job.phase_status(phase)
    if found is None or found.state in _NOT_STARTED:
        raise NoEffect(f"phase {phase} of {job.name} has not begun, so there is nothing to train again")
    later = job.phase_names[job.phase_names.index(phase) + 1 :]
    begin = f"checkpoint {found.start_checkpoint}" if found.start_checkpoint else "random weights"
    after = f", and {', '.join(later)} after it" if later else ""
    return _request(job, "RepeatPhase", phase, f"{job.name} trains phase {phase} again from {begin}{after}")


def _check_not_ended(job: ObservedJob) -> None:
    if job.is_over:
        raise NoEffect(
            f"{job.name} has ended ({job.status.state}) and stays as it is; to train on, create a job with"
            " spec.checkpoint.continueFrom"
        )


def _check_phase(job: ObservedJob, name: str) -> None:
    if name not in job.phase_names:
        raise NotFound(f"{job.name} has no phase {name}; its phases are {', '.join(job.phase_names)}")


def _check_not_requested(job: ObservedJob, kind: RequestType, phase: str) -> None:
    for known in _requests(job):
        if (known["type"], known["phase"]) == (kind, phase) and known["id"] not in job.status.served_requests:
            raise NoEffect(f"request {known['id']} asks that of phase {phase} already, and is not served yet")


def _requests(job: ObservedJob) -> list[Json]:
    return [*(job.body["spec"].get("requests") or [])]


def _request(job: ObservedJob, kind: RequestType, phase: str, effect: str) -> Change:
    known, served = _requests(job), job.status.served_requests
    taken = {request["id"] for request in known} | {*served}
    verb = kind.removesuffix("Phase").lower()
    id = next(name for number in count(1) if (name := f"{verb}-{phase}-{number}") not in taken)
    kept = known if len(known) < _MOST_REQUESTS else [request for request in known if request["id"] not in served]
    if len(kept) >= _MOST_REQUESTS:
        raise NoEffect(f"{job.name} has {len(kept)} open requests, the most that fit into spec.requests; remove some")
    paused = "; it is suspended, so this waits until it is resumed" if job.is_suspended else ""
    return Change({"requests": [*kept, {"id": id, "type": kind, "phase": phase}]}, f"{effect} (request {id}){paused}")
