"""What one pass sees of a job: plain data, read from the API server, judged by nobody yet."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pseudoreal_api.names import execution_name
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_api.wire.reports import PodReport


class Role(StrEnum):
    TRAIN = "train"
    DELINK = "delink"


@dataclass(frozen=True)
class Run:
    """One attempt at one stage; the labels of its children say which."""

    phase: str
    role: Role
    attempt: int

    def name(self, job: JobMetadata) -> str:
        """Name of the Job that this release makes. Those of earlier releases have other names, and the same labels."""
        return execution_name(job.name, job.uid, self.phase, self.role, self.attempt)


class JobState(StrEnum):
    ACTIVE = "Active"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ChildJob:
    """A batch/v1 Job. `ended` is when it completed or failed, in RFC 3339."""

    name: str
    run: Run
    state: JobState
    ended: str | None = None
    deleting: bool = False
    outlives_pods: bool = False
    """One that fails leaves it and the other pods as they are, until it is given up."""
    given_up: bool = False
    """One that ends its pods when one of them fails: by the operator's wish, or made so by release 0.2.0."""
    queued: bool = False
    """Suspended by somebody else than us: a queue that has not admitted it."""
    held: str | None = None
    """When its queue last began to hold it, while it does, in RFC 3339."""
    admitted: str | None = None
    """When its queue last let it go, if one ever held it, in RFC 3339."""
    begun: str | None = None
    """When it was first made, or last admitted by its queue, in RFC 3339."""


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Termination:
    """How the trainer container ended."""

    exit_code: int
    reason: str
    text: str
    """The termination message as Kubernetes has it."""
    message: TerminationMessage | None
    """The same, when it is one of ours."""
    finished: str = ""


@dataclass(frozen=True)
class Obstacle:
    """Why a pod does not run yet, in Kubernetes' words."""

    reason: str
    message: str


@dataclass(frozen=True)
class Pod:
    name: str
    run: Run
    index: int
    phase: PodPhase
    ready: bool = False
    node: str = ""
    started: str | None = None
    """When its container did, in RFC 3339."""
    termination: Termination | None = None
    disruption: str | None = None
    """Set when Kubernetes itself ended the pod: preemption, eviction, a lost node."""
    conditions: frozenset[str] = frozenset()
    """Types of those that are True."""
    reason: str = ""
    """Kubernetes' word for what became of the pod as a whole."""
    complaint: str = ""
    """That word, and a message."""
    obstacle: Obstacle | None = None
    memory_limit: str = ""
    """Of the trainer container, as the pod says it."""
    leaves_by: str | None = None
    """When a pod that is being deleted is to be gone, its grace period included, in RFC 3339."""

    @property
    def is_alive(self) -> bool:
        return self.phase in (PodPhase.PENDING, PodPhase.RUNNING)


@dataclass(frozen=True)
class Heard:
    """What a pod of a training stage has reported. All moments are of the operator's clock."""

    run: Run
    index: int
    first: datetime
    """When it was first heard."""
    last: datetime
    """When it was last heard."""
    report: PodReport
    """Its newest."""
    begun: datetime | None = None
    """When a rank of it was first seen in a step, or past one."""
    progressed: datetime | None = None
    """When its steps were last seen to grow, or a save to go on."""


@dataclass(frozen=True)
class Observed:
    """`existing` holds (kind, name) of the children that are there. `foreign` names what a deleted job of the same
    name left and the garbage collector has yet to remove."""

    job: PseudoRealJob
    status: PseudoRealJobStatus
    jobs: tuple[ChildJob, ...] = ()
    pods: tuple[Pod, ...] = ()
    existing: frozenset[tuple[str, str]] = frozenset()
    foreign: tuple[str, ...] = ()
    heard: tuple[Heard, ...] = ()
    gone: tuple[Pod, ...] = ()
    """Pods that said something when they ended, and are deleted."""
