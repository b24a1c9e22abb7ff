"""What a failed attempt means: the user's mistake, a disruption, or a fault. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pseudoreal_api.messages import ExitCode

from pseudoreal_operator.observed import Pod, PodPhase, Termination

_QUOTED = 600
"""Characters of a pod's own words that go into a sentence."""


class Cause(StrEnum):
    """Only a FAULT counts against restart.maxRestarts; INVALID_JOB is never tried again."""

    INVALID_JOB = "InvalidJob"
    FAULT = "Fault"
    DISRUPTION = "Disruption"


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    sentence: str


def classify(job_name: str, pods: Sequence[Pod]) -> Verdict:
    """`pods` are those of the attempt that still exist; a pod that ends by deletion leaves none.

    A disruption of one pod makes its partners fail, so it explains their failures too. Memory is the exception: a
    container at its limit would fail again in any place.
    """
    failed = sorted((p for p in pods if p.phase is PodPhase.FAILED), key=_finished)
    invalid = next((p for p in failed if _is_invalid(p)), None)
    if invalid:
        return Verdict(Cause.INVALID_JOB, _words(invalid) or f"{_who(invalid)} refused the job without a word")
    out_of_memory = next((p for p in failed if _is_out_of_memory(p)), None)
    if out_of_memory:
        return Verdict(Cause.FAULT, _memory_sentence(out_of_memory))
    disrupted = next((p for p in pods if p.disruption), None)
    if disrupted:
        return Verdict(Cause.DISRUPTION, f"{_who(disrupted)} was disrupted ({disrupted.disruption}).")
    faulty = next((p for p in failed if not _yielded(p)), None)
    if faulty:
        return Verdict(Cause.FAULT, _fault_sentence(faulty))
    if failed:
        return Verdict(Cause.DISRUPTION, f"{_who(failed[0])} was asked to stop.")
    return Verdict(Cause.DISRUPTION, f"The pods of {job_name} were deleted.")


def _finished(pod: Pod) -> str:
    return pod.termination.finished if pod.termination else ""


def _is_invalid(pod: Pod) -> bool:
    end = pod.termination
    if end is None:
        return False
    said_so = end.message is not None and end.message.outcome == "InvalidJob"
    return said_so or end.exit_code == ExitCode.INVALID_JOB


def _is_out_of_memory(pod: Pod) -> bool:
    return pod.termination is not None and pod.termination.reason == "OOMKilled"


def _yielded(pod: Pod) -> bool:
    end = pod.termination
    return end is not None and end.exit_code == ExitCode.YIELDED


def _who(pod: Pod) -> str:
    return f"Pod {pod.name} (worker {pod.index})"


def _words(pod: Pod) -> str:
    end = pod.termination
    text = (end.message.message if end.message else end.text) if end else pod.complaint
    return text.strip()[-_QUOTED:]


def _memory_sentence(pod: Pod) -> str:
    return (
        f"{_who(pod)} ran out of memory: its container was killed at its memory limit. Raise"
        f" resources.limits.memory of phase {pod.run.phase}, or raise batch.microBatches in a new job."
    )


def _fault_sentence(pod: Pod) -> str:
    words = _words(pod)
    return f"{_who(pod)} {_ending(pod.termination)}{': ' + words if words else ''}".rstrip(".") + "."


def _ending(termination: Termination | None) -> str:
    if termination is None:
        return "failed"
    reason = "" if termination.reason in ("", "Error") else f" ({termination.reason})"
    return f"ended with exit code {termination.exit_code}{reason}"
