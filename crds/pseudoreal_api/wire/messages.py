"""What the trainer says to the operator: the termination message (the truth) and the progress report (live)."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pseudoreal_api.base import ApiModel
from pseudoreal_api.wire.layout import ChosenLayout

TERMINATION_MESSAGE_BYTES = 4096
"""Size limit of a termination message: Kubernetes keeps no more of it."""

IN_PLACE_CHARACTERS = 300
"""Most characters of the reason of a restart in place."""

MOST_COUNT = 2**63 - 1
"""The largest integer that the API server stores."""

PROGRESS_EVENT = "progress"
"""Value of `event` in the log lines that are progress reports."""


class ExitCode(IntEnum):
    """How a trainer process ends; 71, 75 and 78 are EX_OSERR, EX_TEMPFAIL and EX_CONFIG of
    sysexits.h."""

    SUCCEEDED = 0
    FAILED = 1
    OUT_OF_MEMORY = 71
    YIELDED = 75
    INVALID_JOB = 78


Outcome = Literal["Succeeded", "Yielded", "InvalidJob", "OutOfMemory", "Failed"]

EXIT_CODES: dict[Outcome, ExitCode] = {
    "Succeeded": ExitCode.SUCCEEDED,
    "Yielded": ExitCode.YIELDED,
    "InvalidJob": ExitCode.INVALID_JOB,
    "OutOfMemory": ExitCode.OUT_OF_MEMORY,
    "Failed": ExitCode.FAILED,
}


_EXIT_CODES: Mapping[str, ExitCode] = {str(outcome): code for outcome, code in EXIT_CODES.items()}

_Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]


MOST_IN_PLACE = 10
"""Most restarts in place of one execution that pods decide on by themselves."""
MOST_SPARES = 8
"""Most spare pods of a phase."""
MOST_RESTART = MOST_IN_PLACE + 2 * MOST_SPARES
"""Highest number of a restart in place: a spare pod that takes a place may leave out one."""


class InPlace(ApiModel):
    """How often a pod has restarted its ranks in place, and why it did so the last time."""

    model_config = ConfigDict(extra="ignore")

    restarts: int = Field(ge=1, le=MOST_RESTART, description="Number of the newest restart of its ranks in place.")
    peer_lost: bool = Field(description="The last time it followed another pod, in which a process died.")
    message: str = Field(max_length=IN_PLACE_CHARACTERS, description="For people: what had died the last time.")


class TerminationMessage(ApiModel):
    """Written by a trainer or delink pod when it ends; at most 4096 bytes of JSON."""

    # The trainer may be of a later release than the operator.
    model_config = ConfigDict(extra="ignore")

    outcome: str = Field(
        max_length=64,
        pattern="^[A-Z][A-Za-z]*$",
        description="How the pod ended: Succeeded, Yielded, InvalidJob, OutOfMemory or Failed. More words may come.",
    )
    phase: str = Field(max_length=253, description="The phase that it trained, or delinked for.")
    execution: _Count = Field(description="Number of the execution that it belonged to.")
    step: _Count = Field(0, description="Steps done, from the job's start.")
    tokens: _Count = Field(0, description="Tokens trained, from the job's start.")
    loss: float | None = Field(None, description="Training loss of the last step, nats per token.")
    start_validation_loss: float | None = Field(None, description="Validation loss before the phase's first step.")
    validation_loss: float | None = Field(None, description="Validation loss at the end.")
    checkpoint: str | None = Field(None, max_length=253, description="The newest committed checkpoint.")
    digest: str | None = Field(None, description="SHA-256 of that checkpoint's manifest.")
    suspect: _Count | None = Field(None, description="The rank at fault, where it is not one of this pod's own.")
    peer_lost: bool = Field(
        False, description="The pod ended as another one failed, or was gone: the fault began there."
    )
    layout: ChosenLayout | None = Field(
        None, description="The layout that the phase was given. None: the job says it itself."
    )
    in_place: InPlace | None = Field(
        None, description="Its restarts in place after which ranks began. None: there were none."
    )
    message: str = Field("", max_length=2000, description="For people: what went wrong and what to change.")

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the outcome; that of a failure for an outcome that only a later release knows."""
        return _EXIT_CODES.get(self.outcome, ExitCode.FAILED)


class CheckpointCost(BaseModel):
    """What saving a checkpoint took."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    """Training step whose state the checkpoint holds."""
    bytes: int
    seconds: float
    """Seconds from the end of the step until the checkpoint was committed."""
    bytes_per_second: float
    stall_seconds: float
    """Upper bound on the seconds that training on the first rank stood still for the checkpoint."""


class Sample(BaseModel):
    """A text that the model in training wrote."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str
    text: str
    """What it wrote behind the prompt."""


class ProgressReport(BaseModel):
    """One line of metrics.jsonl, and one progress line of the log. The keys are stable."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    phase: str
    step: int
    total_steps: int
    """Step at which the last phase of the job ends at the latest."""
    tokens: int
    loss: float | None
    """Loss of the newest step that had a finite one."""
    z_loss: float | None = None
    """Mean of the z-loss over the tokens of this step, with its factor, which `loss` does not contain; None where the
    job has none."""
    auxiliary_loss: float | None = None
    """Auxiliary loss of all layers with its factor, in the mean over the sequences of this step, which `loss` does not
    contain; None where the job has none."""
    expert_load_max: float | None = None
    """Tokens of the expert with the most as a multiple of the mean over its layer's experts, in the layer where that is
    largest, of this step; 1 is balance. None where there are no experts."""
    expert_load_mean: float | None = None
    """The same in the mean over the layers with experts."""
    idle_experts: float | None = None
    """Share of the experts of all layers that no token chose in this step."""
    dropped_tokens: float | None = None
    """Share of the choices of this step that experts refused as they were full; 0 where none ever is."""
    router_entropy: float | None = None
    """Entropy of the probabilities that routers give to experts in this step, in nats, in the mean over tokens,
    prototypes and layers: the logarithm of the experts of a prototype where they are alike, 0 where one has all."""
    validation_loss: float | None = None
    """Validation loss in nats per token: in the log the newest one known, in metrics.jsonl only on lines where it was
    measured."""
    validation_losses: dict[str, float] | None = None
    """Validation losses by the names of data.validation.sets, nats per token, on lines of metrics.jsonl where they were
    measured; None where the corpus is text."""
    bits_per_byte: dict[str, float] | None = None
    """The same in bits per byte of the text, which compares tokenizers; None where the tokenizer is not known. A text
    is one set with the name text."""
    samples: list[Sample] | None = None
    """What the model wrote behind the prompts of data.validation.samples, on lines of metrics.jsonl where validation
    losses were measured; None where the job has none."""
    learning_rate: float
    tokens_per_second: float
    step_seconds: float = 0.0
    """Seconds of a training step, in the mean over the newest ones."""
    seconds: float
    """Seconds of training since the start of the process."""
    remaining_seconds: float
    """Seconds that the phase still takes at the present rate."""
    global_cursor: int
    """Samples consumed, from the job's start."""
    skipped_steps: int = 0
    """Steps, from the job's start, whose updates were left out in whole or in part because a loss or gradient was not
    finite."""
    data_seconds: float = 0.0
    """Seconds of this step for which the first rank waited for samples."""
    waited_seconds: float = 0.0
    """Seconds of this step that the first rank's main thread stood still until its gradients were reduced and its units
    updated."""
    waits: dict[str, float] = {}
    """Seconds of `seconds` in which the first rank's main thread waited, by what for: `data`, `reductions` of gradients
    among ranks, and `updates` of units in their home."""
    gradient_norm: float | None = None
    """L2 norm of the step's whole gradient before clipping; None where clipping.mode is not Global, and where it is not
    finite."""
    teraflops_per_second: float = 0.0
    """Rate of each rank, in 10**12 floating-point operations of the model a second: the forward pass, twice as much for
    the backward pass, attention to the half of the tokens that come before, nothing for what is computed again."""
    mfu: float | None = None
    """The same as a share of the device's peak in bfloat16; None for other types, and where the peak is not known."""
    device_bytes: int | None = None
    """Most memory of the first rank's device that tensors have taken so far; None without a GPU."""
    host_bytes: int | None = None
    """Most memory of the host that the first rank's process has taken so far."""
    gradient_correlations: list[float] | None = None
    """Cosines between the gradients of neighbouring layers of a block, the lowest first; None where this step did not
    check."""
    checkpoint: CheckpointCost | None = None
    """The checkpoint that was committed since the line before; None where there was none."""
