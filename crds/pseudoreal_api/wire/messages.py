"""Messages from trainer to operator: the termination message (authoritative) and the progress report (live)."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pseudoreal_api.base import ApiModel
from pseudoreal_api.wire.layout import ChosenLayout

TERMINATION_MESSAGE_BYTES = 4096
"""Size limit of a termination message; Kubernetes truncates longer ones."""

IN_PLACE_CHARACTERS = 300
"""Maximal characters of the reason of a restart in place."""

MOST_COUNT = 2**63 - 1
"""Largest integer that the API server stores."""

PROGRESS_EVENT = "progress"
"""Value of `event` in log lines that are progress reports."""


class ExitCode(IntEnum):
    """Exit codes of a trainer process; 71, 75 and 78 are EX_OSERR, EX_TEMPFAIL and EX_CONFIG of sysexits.h."""

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
"""Maximal number of restarts in place per execution that pods decide on by themselves."""
MOST_SPARES = 8
"""Maximal number of spare pods of a phase."""
MOST_RESTART = MOST_IN_PLACE + 2 * MOST_SPARES
"""Highest number of a restart in place: a takeover by a spare pod may skip one number."""


class InPlace(ApiModel):
    """Number of times that a pod has restarted its ranks in place, and the newest reason."""

    model_config = ConfigDict(extra="ignore")

    restarts: int = Field(ge=1, le=MOST_RESTART, description="Number of the newest restart of its ranks in place.")
    peer_lost: bool = Field(description="The last time it followed another pod, in which a process died.")
    message: str = Field(max_length=IN_PLACE_CHARACTERS, description="For people: what had died the last time.")


class TerminationMessage(ApiModel):
    """Message that a trainer or delink pod writes when it ends; at most 4096 bytes of JSON."""

    # Unknown fields are ignored: the trainer may be of a later release than the operator.
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
        """Exit code of the outcome; FAILED for an outcome of a later release."""
        return _EXIT_CODES.get(self.outcome, ExitCode.FAILED)


class CheckpointCost(BaseModel):
    """Cost of saving a checkpoint."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    """Training step whose state the checkpoint contains."""
    bytes: int
    seconds: float
    """Seconds from the end of the step to the commit of the checkpoint."""
    bytes_per_second: float
    stall_seconds: float
    """Upper bound of the seconds for which the checkpoint blocked training on the first rank."""


class Sample(BaseModel):
    """Text that the model generated during training."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str
    text: str
    """Generated continuation of the prompt."""


class ProgressReport(BaseModel):
    """One line of metrics.jsonl, and one progress line of the log. The keys are stable."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    phase: str
    step: int
    total_steps: int
    """Last step at which the last phase of the job can end."""
    tokens: int
    loss: float | None
    """Loss of the newest step with a finite loss."""
    z_loss: float | None = None
    """Mean z-loss over the tokens of this step, including its factor and not contained in `loss`; None if the job has
    none."""
    auxiliary_loss: float | None = None
    """Auxiliary loss of all layers including its factor, averaged over the sequences of this step and not contained in
    `loss`; None if the job has none."""
    expert_load_max: float | None = None
    """Largest load of an expert in this step, over all layers: its tokens as a multiple of the mean over its layer's
    experts. 1 is balance. None if there are no experts."""
    expert_load_mean: float | None = None
    """Largest load of an expert in a layer, averaged over the layers with experts."""
    idle_experts: float | None = None
    """Share of the experts of all layers that no token chose in this step."""
    dropped_tokens: float | None = None
    """Share of this step's routing decisions that experts refused because they were full; 0 for experts without a
    capacity."""
    router_entropy: float | None = None
    """Entropy of the router probabilities in this step in nats, averaged over tokens, prototypes and layers.

    It is the logarithm of a prototype's number of experts if all are equally probable, and 0 if one expert has all
    probability.
    """
    validation_loss: float | None = None
    """Validation loss in nats per token. In the log it is the newest known one; metrics.jsonl has it only on lines of
    steps with a validation."""
    validation_losses: dict[str, float] | None = None
    """Validation losses by name in data.validation.sets, in nats per token, on lines of metrics.jsonl of steps with a
    validation; None if the corpus is text."""
    bits_per_byte: dict[str, float] | None = None
    """Validation losses in bits per byte of text, comparable between tokenizers; None if the tokenizer is unknown. A
    text is one set named `text`."""
    samples: list[Sample] | None = None
    """Generated continuations of the prompts in data.validation.samples, on lines of metrics.jsonl of steps with a
    validation; None if the job has no prompts."""
    learning_rate: float
    tokens_per_second: float
    step_seconds: float = 0.0
    """Seconds of a training step, averaged over the newest steps."""
    seconds: float
    """Seconds of training since the start of the process."""
    remaining_seconds: float
    """Estimated remaining seconds of the phase at the current rate."""
    global_cursor: int
    """Samples consumed since the start of the job."""
    skipped_steps: int = 0
    """Steps since the start of the job whose updates were skipped, wholly or in part, because a loss or gradient was
    not finite."""
    data_seconds: float = 0.0
    """Seconds of this step for which the first rank waited for samples."""
    waited_seconds: float = 0.0
    """Seconds of this step for which the first rank's main thread was blocked on gradient reductions and unit
    updates."""
    waits: dict[str, float] = {}
    """Part of `seconds` for which the first rank's main thread waited, by cause: `data`, `reductions` of gradients
    between ranks, and `updates` of units in their home."""
    gradient_norm: float | None = None
    """L2 norm of the step's whole gradient before clipping; None if clipping.mode is not Global, or the norm is not
    finite."""
    teraflops_per_second: float = 0.0
    """Rate of each rank in 10**12 model floating-point operations per second.

    Counted are the forward pass, twice as much for the backward pass, and attention to the half of the tokens that come
    before; recomputation is not counted.
    """
    mfu: float | None = None
    """Model FLOPs utilization: the rate as a share of the device's bfloat16 peak; None for other types, and if the peak
    is unknown."""
    device_bytes: int | None = None
    """Peak memory of tensors on the first rank's device so far; None without a GPU."""
    host_bytes: int | None = None
    """Peak host memory of the first rank's process so far."""
    gradient_correlations: list[float] | None = None
    """Cosines between the gradients of neighbouring layers of a block, lowest layers first; None if this step did not
    check."""
    checkpoint: CheckpointCost | None = None
    """Checkpoint committed since the previous line; None if there was none."""
