"""One phase of a job: what is shared, how long it runs, on which ranks, in which layout."""

from collections import Counter
from typing import Any, Literal

from pydantic import Field, field_validator

from pseudoreal_api.base import ApiModel, DecimalString, DnsLabel, Quantity, list_map
from pseudoreal_api.names import OFFLOAD_DIRECTORY

Pattern = Literal["cycle", "segment"]
Schedule = Literal["layered", "gpipe", "1f1b", "interleaved"]
StateSharding = Literal["none", "optimizer", "gradients", "full"]
Home = Literal["device", "host", "disk"]


class Sharing(ApiModel):
    blocks: int = Field(ge=1, le=10_000, description="Distinct blocks that the layers share; must divide the layers.")
    pattern: Pattern = Field(
        "cycle", description="cycle: layer l uses block l mod blocks. segment: neighbouring layers share a block."
    )


class GradientCorrelation(ApiModel):
    """The layers that share a block pull it in different directions: time to give them blocks of their own."""

    below: DecimalString = Field(
        "0.99",
        description="A check is met when more than half of the neighbouring layers of a block have gradients whose"
        " cosine is below this. Neighbours of pre-norm layers agree closely: 0.5, known from BERT, is never reached.",
    )
    every_steps: int = Field(100, ge=1, le=1_000_000_000, description="Steps between two checks.")
    checks: int = Field(3, ge=1, le=10_000, description="Checks in a row that must be met.")


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
    gradient_correlation: GradientCorrelation | None = Field(
        None, description="Ends the phase early when the gradients of layers that share a block differ enough."
    )


class Batch(ApiModel):
    sequences: int = Field(ge=1, le=10_000_000, description="Sequences of a step, over all ranks.")
    micro_batches: int = Field(
        1, ge=1, le=1_000_000, description="Parts that a step's sequences pass through in turn; must divide sequences."
    )


class Parallelism(ApiModel):
    pipeline: int = Field(
        1,
        ge=0,
        le=10_000,
        description="Pipeline ranks; at most layers, and a divisor of the phase's ranks. 0: all ranks of the phase.",
    )
    schedule: Schedule = Field(
        "layered",
        description="Order of the work. layered: all micro-batches through one layer, then the next; layer l is on"
        " pipeline rank l mod pipeline. gpipe, 1f1b: neighbouring layers on one rank. interleaved: layer l on rank"
        " l mod pipeline, one micro-batch after the other.",
    )
    state_sharding: StateSharding = Field(
        "none",
        description="What is split over the data-parallel ranks: nothing, the optimizer state, gradients too, all.",
    )


class Activations(ApiModel):
    """What the forward pass keeps for the backward pass."""

    recompute: bool = Field(
        True, description="Keep only the input of each block and compute the rest again in the backward pass."
    )
    home: Literal["device", "host"] = Field(
        "device", description="Where the blocks' inputs wait for the backward pass; host needs recompute."
    )


class UnitHome(ApiModel):
    unit: str = Field(
        pattern=r"^(embedding|head|blocks\.(0|[1-9][0-9]*))$",
        max_length=16,
        description="embedding, blocks.N, or head (the final norm and the head).",
    )
    home: Home = Field(description="Home of the unit's state.")


class OffloadBudget(ApiModel):
    """Bytes that a rank may use; what does not fit on the device goes to the host, and from there to disk."""

    device: Quantity | None = Field(None, description="Bytes on the device of a rank. Omitted: no bound.")
    host: Quantity | None = Field(None, description="Bytes of state on the host of a rank. Omitted: no bound.")


class Offload(ApiModel):
    """Where the state of each unit (float32 master weights and moments) lives between its uses.

    Units are the embedding, each block, and the final norm with the head.
    """

    home: Home = Field("device", description="Home of every unit that neither budget nor homes places.")
    budget: OffloadBudget | None = Field(
        None, description="Lets the plan choose the homes, unit by unit, moving no more than it must."
    )
    homes: list[UnitHome] = Field(
        [],
        max_length=1024,
        description="Homes of single units; the others get home.",
        json_schema_extra=list_map("unit"),
    )
    window: int = Field(
        2, ge=1, le=10_000, description="Units whose working copies are on the device at a time, where they move."
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="A Kubernetes volume source (for instance ephemeral, or a hostPath that user 10001 may write to)"
        f" for state whose home is disk, mounted at {OFFLOAD_DIRECTORY}. Omitted: emptyDir of"
        " twice the size that the state needs.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )

    @field_validator("homes")
    @classmethod
    def _one_home_each(cls, homes: list[UnitHome]) -> list[UnitHome]:
        """As the API server's x-kubernetes-list-map-keys; in CEL it would cost more than the server allows."""
        counts = Counter(entry.unit for entry in homes)
        twice = [unit for unit, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"duplicate value: unit {twice[0]} stands there {counts[twice[0]]} times; keep one")
        return homes

    @property
    def may_use_disk(self) -> bool:
        """A budget may send to disk what fits nowhere else."""
        return self.budget is not None or "disk" in (self.home, *(entry.home for entry in self.homes))


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
    parallelism: Parallelism = Field(Parallelism(), description="How the phase is laid out over its ranks.")
    activations: Activations = Field(Activations(), description="What the forward pass keeps.")
    offload: Offload = Field(Offload(), description="Where the state of the layers lives between its uses.")
    compile: bool = Field(
        False,
        description="Compile blocks with torch.compile, of a mixture of experts the attention alone; on GPUs, in an"
        " image with a C compiler and Python's headers.",
    )
    resources: Resources = Field(Resources(), description="Compute resources of each pod of the phase.")
