"""Resolved configurations, passed by the operator to trainer pods as files."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from pseudoreal_api.base import ApiModel, DecimalString, Quantity
from pseudoreal_api.spec.checkpoint import CheckpointMode, StartFrom
from pseudoreal_api.spec.data import Data
from pseudoreal_api.spec.logging import Logging
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.network import Preflight
from pseudoreal_api.spec.optimizer import Optimizer, Precision
from pseudoreal_api.spec.phase import (
    Activations,
    Batch,
    Compile,
    Growth,
    Offload,
    OptimizerState,
    Parallelism,
    Sharing,
    StateSharding,
    Until,
)
from pseudoreal_api.wire.contract import REMEDY, ContractError, Since, without_contract


class JobIdentity(ApiModel):
    name: str = Field(description="The job's metadata.name.")
    namespace: str = Field(description="metadata.namespace of the job.")
    uid: str = Field(description="metadata.uid of the job; a checkpoint of another uid is refused.")


class CheckpointPolicy(ApiModel):
    every_steps: int = Field(description="Steps between two checkpoints.")
    mode: CheckpointMode = Field(description="spec.checkpoint.mode: whether training waits for a checkpoint.")
    buffer_bytes: Quantity = Field(description="Host memory of each rank through which a checkpoint passes.")
    keep_last: int = Field(description="Newest checkpoints kept besides those at the ends of phases.")
    keep_every: int | None = Field(
        None, description="Checkpoints of steps that this divides are kept as well. None: no others are kept."
    )


class DiscardConfig(ApiModel):
    """Checkpoints excluded from resuming: checkpoints at step `from_step` or later, written by executions before
    `before_execution`."""

    before_execution: int = Field(description="Number of an execution.")
    from_step: int = Field(description="A step, from the job's start.")
    continued: bool = Field(
        True, description="Whether checkpoints of the job that this one continues are discarded as well."
    )


class MeasureConfig(ApiModel):
    """Measurement of this phase's gradients for the delink into the next phase."""

    steps: int = Field(description="Number of measured steps, at the end of the phase.")
    next_sharing: Sharing = Field(
        description="Sharing of the next phase; explicit, also when every layer then owns its weights."
    )


class _Kept(ApiModel):
    """Storage locations of a job's results."""

    work_directory: str = Field(description="Folder of metrics.jsonl and, without object storage, of checkpoints/.")
    # An earlier trainer takes the URL of another service for a folder of its pod, and loses what it writes there.
    object_storage: Annotated[str | None, Since(4, known="s3://")] = Field(
        None, description="URL in object storage of the folder of checkpoints/. None: not used."
    )
    discards: dict[str, list[DiscardConfig]] | None = Field(
        None, description="Phase -> which of its checkpoints count no more. None: every checkpoint counts."
    )

    @property
    def storage(self) -> str:
        """Folder of checkpoints/, or its URL in object storage."""
        return self.object_storage or self.work_directory


class ResolvedParallelism(Parallelism):
    pipeline: int = Field(description="Number of pipeline ranks.")
    state_sharding: StateSharding = Field(
        "None", description="What is split over the data ranks; filled where the job omits it."
    )


class PhaseMixture(ApiModel):
    """Sources of a phase from data.sources, with their weights."""

    weights: dict[str, int] = Field(description="Part of the samples, by the names of the sources.")
    last_step: int = Field(description="Step, from the job's start, at which the phase ends at the latest.")
    sequences: int = Field(description="Samples of a step.")


class PhaseConfig(_Kept):
    """Complete configuration of a trainer process for one phase."""

    stage: Literal["train"] = Field("train", description="Tells this file from that of a delink.")
    job: JobIdentity = Field(description="The job.")
    execution: int = Field(description="Number of this execution; a stale one must not commit.")
    phase: str = Field(description="Name of the phase.")
    index: int = Field(description="Position of the phase in the job.")
    model: Model = Field(description="spec.model, with the layers and experts of the phase.")
    data: Data = Field(description="spec.data, with the path resolved.")
    optimizer: Optimizer = Field(description="spec.optimizer.")
    precision: Precision = Field(description="spec.precision.")
    sharing: Sharing = Field(description="Sharing of the phase; explicit, also when every layer owns its weights.")
    until: Until = Field(description="The phase's `until`.")
    measure: MeasureConfig | None = Field(
        None,
        description="What to measure for the next delink. None: the delink does not ask, or no layers are delinked.",
    )
    phase_steps: int = Field(description="Step, from the job's start, at which this phase ends at the latest.")
    warmup_steps: int = Field(0, description="Steps of warm-up at the start of this phase, if it was delinked.")
    total_steps: int = Field(description="Step at which the last phase ends at the latest: the schedule's horizon.")
    workers: int = Field(description="Pods of the phase.")
    processes_per_worker: int = Field(description="Ranks in each pod.")
    gpus: int = Field(
        0,
        description="GPUs or other accelerators that each pod asks for; if there are any, its ranks never train on the"
        " CPU. 0: its ranks train on the CPU. An earlier trainer takes the GPUs that it finds.",
    )
    collective_seconds: int | None = Field(
        None,
        description="Longest wait of a rank for the others in a collective, after which it ends. None: torch's"
        " own limit.",
    )
    batch: Batch = Field(description="The phase's `batch`.")
    mixtures: Annotated[list[PhaseMixture], Since(4)] = Field(
        [], description="The mixtures of this phase and of all behind it. Empty: the corpus is text."
    )
    parallelism: ResolvedParallelism = Field(description="The phase's `parallelism`, with pipeline resolved.")
    activations: Activations = Field(description="The phase's `activations`.")
    offload: Offload = Field(description="The phase's `offload`.")
    compile: Compile = Field(description="The phase's `compile`.")
    offload_directory: str = Field(description="Folder on a local disk for state whose home is Disk.")
    preflight: Preflight = Field(Preflight(), description="spec.network.preflight.")
    trace_directory: str | None = Field(None, description="Folder for Chrome traces of each rank. None: no trace.")
    checkpoint: CheckpointPolicy = Field(description="How often to save and what to keep.")
    logging: Logging = Field(Logging(), description="spec.logging.")
    in_place: int = Field(
        0, description="How often the pods restart their ranks in place after a process died. 0: they end."
    )
    spares: Annotated[int, Since(4)] = Field(
        0, description="Pods beside the workers, with the completion indices behind theirs, that wait to take a place."
    )
    continues: str | None = Field(
        None,
        description="Folder of checkpoints/ of the job that this one continues; used where the job's own has none"
        " newer.",
    )
    noise: Annotated[DecimalString | None, Since(4)] = Field(
        None, description="spec.delink.noise, if it is not 0, in phases behind the first. None: copies stay equal."
    )
    start_from: Annotated[StartFrom | None, Since(4)] = Field(
        None,
        description="spec.checkpoint.startFrom, with the path resolved, in the first phase. None: without a checkpoint"
        " the phase begins with random weights.",
    )

    @property
    def ranks(self) -> int:
        return self.workers * self.processes_per_worker


class DelinkConfig(_Kept):
    """Complete configuration of the delink between two phases."""

    stage: Literal["delink"] = Field("delink", description="Tells this file from that of a phase.")
    job: JobIdentity = Field(description="The job.")
    execution: int = Field(description="Number of this execution.")
    phase: str = Field(description="The phase that the delink leads into.")
    index: int | None = Field(
        None,
        description="Position of that phase in the job. None: behind the phase that is read, as its manifest says.",
    )
    from_phase: str = Field(description="The phase whose last checkpoint is read.")
    to_sharing: Sharing = Field(description="Sharing of the checkpoint that is written.")
    to_model: Annotated[Model | None, Since(4)] = Field(
        None,
        description="Model of the checkpoint that is written, if it has more layers or experts. None: that of the one"
        " that is read.",
    )
    growth: Annotated[Growth | None, Since(4)] = Field(
        None, description="How the layers of to_model begin. None: to_model is None."
    )
    optimizer_state: OptimizerState = Field(description="spec.delink.optimizerState.")


_CONFIG: TypeAdapter[PhaseConfig | DelinkConfig] = TypeAdapter(
    Annotated[PhaseConfig | DelinkConfig, Field(discriminator="stage")]
)


def read_config(path: Path) -> PhaseConfig | DelinkConfig:
    """Read the configuration at `path`. Fields of a later release are ignored.

    Raises ContractError if the configuration needs a later release.
    """
    config = without_contract(path.read_bytes())
    try:
        return _CONFIG.validate_json(json.dumps(config), extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise ContractError(
            f"The image of this pod cannot read {where} of its configuration ({first['msg']}, found"
            f" {first['input']!r}); {REMEDY}"
        ) from error


def read_phase_config(path: Path) -> PhaseConfig:
    """Read the configuration of a phase at `path`."""
    config = read_config(path)
    assert isinstance(config, PhaseConfig), "only phases have rank processes; the pod program handles delinks itself"
    return config
