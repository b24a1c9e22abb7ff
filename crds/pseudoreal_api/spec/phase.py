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
    blocks: int = Field(
        ge=1,
        le=10_000,
        description="blocks is the number of distinct blocks that the layers share; it must divide the layers.",
    )
    pattern: Pattern = Field(
        "cycle",
        description="pattern says which block a layer uses. cycle: layer l uses block l mod blocks. segment:"
        " neighbouring layers share a block.",
    )


class GradientCorrelation(ApiModel):
    """Ends a phase when the layers that share a block pull it in different directions: it is then time to give them
    blocks of their own."""

    below: DecimalString = Field(
        "0.99",
        description="below is the cosine under which the gradients of two neighbouring layers of a block count as"
        " different; a check is met when more than half of these pairs differ. Neighbours of pre-norm"
        " layers agree closely: 0.5, known from BERT, is never reached.",
    )
    every_steps: int = Field(
        100, ge=1, le=1_000_000_000, description="everySteps is the number of training steps between two checks."
    )
    checks: int = Field(3, ge=1, le=10_000, description="checks is the number of checks in a row that must be met.")


class Until(ApiModel):
    """The end of a phase: whichever bound is met first."""

    steps: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="steps is the training step at which the phase ends, counted from the job's start over all phases.",
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=2**62,
        description="tokens is the number of tokens at which the phase ends, counted from the job's start over"
        " all phases.",
    )
    loss: DecimalString | None = Field(
        None, description="loss is the validation loss (nats per token) at or below which the phase ends early."
    )
    gradient_correlation: GradientCorrelation | None = Field(
        None,
        description="gradientCorrelation ends the phase early when the gradients of layers that share a block"
        " differ enough.",
    )


class Batch(ApiModel):
    sequences: int = Field(
        ge=1, le=10_000_000, description="sequences is the number of sequences of a training step, over all ranks."
    )
    micro_batches: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="microBatches is the number of parts of a step's sequences that pass through the model in"
        " turn; it must divide sequences.",
    )


class Parallelism(ApiModel):
    pipeline: int = Field(
        1,
        ge=0,
        le=10_000,
        description="pipeline is the number of pipeline ranks: at most layers, and a divisor of the phase's"
        " ranks. 0: all ranks of the phase.",
    )
    schedule: Schedule = Field(
        "layered",
        description="schedule is the order of the work. layered: all micro-batches through one layer, then the"
        " next; layer l is on pipeline rank l mod pipeline. gpipe, 1f1b: neighbouring layers on one"
        " rank. interleaved: layer l on rank l mod pipeline, one micro-batch after the other.",
    )
    state_sharding: StateSharding = Field(
        "none",
        description="stateSharding says what is split over the data-parallel ranks. none: nothing. optimizer: the"
        " optimizer state. gradients: also the gradients. full: also the weights.",
    )


class Activations(ApiModel):
    """How activations are kept from the forward pass for the backward pass."""

    recompute: bool = Field(
        True,
        description="recompute keeps only the input of each block and computes the rest again in the backward pass.",
    )
    home: Literal["device", "host"] = Field(
        "device", description="home is where the inputs of the blocks wait for the backward pass; host needs recompute."
    )


class UnitHome(ApiModel):
    unit: str = Field(
        pattern=r"^(embedding|head|blocks\.(0|[1-9][0-9]*))$",
        max_length=16,
        description="unit is embedding, blocks.N, or head (the final norm and the head).",
    )
    home: Home = Field(description="home is where the unit's state lives.")


class OffloadBudget(ApiModel):
    """Bytes that a rank may use; what does not fit on the device goes to the host, and from there to disk."""

    device: Quantity | None = Field(
        None, description="device is the number of bytes that a rank may use on its device. Omitted: there is no limit."
    )
    host: Quantity | None = Field(
        None,
        description="host is the number of bytes of state that a rank may keep on the host. Omitted: there is no"
        " limit.",
    )


class Offload(ApiModel):
    """Where the state of each unit (float32 master weights and moments) lives between its uses.

    Units are the embedding, each block, and the final norm with the head.
    """

    home: Home = Field("device", description="home is the home of every unit that neither budget nor homes places.")
    budget: OffloadBudget | None = Field(
        None, description="budget lets the plan choose the homes, unit by unit, and move no more than it must."
    )
    homes: list[UnitHome] = Field(
        [],
        max_length=1024,
        description="homes names the homes of single units; the others get home.",
        json_schema_extra=list_map("unit"),
    )
    window: int = Field(
        2,
        ge=1,
        le=10_000,
        description="window is the number of units whose working copies are on the device at a time, where their"
        " home is elsewhere.",
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance ephemeral, or a hostPath that user 10001 may"
        f" write to) for state whose home is disk, mounted at {OFFLOAD_DIRECTORY}. Omitted: emptyDir of"
        " twice the size that the state needs.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )

    @field_validator("homes")
    @classmethod
    def _one_home_each(cls, homes: list[UnitHome]) -> list[UnitHome]:
        """Refuses a unit that is named twice, as x-kubernetes-list-map-keys does on the API server. In CEL the rule
        would cost more than the server allows. Raises ValueError."""
        counts = Counter(entry.unit for entry in homes)
        twice = [unit for unit, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"duplicate value: unit {twice[0]} stands there {counts[twice[0]]} times; keep one")
        return homes

    @property
    def may_use_disk(self) -> bool:
        """Whether some unit may have its home on disk; a budget may send there what fits nowhere else."""
        return self.budget is not None or "disk" in (self.home, *(entry.home for entry in self.homes))


class Resources(ApiModel):
    limits: dict[str, Quantity] = Field(
        {}, description="limits are resource limits, as in a container; GPUs are named here."
    )
    requests: dict[str, Quantity] = Field({}, description="requests are resource requests, as in a container.")


class Phase(ApiModel):
    name: DnsLabel = Field(
        description="name is unique within the job; it becomes part of the names of pods and checkpoints."
    )
    sharing: Sharing | None = Field(
        None, description="sharing says which layers share weights. Omitted: every layer owns its weights."
    )
    until: Until = Field(
        description="until is the end of the phase: the first of its bounds that is met.",
        json_schema_extra={"minProperties": 1},
    )
    workers: int = Field(1, ge=1, le=10_000, description="workers is the number of pods of the phase.")
    processes_per_worker: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processesPerWorker is the number of ranks in a pod. Omitted: one for each GPU in the limits,"
        " or one if there are none.",
    )
    batch: Batch = Field(description="batch is the batch of one training step.")
    parallelism: Parallelism = Field(
        Parallelism(), description="parallelism says how the phase is laid out over its ranks."
    )
    activations: Activations = Field(
        Activations(), description="activations says what the forward pass keeps for the backward pass, and where."
    )
    offload: Offload = Field(Offload(), description="offload says where the state of the units lives between its uses.")
    compile: bool = Field(
        False,
        description="compile compiles the blocks with torch.compile (of a block with experts the attention"
        " alone), on GPUs, in an image with a C compiler and Python's headers.",
    )
    resources: Resources = Field(
        Resources(), description="resources are the compute resources of each pod of the phase."
    )
