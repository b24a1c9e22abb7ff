"""One phase of a job: what is shared, how long it runs, on which ranks, in which layout."""

from typing import Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DecimalString, DnsLabel, Quantity

Pattern = Literal["cycle", "segment"]
Schedule = Literal["layered", "gpipe", "1f1b", "interleaved"]
StateSharding = Literal["none", "optimizer", "gradients", "full"]
Home = Literal["device", "host", "disk"]


class Sharing(ApiModel):
    blocks: int = Field(ge=1, le=10_000, description="Distinct blocks that the layers share; must divide the layers.")
    pattern: Pattern = Field(
        "cycle", description="cycle: layer l uses block l mod blocks. segment: neighbouring layers share a block."
    )


class Until(ApiModel):
    """The end of a phase: whichever bound is met first."""

    steps: int | None = Field(
        None, ge=1, le=1_000_000_000, description="Steps, counted from the job's start over all phases."
    )
    tokens: int | None = Field(
        None, ge=1, le=2**62, description="Tokens, counted from the job's start over all phases."
    )
    loss: DecimalString | None = Field(
        None, description="Validation loss (nats per token) at or below which the phase ends early."
    )


class Batch(ApiModel):
    sequences: int = Field(ge=1, le=10_000_000, description="Sequences of a step, over all ranks.")
    micro_batches: int = Field(
        1, ge=1, le=1_000_000, description="Parts that a step's sequences pass through in turn; must divide sequences."
    )


class Parallelism(ApiModel):
    pipeline: int = Field(
        1, ge=0, le=10_000, description="Pipeline stages; at most layers. 0: one stage for each rank of the phase."
    )
    schedule: Schedule = Field("layered", description="Order of the micro-batches through the layers.")
    state_sharding: StateSharding = Field(
        "none",
        description="What is split over the data-parallel ranks: nothing, the optimizer state, gradients too, all.",
    )


class Offload(ApiModel):
    weights: Home = Field("device", description="Home of the master weights.")
    optimizer: Home = Field("device", description="Home of the optimizer's moments.")
    window: int = Field(2, ge=1, le=10_000, description="Layers whose working copies are on the device at a time.")


class Resources(ApiModel):
    limits: dict[str, Quantity] = Field({}, description="As in a container; GPUs are named here.")
    requests: dict[str, Quantity] = Field({}, description="As in a container.")


class Phase(ApiModel):
    name: DnsLabel = Field(description="Unique within the job; part of the names of pods and checkpoints.")
    sharing: Sharing | None = Field(
        None, description="Which layers share weights. Omitted: every layer owns its weights."
    )
    until: Until = Field(
        description="The end of the phase: the first bound that is met.", json_schema_extra={"minProperties": 1}
    )
    workers: int = Field(1, ge=1, le=10_000, description="Pods of the phase.")
    processes_per_worker: int | None = Field(
        None, ge=1, le=64, description="Ranks in a pod. Omitted: one for each GPU in the limits, else one."
    )
    batch: Batch = Field(description="The batch of one step.")
    parallelism: Parallelism = Field(
        Parallelism(),
        description="How the phase is laid out over its ranks. Release 0.1 keeps all layers on every rank, with a"
        " notice; the losses are the same.",
    )
    offload: Offload = Field(
        Offload(),
        description="Where the state of the layers lives between its uses. Release 0.1 keeps it on the device, with a"
        " notice; the losses are the same.",
    )
    resources: Resources = Field(Resources(), description="Compute resources of each pod of the phase.")
