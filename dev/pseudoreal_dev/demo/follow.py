"""Follows a PseudoRealJob to its end, with a live status line."""

import time
from collections.abc import Callable
from typing import Any

from pseudoreal_api.status.status import Progress, PseudoRealJobStatus
from rich.live import Live
from rich.text import Text

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

POLL_SECONDS = 2.0
PLAIN_LINE_SECONDS = 5.0
TERMINAL = ("Complete", "Failed")


def follow(kubernetes: Kubernetes, job: str, namespace: str, deadline_seconds: float) -> PseudoRealJobStatus:
    """Show the job's progress until the job is complete, and return the last status. Raises DevError if the job fails,
    or is not complete after `deadline_seconds`."""
    started = time.monotonic()

    def elapsed() -> float:
        return time.monotonic() - started

    status = PseudoRealJobStatus()
    with _Display() as show:
        while status.state not in TERMINAL:
            if elapsed() > deadline_seconds:
                raise DevError(f"{job} was not done within {deadline_seconds:.0f} s: {waiting_for(status)}")
            time.sleep(POLL_SECONDS)
            status = read_status(kubernetes.find("pseudorealjob", job, f"--namespace={namespace}"))
            show(describe(status, elapsed()))
    if status.state == "Failed":
        raise DevError(f"{job} failed: {waiting_for(status)}")
    return status


def read_status(found: dict[str, Any] | None) -> PseudoRealJobStatus:
    return PseudoRealJobStatus.model_validate((found or {}).get("status", {}))


def describe(status: PseudoRealJobStatus, seconds: float) -> str:
    """Return one line with phase, step, loss and remaining time, or with the reason for waiting."""
    trains = status.state == "Training" and status.current_phase is not None
    parts = [f"{seconds:5.0f}s", f"{status.current_phase if trains else status.state:<11}"]
    if status.progress and (trains or status.state in TERMINAL):
        parts.append(_training(status.progress))
    else:
        parts.append(waiting_for(status))
    return "  ".join(parts)


def waiting_for(status: PseudoRealJobStatus) -> str:
    """Return the message of the condition that explains why the job does not train."""
    conditions = {condition.type: condition for condition in status.conditions}
    failed, progressing = conditions.get("Failed"), conditions.get("Progressing")
    if failed and failed.status == "True":
        return f"{failed.reason}: {failed.message}"
    return progressing.message if progressing else "waiting for the operator"


def _training(now: Progress) -> str:
    parts = [f"step {now.step}/{now.total_steps}", f"loss {now.loss}"]
    if now.validation_loss:
        parts.append(f"validation {now.validation_loss}")
    if now.tokens_per_second:
        parts.append(f"{float(now.tokens_per_second):,.0f} tokens/s")
    if now.phase_remaining_seconds is not None:
        parts.append(f"phase ends in {now.phase_remaining_seconds}s")
    return "  ".join(parts)


class _Display:
    """Status line, rewritten on a terminal; elsewhere, a new line at each phase change and every few seconds."""

    def __init__(self) -> None:
        self._live = Live(console=progress.console, transient=True) if progress.console.is_terminal else None
        self._last = ("", -PLAIN_LINE_SECONDS)

    def __enter__(self) -> Callable[[str], None]:
        if self._live:
            self._live.start()
            return self._rewrite
        return self._print

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _rewrite(self, line: str) -> None:
        assert self._live
        self._live.update(Text(line, style="cyan", no_wrap=True), refresh=True)

    def _print(self, line: str) -> None:
        phase, shown = self._last
        now, current = time.monotonic(), line.split()[1]
        if current != phase or now - shown >= PLAIN_LINE_SECONDS:
            progress.note(line)
            self._last = (current, now)
