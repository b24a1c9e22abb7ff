"""Reports of a running trainer pod to the operator, and the operator's answer.

Reports may be lost; the termination message is authoritative.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pseudoreal_api.base import ApiModel
from pseudoreal_api.wire.authorities import AUTHORITIES_BYTES
from pseudoreal_api.wire.layout import MOST_RANKS, ChosenLayout
from pseudoreal_api.wire.messages import MOST_COUNT, MOST_RESTART, MOST_SPARES, InPlace, ProgressReport

REPORT_BYTES = 64 * 1024
"""Size limit of a report; the operator refuses a longer one."""
REPORT_SECONDS = 5.0
"""Seconds between two reports of a pod."""
REPORT_AUDIENCE = "operator.pseudoreal.dev"
"""Audience of the service account tokens sent with reports; the tokens are valid for nothing else."""
REPORT_PATH = "/v1/report"
REPORT_AUTHORITIES = "Pseudoreal-Authorities"
"""Request header with the digest of the CA certificates trusted by the pod. Without the header, the operator's answer
contains no certificates."""
REPORT_URL = "PSEUDOREAL_REPORT_URL"
"""Environment variable of a trainer pod: URL for its reports. If unset, the pod sends no reports."""
METRICS_PORT = "PSEUDOREAL_METRICS_PORT"
"""Environment variable of a trainer pod: port of /metrics. If unset, the pod does not serve /metrics."""
NODE_NAME = "PSEUDOREAL_NODE_NAME"
"""Environment variable of a trainer pod: the name of its node."""
TOPOLOGY_DOMAIN = "PSEUDOREAL_TOPOLOGY_DOMAIN"
"""Environment variable of a trainer pod: value of the node label in spec.scheduling.topology, copied to the pod's own
labels; empty if the pod lacks the label. If unset, the job has no topology, and ranks are numbered like the pods."""


Activity = Literal["starting", "computing", "waiting", "ended"]
"""State of a rank's main thread: before its first step, at its own work, in a collective, or finished."""


MOST_SECONDS = 1e10
"""Largest number of seconds accepted: datetime cannot represent times further in the past."""
_Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
_Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]


class _Said(ApiModel):
    """Part of a report. Fields of a newer trainer are ignored."""

    model_config = ConfigDict(extra="ignore")


class RankReport(_Said):
    """Newest heartbeat of one rank's main thread. Ages are measured with the clock of the rank's machine."""

    rank: int = Field(ge=0, le=MOST_RANKS, description="Number of the rank among all ranks of the execution.")
    activity: str = Field(
        max_length=32,
        pattern="^[a-z][A-Za-z]*$",
        description="What its main thread does: starting, computing, waiting or ended. More words may come.",
    )
    doing: str = Field("", max_length=64, description="The collective that it waits in, or what it computes.")
    seconds: _Seconds = Field(description="Seconds since that activity began.")
    step: _Count = Field(description="Steps done, from the job's start.")
    collectives: _Count = Field(0, description="Waits that it has left, from trainers up to 0.3.0; nothing reads it.")
    busy_seconds: _Seconds | None = Field(
        None, description="Seconds that a step takes the rank outside of waits: the mean of the newest steps."
    )
    saving_seconds: _Seconds | None = Field(
        None, description="Seconds since the rank began the save that is not committed yet."
    )
    process: str = Field("", max_length=1, description="State of its process in /proc; T is stopped, Z is dead.")


class SavedCheckpoint(_Said):
    name: str = Field(max_length=253, description="Name of the newest checkpoint that this execution committed.")
    step: _Count = Field(description="The checkpoint's training step.")
    seconds: _Seconds = Field(description="Seconds since it was committed.")


class PodReport(_Said):
    """Report of a pod to the operator, sent every few seconds. The sender is identified by its token."""

    ranks: list[RankReport] = Field([], max_length=64, description="Signs of the pod's own ranks.")
    progress: ProgressReport | None = Field(None, description="Progress of the training, from the pod of rank 0.")
    checkpoint: SavedCheckpoint | None = Field(None, description="The newest checkpoint, from the pod of rank 0.")
    layout: ChosenLayout | None = Field(
        None, description="The layout that the phase was given. None: the job says it itself."
    )
    in_place: InPlace | None = Field(
        None,
        description="Its restarts in place; without ranks, the last one waits for the other pods. None: there were"
        " none.",
    )


class Takeover(_Said):
    """Spare pod in the place of a lost worker pod."""

    worker: int = Field(ge=0, description="Number of the worker.")
    pod: int = Field(ge=0, description="Completion index of the pod that has its place.")


class Membership(_Said):
    """Worker assignment of an execution, valid from a restart in place on.

    Only the operator changes the assignment. Before sending an assignment to a pod, the operator writes the assignment
    into the status.
    """

    restart: int = Field(
        ge=1,
        le=MOST_RESTART,
        description="Number of the restart in place with which it begins: higher than that of any before.",
    )
    own_restarts: int = Field(
        ge=0, description="How many more restarts in place the pods may decide on by themselves, after that one."
    )
    takeovers: list[Takeover] = Field(
        max_length=MOST_SPARES,
        description="Workers that are other pods than those of their numbers. A pod whose place another one has ends.",
    )

    def pod_of(self, worker: int) -> int:
        """Return the completion index of the worker's pod."""
        return next((one.pod for one in self.takeovers if one.worker == worker), worker)

    def worker_of(self, pod: int, workers: float) -> int | None:
        """Return the worker index of a pod among `workers` workers; None if the pod is an idle spare or was
        replaced."""
        taken = next((one.worker for one in self.takeovers if one.pod == pod), None)
        if taken is not None:
            return taken
        return pod if pod < workers and self.pod_of(pod) == pod else None


class ReportAnswer(ApiModel):
    model_config = ConfigDict(extra="ignore")

    finish_phase: bool = Field(False, description="End the phase now, through a committed checkpoint.")
    restarts_in_place: int = Field(
        0,
        description="Restarts in place of the pod of its execution that has begun the most: a pod that has made fewer"
        " follows it.",
    )
    membership: Membership | None = Field(
        None,
        description="The newest membership of its execution. None: each worker is the pod of its number. A pod that has"
        " made fewer restarts than this one asks for ends its ranks and meets the others anew, or begins as the worker"
        " that it is now.",
    )
    authorities: str | None = Field(
        None,
        max_length=AUTHORITIES_BYTES,
        description="Certificates of authorities, in PEM, by which the pod is to know the operator from now on, beside"
        " those that it was made with. None: those that it has said.",
    )
