"""Parsing of the JSON of the API server and of pods into the objects that a pass reads. Pure.

Text written by others is sanitized and bounded here, and numbers that no status can hold are rejected.
"""

import re
from collections.abc import Iterable
from math import isfinite
from typing import Any

from pseudoreal_api.base import KIND
from pseudoreal_api.names import (
    ANNOTATION_EXCLUDES_UNTIL,
    ANNOTATION_LAST_STEPS,
    CONTAINER,
    LABEL_EXECUTION,
    LABEL_JOB_UID,
    LABEL_PHASE,
    LABEL_STAGE,
)
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import MOST_COUNT, PROGRESS_EVENT, InPlace, ProgressReport, TerminationMessage
from pseudoreal_api.wire.reports import PodReport, SavedCheckpoint
from pydantic import ValidationError
from pydantic_core import from_json

from pseudoreal_operator import clock
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Blocker, ChildJob, JobState, Pod, PodPhase, Termination
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

WORKERS_VARIABLE = "PET_NNODES"
"""Name of the environment variable from which torchrun in a pod reads the number of workers."""
LOG_LINES = 50
"""Maximum number of lines read from the end of a log."""
_LOG_VALUES = 20_000
"""Maximum number of JSON values in these lines; parsing them takes about 20 ms. A trainer's line has a few dozen, and
at most one more for each layer."""
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_WORD_CHARACTERS = 128
"""Maximum number of characters of a reason, which is one word."""
_MOST = {int: MOST_COUNT, float: 1e10}
"""Type of a number -> largest value that is accepted. A float may be a number of seconds to subtract from the current
time: with this bound the result is a valid date."""

_MOST_EXECUTIONS = 2**31
"""Largest execution number that is accepted; no job has so many executions."""

_UNREAD: Json = {
    "validation_losses": None,
    "bits_per_byte": None,
    "samples": None,
    "waits": {},
    "gradient_correlations": None,
}
"""Field of a ProgressReport that may be long and is never read by the operator -> its default value."""
_LAST_STEPS = re.compile("[0-9]{1,18}/[0-9]{1,18}")
_COUNT_OF_PODS = re.compile("[0-9]{1,9}")
_TERMINAL = ("Succeeded", "Failed")
"""Phases of pods whose containers have all ended."""
# Waiting for these is part of every start; any other reason is a problem.
_ORDINARY_WAITING = ("ContainerCreating", "PodInitializing")


def belongs_to(uid: str, child: Json) -> bool:
    """Return whether the child belongs to the job of this uid, by its labels and its owner. Anyone may give other
    objects these labels, for instance to collect logs together, but the garbage collector goes by owners. A pod's
    owner is a Job; every other child's owner is the job itself."""
    owners = child["metadata"].get("ownerReferences") or []
    owner: Json = next((owner for owner in owners if owner.get("controller")), {})
    is_owned = owner.get("uid") == uid if owner.get("kind") == KIND else owner.get("kind") == "Job"
    return is_owned and _labels(child).get(LABEL_JOB_UID) == uid and _has_execution(child)


def _has_execution(child: Json) -> bool:
    try:
        return 0 < _execution(child).number <= _MOST_EXECUTIONS
    except (KeyError, ValueError):
        return False


def is_of_another(uid: str, child: Json) -> bool:
    """Return whether the child belongs to a deleted job of the same name."""
    return _labels(child).get(LABEL_JOB_UID, uid) != uid


def is_orphan(uid: str, pod: Json) -> bool:
    """Return whether the pod, which may still run, belongs to the job and has lost its owner, as by `kubectl delete
    job --cascade=orphan`. The operator never changes such a pod: anyone may give a pod these labels."""
    owners = pod["metadata"].get("ownerReferences") or []
    is_owned = any(owner.get("controller") for owner in owners)
    has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not is_owned and not has_ended and _labels(pod).get(LABEL_JOB_UID) == uid and _has_execution(pod)


def read_job(body: Json) -> ChildJob:
    ended = _end_condition(body)
    return ChildJob(
        name=body["metadata"]["name"],
        execution=_execution(body),
        state=JobState(ended["type"]) if ended else JobState.ACTIVE,
        ended=ended.get("lastTransitionTime") if ended else None,
        deleting="deletionTimestamp" in body["metadata"],
        outlives_pods=_outlives_pods(body),
        failed_by_operator=_is_failed_by_operator(body),
        queued=bool(body.get("spec", {}).get("suspend")),
        held=_transition_time(body, "Suspended", "True"),
        admitted=_transition_time(body, "Suspended", "False"),
        start_time=body.get("status", {}).get("startTime"),
        uid=sanitize(body["metadata"].get("uid") or ""),
        workers=_workers_of_job(body.get("spec", {})),
        last_steps=_last_steps(body),
        excludes_until=_excludes_until(body),
    )


def _workers_of_job(spec: Json) -> int | None:
    """Return the number of workers: the count in the Job's successPolicy, which excludes spare pods, else
    `completions`."""
    rules: Iterable[Json] = (spec.get("successPolicy") or {}).get("rules") or []
    return next((rule["succeededCount"] for rule in rules if "succeededCount" in rule), spec.get("completions"))


def _last_steps(job: Json) -> str | None:
    said = (job["metadata"].get("annotations") or {}).get(ANNOTATION_LAST_STEPS, "")
    return said if _LAST_STEPS.fullmatch(said) else None


def _excludes_until(job: Json) -> str | None:
    said = (job["metadata"].get("annotations") or {}).get(ANNOTATION_EXCLUDES_UNTIL, "")
    try:
        return clock.to_text(clock.from_text(said)) if said else None
    except (ValueError, OverflowError):
        return None


def has_no_pod_left(job: Json) -> bool:
    """Return whether a Job has ended and none of its pods is active or terminating."""
    status = job.get("status", {})
    return _end_condition(job) is not None and not status.get("active") and not status.get("terminating")


def read_pod(body: Json) -> Pod:
    status = body.get("status", {})
    container = _container(status)
    state = container.get("state", {})
    return Pod(
        name=body["metadata"]["name"],
        execution=_execution(body),
        index=_index(body),
        phase=_phase(status),
        ready=_is_true(status, "Ready"),
        node=body.get("spec", {}).get("nodeName", ""),
        started=(state.get("running") or state.get("terminated") or {}).get("startedAt"),
        termination=_termination(state.get("terminated")),
        disruption=_disruption(status),
        conditions=frozenset(c["type"] for c in status.get("conditions") or [] if c["status"] == "True"),
        reason=_reason(status),
        complaint=_joined(_reason(status), _message(status)),
        blocker=_blocker(status),
        memory_limit=_memory_limit(_trainer(body)),
        workers=_number_of_workers(_trainer(body)),
        deletion_deadline=body["metadata"].get("deletionTimestamp"),
        grace_seconds=body["metadata"].get("deletionGracePeriodSeconds"),
        sidecars=_running_sidecars(status),
        lingers=_lingers(status),
        has_run=any(_has_ever_run(container) for container in _every_container(status)),
    )


def newest_report(log: str) -> ProgressReport | None:
    """Return the last progress line of a trainer's log; None if there is none."""
    values = 0
    # Split at line feeds alone, as Kubernetes does: str.splitlines knows ten more line boundaries, so one line of
    # Kubernetes could be a million lines.
    for line in reversed(log.removesuffix("\n").rsplit("\n", LOG_LINES)[-LOG_LINES:]):
        count = sum(map(line.count, "{[,"))
        if values + count > _LOG_VALUES:
            continue
        values += count
        if report := progress_of(line):
            return _without_unread_parts(report)
    return None


def read_report(body: bytes) -> PodReport:
    """Parse the report of a pod. Raises ValueError with a sentence."""
    try:
        report = PodReport.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{f'{where}: ' if where else ''}{first['msg']}") from None
    if not all(_fits(part) for part in (report.progress, report.checkpoint) if part):
        raise ValueError("a number in it is not finite, or too large")
    ranks = [sign.model_copy(update={"doing": sanitize(sign.doing)}) for sign in report.ranks]
    saved = report.checkpoint and report.checkpoint.model_copy(update={"name": sanitize(report.checkpoint.name)})
    progress = report.progress and _without_unread_parts(report.progress)
    parts = {"ranks": ranks, "progress": progress, "checkpoint": saved, "in_place": _cleaned(report.in_place)}
    return report.model_copy(update=parts | {"layout": _cleaned_layout(report.layout)})


def _without_unread_parts(progress: ProgressReport) -> ProgressReport:
    """Return the progress with a sanitized phase, and without the unbounded fields that no pass reads: reports are kept
    in memory."""
    return progress.model_copy(update={"phase": sanitize(progress.phase, _WORD_CHARACTERS)} | _UNREAD)


def _cleaned(in_place: InPlace | None) -> InPlace | None:
    return in_place and in_place.model_copy(update={"message": sanitize(in_place.message)})


def _cleaned_layout(layout: ChosenLayout | None) -> ChosenLayout | None:
    texts = ("hardware", "step_time", "bottleneck")
    return layout and layout.model_copy(update={name: sanitize(getattr(layout, name)) for name in texts})


def progress_of(line: str) -> ProgressReport | None:
    """Return the progress that a line of a trainer's log reports; None for other lines."""
    try:
        event = from_json(line)
        if isinstance(event, dict) and event.get("event") == PROGRESS_EVENT:
            report = ProgressReport.model_validate(event)
            return report if _fits(report) else None
    except ValueError:
        # Other lines, lines that were cut, and lines of other programs.
        pass
    return None


def _fits(part: ProgressReport | SavedCheckpoint) -> bool:
    """Return whether all numbers of the part fit a status. A number that does not fit would fail every pass over the
    job."""
    numbers = [value for value in part.model_dump().values() if isinstance(value, int | float)]
    # Every comparison with NaN is false.
    return all(abs(value) <= _MOST[type(value)] for value in numbers) and part.step >= 0


def _labels(body: Json) -> dict[str, str]:
    return body["metadata"].get("labels") or {}


def _execution(body: Json) -> Execution:
    labels = _labels(body)
    number = labels[LABEL_EXECUTION]
    if not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{number} is no number of an execution")
    return Execution(labels[LABEL_PHASE], StageKind(labels[LABEL_STAGE]), int(number))


def _transition_time(body: Json, kind: str, to: str) -> str | None:
    """Return the time at which a condition took the value `to`; None if it does not have this value."""
    found = _condition(body.get("status", {}), kind)
    return found.get("lastTransitionTime") if found and found["status"] == to else None


def _index(pod: Json) -> int:
    said = (pod["metadata"].get("annotations") or {}).get(COMPLETION_INDEX, "")
    return int(said) if _COUNT_OF_PODS.fullmatch(said) else 0


def _outlives_pods(job: Json) -> bool:
    return not _is_failed_by_operator(job) and not _is_true(job.get("status", {}), "FailureTarget")


def _is_failed_by_operator(job: Json) -> bool:
    return bool(job.get("spec", {}).get("maxFailedIndexes") == 0)


def _end_condition(job: Json) -> Json | None:
    conditions = job.get("status", {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), None)


def _phase(status: Json) -> PodPhase:
    """Return the state of the trainer; without a status of its container, the state that Kubernetes gives the pod."""
    state = _container(status).get("state") or {}
    if ended := state.get("terminated"):
        return PodPhase.SUCCEEDED if ended["exitCode"] == 0 else PodPhase.FAILED
    # "Unknown" is a pod whose node does not answer: it may well be running.
    phase = status.get("phase", "Pending")
    if phase == "Unknown" or (phase == "Pending" and state.get("running")):
        return PodPhase.RUNNING
    return PodPhase(phase)


def _container(status: Json) -> Json:
    found: Iterable[Json] = status.get("containerStatuses") or []
    return next((c for c in found if c["name"] == CONTAINER), {})


def _every_container(status: Json) -> list[Json]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _has_ever_run(container: Json) -> bool:
    states = (container.get("state") or {}, container.get("lastState") or {})
    return any(state.get(kind) for state in states for kind in ("running", "terminated"))


def _lingers(status: Json) -> bool:
    return status.get("phase") not in _TERMINAL and bool((_container(status).get("state") or {}).get("terminated"))


def _running_sidecars(status: Json) -> tuple[str, ...]:
    """Return the names of the containers that keep the pod after the end of the trainer; empty before the end of the
    trainer."""
    if not _lingers(status):
        return ()
    others = (one for one in _every_container(status) if not (one.get("state") or {}).get("terminated"))
    return tuple(sanitize(one["name"]) for one in others)


def _trainer(pod: Json) -> Json:
    """Return the trainer container of the pod's spec."""
    containers: Iterable[Json] = pod.get("spec", {}).get("containers") or []
    return next((c for c in containers if c["name"] == CONTAINER), {})


def _memory_limit(trainer: Json) -> str:
    return str(trainer.get("resources", {}).get("limits", {}).get("memory", ""))


def _number_of_workers(trainer: Json) -> int:
    values: Iterable[str] = (e.get("value") or "" for e in trainer.get("env") or [] if e["name"] == WORKERS_VARIABLE)
    return next((int(number) for number in values if _COUNT_OF_PODS.fullmatch(number)), 0)


def _termination(terminated: Json | None) -> Termination | None:
    if terminated is None:
        return None
    text = terminated.get("message", "")
    return Termination(
        exit_code=terminated["exitCode"],
        reason=_reason(terminated),
        text=sanitize(text),
        message=_termination_message(text),
        finished=terminated.get("finishedAt") or "",
    )


def _termination_message(text: str) -> TerminationMessage | None:
    try:
        message = TerminationMessage.model_validate_json(text)
    # UnicodeEncodeError: a lone surrogate has no UTF-8 encoding, which the parser needs.
    except (ValidationError, UnicodeEncodeError):
        return None
    return message.model_copy(
        update={
            "message": sanitize(message.message),
            "checkpoint": message.checkpoint and sanitize(message.checkpoint),
            "in_place": _cleaned(message.in_place),
            "layout": _cleaned_layout(message.layout),
        }
        | {name: _finite(getattr(message, name)) for name in ("loss", "start_validation_loss", "validation_loss")}
    )


def _finite(value: float | None) -> float | None:
    """Return the number; None if it is infinite or NaN: the result of a phase counts even if its loss is not finite."""
    return value if value is not None and isfinite(value) else None


def _condition(status: Json, kind: str) -> Json | None:
    return next((c for c in status.get("conditions") or [] if c["type"] == kind), None)


def _is_true(status: Json, kind: str) -> bool:
    found = _condition(status, kind)
    return found is not None and found["status"] == "True"


def _disruption(status: Json) -> str | None:
    if _is_true(status, "DisruptionTarget"):
        found = _condition(status, "DisruptionTarget") or {}
        return _joined(_reason(found), _message(found))
    return "NodeLost" if status.get("reason") == "NodeLost" else None


def _blocker(status: Json) -> Blocker | None:
    scheduled = _condition(status, "PodScheduled")
    if scheduled and scheduled["status"] == "False":
        return Blocker(_reason(scheduled), _message(scheduled))
    containers = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    waiting = (c["state"]["waiting"] for c in containers if "waiting" in c.get("state", {}))
    found = next((w for w in waiting if w.get("reason") and w["reason"] not in _ORDINARY_WAITING), None)
    return Blocker(_reason(found), _message(found)) if found else None


def _reason(said: Json) -> str:
    return sanitize(said.get("reason") or "", _WORD_CHARACTERS)


def _message(said: Json) -> str:
    return sanitize(said.get("message") or "")


def _joined(reason: str, message: str) -> str:
    return ": ".join(part for part in (reason, message) if part)
