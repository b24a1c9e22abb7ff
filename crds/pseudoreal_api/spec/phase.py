"""Phases of a job: layers, sharing, length, ranks and layout; and the transition between two phases."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import SET, ApiModel, DecimalString, DnsLabel, Quantity, list_map
from pseudoreal_api.names import OFFLOAD_DIRECTORY
from pseudoreal_api.spec.kubernetes import MOST_ITEMS, VOLUME_SOURCE
from pseudoreal_api.spec.pod import Pod
from pseudoreal_api.wire.contract import Since
from pseudoreal_api.wire.messages import MOST_SPARES

Pattern = Literal["Cycle", "Segment"]
GrowthPattern = Literal["Stack", "Interleave"]
Schedule = Literal["Layered", "GPipe", "1F1B", "Interleaved"]
StateSharding = Literal["None", "Optimizer", "Gradients", "Full"]
Keep = Literal["Inputs", "Products", "All"]
Home = Literal["Device", "Host", "Disk"]
Chooser = Literal["Given", "Auto"]
SharedPart = Literal["Blocks", "Experts"]
OptimizerState = Literal["Measured", "Copy", "Scale", "Reset"]


class Sharing(ApiModel):
    blocks: int = Field(
        ge=1,
        le=10_000,
        description="blocks is the number of distinct blocks that the layers share; it must divide the layers. With"
        " parts [Experts] it is the number of distinct sets of experts.",
    )
    pattern: Pattern = Field(
        "Cycle",
        description="pattern says which block a layer uses. Cycle: layer l uses block l mod blocks. Segment:"
        " neighbouring layers share a block.",
    )
    parts: Annotated[list[SharedPart], Since(4)] = Field(
        ["Blocks"],
        min_length=1,
        max_length=1,
        description="parts says what layers share. Blocks: all of their weights. Experts: the experts of a mixture"
        " alone; attention, norms, routers and shared experts are each layer's own.",
        json_schema_extra=SET,
    )

    @property
    def shares_experts_alone(self) -> bool:
        return self.parts == ["Experts"]


class Growth(ApiModel):
    """Beginning of the layers of a phase with more layers than the phase before."""

    pattern: GrowthPattern = Field(
        "Stack",
        description="pattern says which layer of the phase before, with K layers, layer i of L begins as. Stack: layer"
        " i mod K, so that the layers follow one another once more. Interleave: layer i * K / L, rounded down, so that"
        " copies of a layer stand side by side.",
    )
    initial: Literal["Copy", "ZeroOutput"] = Field(
        "Copy",
        description="initial says what added layers begin with: all but the first that begins as the same layer. Copy:"
        " its weights. ZeroOutput: the same, but zero in the matrices whose output is added to the residual stream, so"
        " that the model computes what it did.",
    )


class GradientCorrelation(ApiModel):
    """Bound on the gradients of layers with a shared block: the phase ends once they diverge, so the layers should own
    blocks."""

    below: DecimalString = Field(
        description="below is the cosine under which the gradients of two neighbouring layers of a block count as"
        " different; a check is met when more than half of these pairs differ. No value has been shown to"
        " choose the best moment. Neighbours of pre-norm layers agree closely: 0.5, known from BERT, is never reached."
    )
    every_steps: int = Field(
        100, ge=1, le=1_000_000_000, description="everySteps is the number of training steps between two checks."
    )
    checks: int = Field(3, ge=1, le=10_000, description="checks is the number of checks in a row that must be met.")


class Until(ApiModel):
    """End of a phase: the first bound to be met."""

    step: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="step is the training step at which the phase ends, counted from the job's start over all phases."
        " Omitted: no number of steps ends it.",
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=2**62,
        description="tokens is the number of tokens at which the phase ends, counted from the job's start over"
        " all phases. Omitted: no number of tokens ends it.",
    )
    validation_loss: DecimalString | None = Field(
        None,
        description="validationLoss is the loss (nats per token) of the validation text at or below which the phase"
        " ends early. Omitted: no loss ends it.",
    )
    gradient_correlation: GradientCorrelation | None = Field(
        None,
        description="gradientCorrelation ends the phase early when the gradients of layers that share a block"
        " differ enough. Omitted: they are not compared.",
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


class Part(ApiModel):
    """A source's part of a mixture."""

    source: DnsLabel = Field(description="source is the name of one of data.sources.")
    weight: int = Field(ge=1, le=100_000, description="weight is its part of the samples, beside the other weights.")


class Parallelism(ApiModel):
    pipeline: Annotated[
        Annotated[int, Field(strict=True, ge=1, le=10_000)] | Literal["AllRanks"],
        Field(
            json_schema_extra={
                "x-kubernetes-int-or-string": True,
                "minimum": 1,
                "maximum": 10_000,
                "pattern": "^AllRanks$",
            }
        ),
    ] = Field(
        1,
        description="pipeline is the number of pipeline ranks: at most layers, and a divisor of the phase's"
        " ranks. AllRanks: all ranks of the phase.",
    )
    schedule: Schedule = Field(
        "Layered",
        description="schedule is the order of the work. Layered: all micro-batches through one layer, then the"
        " next; layer l is on pipeline rank l mod pipeline. GPipe, 1F1B: neighbouring layers on one"
        " rank. Interleaved: layer l on rank l mod pipeline, one micro-batch after the other.",
    )
    state_sharding: StateSharding | None = Field(
        None,
        description="stateSharding says what is split over the data-parallel ranks. None: nothing. Optimizer: the"
        " optimizer state. Gradients: also the gradients. Full: also the weights. Omitted: Full where there are two or"
        " more data-parallel ranks and optimizer.algorithm is AdamW, otherwise None.",
    )
    replicas: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="replicas is the number of groups of data-parallel ranks, such as those of one node, each of which"
        " has all parts of a unit together: gradients are summed within a group before between groups. It divides the"
        " data-parallel ranks; more than 1 needs stateSharding other than None.",
    )
    expert_ranks: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="expertRanks is the number of ranks over which the experts of each layer are spread: tokens go to"
        " the ranks of their experts and come back. It divides model.experts.count and the ranks of a replica; more"
        " than 1 needs model.norm.placement Pre.",
    )
    layout: Annotated[Chooser, Since(4)] = Field(
        "Given",
        description="layout says who chooses the layout. Given: the other fields here, batch.microBatches and"
        " activations.keep are it. Auto: before its first step the phase takes the layout with the shortest predicted"
        " step that fits, keeps it, and shows it in the status; those fields are then left out.",
    )
    hardware: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="hardware is the path in the pods of the profile of a machine, as measure-hardware writes it, that"
        " Auto predicts with. A relative path means the trainer's working directory. Omitted: machines with 80 GB GPUs"
        " are assumed for phases with GPUs, and a small CPU for others.",
    )


class Activations(ApiModel):
    """Storage of activations between forward and backward pass."""

    keep: Annotated[Keep, Since(4, known="Inputs|All")] = Field(
        "Inputs",
        description="keep says which activations wait for the backward pass. Inputs: the input of each block; the"
        " rest is computed again. Products: all but the outputs of norms before a product, and of activation"
        " functions; these are computed again. All: all of them.",
    )
    home: Literal["Device", "Host"] = Field(
        "Device", description="home is where inputs of blocks wait for the backward pass; Host needs keep Inputs."
    )


class UnitHome(ApiModel):
    unit: str = Field(
        pattern=r"^(embedding|head|blocks\.(0|[1-9][0-9]*)(\.experts)?)$",
        max_length=24,
        description="unit is embedding, blocks.N, blocks.N.experts, or head (the final norm and the head; where"
        " embeddings are Tied they are part of embedding). The home of a block is that of its experts, too, unless"
        " these are named.",
    )
    home: Home = Field(description="home is where the unit's state lives.")


class OffloadBudget(ApiModel):
    """Byte limits of a rank; state beyond the device limit goes to the host, and from there to disk."""

    device: Quantity | None = Field(
        None, description="device is the number of bytes that a rank may use on its device. Omitted: there is no limit."
    )
    host: Quantity | None = Field(
        None,
        description="host is the number of bytes of state that a rank may keep on the host. Omitted: there is no"
        " limit.",
    )


class Offload(ApiModel):
    """Home of each unit's state (float32 master weights and moments) between its uses.

    Units are the embedding, each block, and the final norm with the head.
    """

    home: Home = Field("Device", description="home is the home of every unit that neither budget nor homes places.")
    budget: OffloadBudget | None = Field(
        None,
        description="budget lets the plan choose the homes, unit by unit, and move no more than it must. Omitted: home"
        " and homes place the units.",
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
    expert_groups: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="expertGroups is the number of groups into which a rank's experts of a layer are cut. Each group"
        " is a unit with a home of its own, fetched after the one before and only where tokens came for it, so that"
        " the experts of a layer need not fit on the device at once. It divides the experts of a rank; more than 1"
        " needs the schedule Layered and model.norm.placement Pre.",
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance ephemeral, or a hostPath that user 10001 may"
        f" write to) for state whose home is Disk, mounted at {OFFLOAD_DIRECTORY}. Omitted: emptyDir of"
        " twice the size that the state needs.",
        json_schema_extra=VOLUME_SOURCE,
    )

    @property
    def may_use_disk(self) -> bool:
        """Whether some unit may have its home on disk; with a budget, units without room elsewhere go to disk."""
        return self.budget is not None or "Disk" in (self.home, *(entry.home for entry in self.homes))


class Elastic(ApiModel):
    """Minimal number of pods for training while there is no room for all. The batch stays the same."""

    min_workers: int = Field(
        ge=1,
        le=10_000,
        description="minWorkers is the least number of pods of the phase; it is less than workers. Numbers between them"
        " that the layout does not divide into are left out.",
    )
    patience_seconds: int = Field(
        300,
        ge=1,
        le=2**31,
        description="patienceSeconds is how long pods may be without a node, or on one that is lost, before the phase"
        " goes on with fewer. Ten times as long after that, more are tried.",
    )


class Compile(ApiModel):
    mode: Literal["None", "Blocks"] = Field(
        "None",
        description="mode says what torch.compile compiles, on GPUs, in an image with a C compiler and Python's"
        " headers. None: nothing. Blocks: the blocks (of a block with experts the attention alone).",
    )


class Resources(ApiModel):
    limits: dict[str, Quantity] = Field(
        {}, max_length=MOST_ITEMS, description="limits are resource limits, as in a container; GPUs are named here."
    )
    requests: dict[str, Quantity] = Field(
        {}, max_length=MOST_ITEMS, description="requests are resource requests, as in a container."
    )


class Phase(ApiModel):
    name: DnsLabel = Field(
        description="name is unique within the job; it becomes part of the names of pods and checkpoints."
    )
    layers: int | None = Field(
        None,
        ge=1,
        le=1_000,
        description="layers is the number of layers in this phase: at most those of model, at least those of the phase"
        " before; the last phase has all. Weights of a shallow phase begin at the scale of its own depth."
        " Omitted: model.layers.",
    )
    growth: Growth | None = Field(
        None,
        description="growth says which layers of the phase before the layers of this one begin as, where it has more."
        " No byte is copied. Omitted: as with pattern Stack.",
    )
    experts: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="experts is the number of experts of a layer in this phase, as layers is that of layers. Where the"
        " phase before has K, expert j begins as its expert j mod K, and delink.noise parts them. Omitted:"
        " model.experts.count.",
    )
    sharing: Sharing | None = Field(
        None, description="sharing says which layers share weights. Omitted: every layer owns its weights."
    )
    until: Until = Field(
        description="until is the end of the phase: the first of its bounds that is met.",
        json_schema_extra={"minProperties": 1},
    )
    workers: int = Field(1, ge=1, le=10_000, description="workers is the number of pods of the phase.")
    elastic: Elastic | None = Field(
        None,
        description="elastic lets the phase train with fewer pods than workers while there is no room for all of them."
        " Omitted: it waits for all.",
    )
    spares: int = Field(
        0,
        ge=0,
        le=MOST_SPARES,
        description="spares is the number of pods beside the workers that wait, with all that a worker has, GPUs"
        " included, to take the place of one that is lost. The others keep their pods then. 0: all pods are made anew.",
    )
    processes_per_worker: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processesPerWorker is the number of ranks in a pod. Omitted: one for each GPU in the limits,"
        " or one if there are none.",
    )
    batch: Batch = Field(description="batch is the batch of one training step.")
    mixture: Annotated[list[Part], Field(max_length=32)] = Field(
        [],
        description="mixture says what part of the samples each of data.sources has in this phase; those that are not"
        " named have none. Empty: the weights are those of data.sources.",
        json_schema_extra=list_map("source"),
    )
    parallelism: Parallelism = Field(
        Parallelism(), description="parallelism says how the phase is laid out over its ranks."
    )
    activations: Activations = Field(
        Activations(), description="activations says what the forward pass keeps for the backward pass, and where."
    )
    offload: Offload = Field(Offload(), description="offload says where the state of the units lives between its uses.")
    compile: Compile = Field(Compile(), description="compile says what is compiled before training.")
    resources: Resources = Field(
        Resources(),
        description="resources are the compute resources of each pod of the phase. They can be changed while the job is"
        " suspended.",
    )
    pod: Pod = Field(
        Pod(),
        description="pod is laid over spec.pod for the pods of this phase: entries of env replace those of the same"
        " name, template is laid over its template, the rest replaces.",
    )


class Delink(ApiModel):
    optimizer_state: OptimizerState = Field(
        "Scale",
        description="optimizerState says what the moments of a layer are after delinking, where L layers shared a"
        " block. Measured: the first moment divided by L, the second divided by how much larger the"
        " squared gradient of the block was than that of a layer, measured tensor by tensor (before a growth: as"
        " Scale). Copy: unchanged. Scale: the first moment divided by L, the second by L squared. Reset: zero.",
    )
    noise: DecimalString = Field(
        "0",
        description="noise is the share of freshly drawn weights, at most 1, that is added at the start of a phase to"
        " the matrices of copies: of every layer, block or expert but the first that begins as the same one.",
    )
    timeout_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="timeoutSeconds is the longest time from the end of a phase until the next one may start,"
        " restarts included.",
    )
    on_timeout: Literal["Fail", "RollBack"] = Field(
        "Fail",
        description="onTimeout says what follows when timeoutSeconds are over. Fail: the job fails. RollBack: the"
        " earlier phase is trained again from the newest checkpoint before its last one, and the"
        " delink is tried again; this counts as a restart.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps after a delink in which the learning rate rises from 0 to"
        " the value of its schedule.",
    )
    measured_steps: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="measuredSteps is the number of steps at the end of a phase in which optimizerState Measured"
        " measures gradients. A phase that ends early, by validationLoss or gradientCorrelation, trains that"
        " many steps more.",
    )
