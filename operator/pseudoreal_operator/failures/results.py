"""Status fields derived from the pods' reports: results of phases, checkpoints, progress. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from pseudoreal_api.resolved.resolve import last_steps
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.status.status import CheckpointStatus, ExpertLoad, Progress, PseudoRealJobStatus
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import ProgressReport, TerminationMessage

from pseudoreal_operator import clock
from pseudoreal_operator.changes import PhaseFields, phase_with, status_with
from pseudoreal_operator.observe.stages import Stage, StageKind, with_phase_fields
from pseudoreal_operator.observe.view import LastReport, Pod, PodPhase

_LARGE = 1e6


def result_of(stage: Stage, pods: Iterable[Pod]) -> TerminationMessage | None:
    """Return the result of a completed stage: the termination message of worker 0's pod; None if no pod has it."""
    for pod in pods:
        if pod.index == 0 and pod.phase is PodPhase.SUCCEEDED and pod.termination:
            message = pod.termination.message
            if message and message.outcome == "Succeeded" and message.phase == stage.phase and message.checkpoint:
                return message
    return None


def with_result(
    status: PseudoRealJobStatus, stage: Stage, message: TerminationMessage, ended: str | None
) -> PseudoRealJobStatus:
    """Return the status with the result of a completed stage. `ended`: time of completion, RFC 3339; None: unknown."""
    status = _with_layout(status, stage.phase, message.layout)
    return status_with(
        status,
        phases=with_phase_fields(status.phases, stage.index, **_outcome(stage, message)),
        checkpoint=_newer_checkpoint(status.checkpoint, message, ended),
    )


def with_checkpoints(status: PseudoRealJobStatus, pods: Iterable[Pod]) -> PseudoRealJobStatus:
    """Return the status with the newest checkpoint in the pods' termination messages, even if the pods failed."""
    checkpoint = status.checkpoint
    for pod in pods:
        if pod.termination and pod.termination.message:
            checkpoint = _newer_checkpoint(checkpoint, pod.termination.message, pod.termination.finished)
    return status_with(status, checkpoint=checkpoint)


def with_reported_checkpoint(status: PseudoRealJobStatus, last_reports: Sequence[LastReport]) -> PseudoRealJobStatus:
    """Return the status with the newest checkpoint that the pods of an execution reported; the pods may have ended
    since."""
    known = status.checkpoint
    newer = [
        one for one in last_reports if one.report.checkpoint and not (known and known.step > one.report.checkpoint.step)
    ]
    silent = [replace(one, report=one.report.model_copy(update={"progress": None})) for one in newer]
    return with_reports(status, silent, max((one.last for one in newer), default=datetime.min))


def with_reports(status: PseudoRealJobStatus, last_reports: Sequence[LastReport], now: datetime) -> PseudoRealJobStatus:
    """Return the status with the reports of the running execution's pods."""
    # Of 10,000 pods, only the pod of rank 0 reports these.
    telling = (one for one in last_reports if one.report.progress or one.report.checkpoint or one.report.layout)
    for one in telling:
        report = one.report
        status = _with_layout(status, one.execution.phase, report.layout)
        if report.progress:
            status = status_with(status, progress=live_progress(report.progress, now))
        if report.checkpoint and (status.checkpoint is None or report.checkpoint.name != status.checkpoint.latest):
            saved = clock.to_text(one.last - timedelta(seconds=report.checkpoint.seconds))
            update = CheckpointStatus(latest=report.checkpoint.name, step=report.checkpoint.step, saved_time=saved)
            status = status_with(status, checkpoint=update)
    return status


def _with_layout(status: PseudoRealJobStatus, name: str, layout: ChosenLayout | None) -> PseudoRealJobStatus:
    """Return the status with the layout that the trainer chose for the phase; unchanged for None. A new layout is
    chosen only if the phase's number of ranks changes."""
    if layout is None:
        return status
    phases = [
        phase_with(phase, layout=layout) if phase.name == name and phase.layout != layout else phase
        for phase in status.phases
    ]
    return status_with(status, phases=phases)


def live_progress(report: ProgressReport, now: datetime) -> Progress:
    return Progress(
        step=report.step,
        total_steps=report.total_steps,
        percent=_percent(report.step, report.total_steps),
        phase_remaining_seconds=round(report.remaining_seconds),
        tokens=report.tokens,
        loss=_decimal(report.loss),
        validation_loss=_decimal(report.validation_loss),
        tokens_per_second=f"{report.tokens_per_second:.0f}",
        experts=_experts(report),
        last_updated_time=clock.to_text(now),
    )


def _experts(report: ProgressReport) -> ExpertLoad | None:
    figures = {
        "largest": report.expert_load_max,
        "idle": report.idle_experts,
        "dropped": report.dropped_tokens,
        "router_entropy": report.router_entropy,
    }
    known = {name: text for name, figure in figures.items() if (text := _decimal(figure)) is not None}
    return ExpertLoad.model_validate(known) if len(known) == len(figures) else None


def final_progress(
    spec: PseudoRealJobSpec, before: Progress | None, message: TerminationMessage, *, is_last: bool, now: datetime
) -> Progress:
    """Return the progress at the end of a phase. The last phase may have ended early, by its loss: the job is then at
    100 percent too."""
    total = last_steps(spec)[-1]
    return Progress(
        step=message.step,
        total_steps=total,
        percent=100 if is_last else _percent(message.step, total),
        phase_remaining_seconds=0,
        tokens=message.tokens,
        loss=_decimal(message.loss),
        validation_loss=_decimal(message.validation_loss),
        tokens_per_second=before.tokens_per_second if before else None,
        experts=before.experts if before else None,
        last_updated_time=clock.to_text(now),
    )


def _outcome(stage: Stage, message: TerminationMessage) -> PhaseFields:
    if stage.kind is StageKind.DELINK:
        # The state stays Delinking until training begins.
        return {"state": "Delinking", "start_checkpoint": message.checkpoint}
    return {
        "state": "Complete",
        "end_checkpoint": message.checkpoint,
        "step": message.step,
        "tokens": message.tokens,
        "loss": _decimal(message.loss),
        "start_validation_loss": _decimal(message.start_validation_loss),
        "validation_loss": _decimal(message.validation_loss),
    }


def _newer_checkpoint(
    known: CheckpointStatus | None, message: TerminationMessage, ended: str | None
) -> CheckpointStatus | None:
    if message.checkpoint is None or (known and known.step > message.step):
        return known
    if known and known.latest == message.checkpoint:
        return known
    return CheckpointStatus(latest=message.checkpoint, step=message.step, saved_time=ended or None)


def _percent(step: int, total: int) -> int:
    return max(0, min(100, 100 * step // total)) if total > 0 else 100


def _decimal(value: float | None) -> str | None:
    """Return the number as the status stores it: with four decimals, or with four significant digits from _LARGE on;
    None for None."""
    if value is None:
        return None
    return f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4g}"
