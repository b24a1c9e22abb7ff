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
        description="blocks is the number of distinct blocks (sets of layer weights) in the phase; it must divide"
        " the phase's layers. 1: all layers use the same weights. With parts [Experts] it is the number of distinct"
        " sets of experts.",
    )
    pattern: Pattern = Field(
        "Cycle",
        description="pattern says which block a layer uses. Cycle: layer l uses block l mod blocks. Segment:"
        " adjacent layers use the same block.",
    )
    parts: Annotated[list[SharedPart], Since(4)] = Field(
        ["Blocks"],
        min_length=1,
        max_length=1,
        description="parts says which weights layers share. Blocks: all weights of the layer. Experts: only the"
        " routed experts; attention, norms, routers and shared experts belong to each layer.",
        json_schema_extra=SET,
    )

    @property
    def shares_experts_alone(self) -> bool:
        return self.parts == ["Experts"]


class Growth(ApiModel):
    """Beginning of the layers of a phase with more layers than the phase before."""

    pattern: GrowthPattern = Field(
        "Stack",
        description="pattern says from which layer of the phase before, which had K layers, layer i of the L layers"
        " starts. Stack: from layer i mod K, so the whole stack is repeated. Interleave: from layer floor(i * K /"
        " L), so copies of a layer are adjacent.",
    )
    initial: Literal["Copy", "ZeroOutput"] = Field(
        "Copy",
        description="initial says with which weights added layers start. (If several layers start from the same"
        " layer, the first of them is not an added layer.) Copy: with the weights of that layer; the function of"
        " the model changes. ZeroOutput: with these weights, but zeros in the matrices whose output is added to the"
        " residual stream, so the function of the model stays the same.",
    )


class GradientCorrelation(ApiModel):
    """Bound on the gradients of layers with a shared block: the phase ends once they diverge, so the layers should own
    blocks."""

    below: DecimalString = Field(
        description="below is a cosine, at most 1. Two adjacent layers of a block count as different if the cosine"
        " between their gradients is below it. A check is passed if more than half of these pairs differ. No value"
        " is known to choose the best moment. 0.5, which is known from BERT, is never reached in pre-norm models,"
        " because the gradients of adjacent layers agree closely."
    )
    every_steps: int = Field(
        100, ge=1, le=1_000_000_000, description="everySteps is the number of training steps between two checks."
    )
    checks: int = Field(
        3,
        ge=1,
        le=10_000,
        description="checks is the number of consecutive checks that must be passed before the phase ends.",
    )


class Until(ApiModel):
    """End of a phase: the first bound to be met."""

    step: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="step is the training step at which the phase ends. It is counted from the start of the job,"
        " over all phases, so it must rise from phase to phase. Omitted: the number of steps does not end the"
        " phase.",
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=2**62,
        description="tokens is the number of trained tokens at which the phase ends, after the step that reaches"
        " it. It is counted from the start of the job, over all phases. Omitted: the number of tokens does not end"
        " the phase.",
    )
    validation_loss: DecimalString | None = Field(
        None,
        description="validationLoss ends the phase early, at the first validation whose loss (nats per token) is at"
        " most this number. Omitted: no loss ends the phase.",
    )
    gradient_correlation: GradientCorrelation | None = Field(
        None,
        description="gradientCorrelation ends the phase early, when the gradients of layers that share a block have"
        " become different enough. Omitted: gradients are not compared.",
    )


class Batch(ApiModel):
    sequences: int = Field(
        ge=1,
        le=10_000_000,
        description="sequences is the number of sequences in the batch of a training step, summed over all ranks"
        " (the global batch size).",
    )
    micro_batches: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="microBatches is the number of equal parts into which the sequences of a step are cut. The"
        " parts pass through the model one after the other, and their gradients are summed. More parts need less"
        " memory for activations. It must divide sequences.",
    )


class Part(ApiModel):
    """A source's part of a mixture."""

    source: DnsLabel = Field(description="source is the name of an entry of data.sources.")
    weight: int = Field(
        ge=1,
        le=100_000,
        description="weight is the source's share of the phase's training samples, relative to the other weights of"
        " this mixture.",
    )


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
        description="pipeline is the number of pipeline ranks: ranks that compute different layers of the same"
        " sequences. It is at most the number of layers, and divides the phase's ranks; the quotient is the number"
        " of data-parallel ranks. AllRanks: all ranks of the phase.",
    )
    schedule: Schedule = Field(
        "Layered",
        description="schedule is the order of forward and backward passes. Layered: all micro-batches pass through"
        " one layer, then through the next, so an offloaded layer is fetched at most twice per step; layer l is on"
        " pipeline rank l mod pipeline. GPipe, 1F1B: the usual pipeline schedules, with adjacent layers on one"
        " rank. Interleaved: one micro-batch after the other, with layer l on rank l mod pipeline.",
    )
    state_sharding: StateSharding | None = Field(
        None,
        description="stateSharding says what is sharded over the data-parallel ranks. None: nothing, as in DDP."
        " Optimizer: master weights and moments (ZeRO-1). Gradients: gradients, too (ZeRO-2). Full: also the"
        " working weights (ZeRO-3, FSDP). Omitted: Full if there are at least two data-parallel ranks and"
        " optimizer.algorithm is AdamW; otherwise None.",
    )
    replicas: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="replicas is the number of groups into which the data-parallel ranks are divided, for instance"
        " one group per node (hybrid sharding, HSDP). Gradients are summed within each group first, then across"
        " groups; weights are gathered across groups first, then within each group. So most bytes stay within a"
        " node. It must divide the data-parallel ranks. More than 1 needs a stateSharding other than None.",
    )
    expert_ranks: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="expertRanks is the number of data-parallel ranks over which the experts of each layer are"
        " distributed (expert parallelism): two all-to-alls per layer send tokens to their experts and back. It"
        " must divide model.experts.count and the ranks of a replica. More than 1 needs model.norm.placement Pre.",
    )
    context_ranks: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="contextRanks is the number of data-parallel ranks over which each sequence is cut (context"
        " parallelism), for sequences whose activations are too large for one rank. Each rank computes two chunks of a"
        " sequence, and gathers the sequence's keys and values in each layer. It must divide the ranks of a replica,"
        " and twice the number must divide model.sequenceLength.",
    )
    tensor_ranks: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="tensorRanks is the number of data-parallel ranks over which the matrices of each layer are cut"
        " (tensor parallelism): attention by heads, the MLP by its hidden features, and embedding and head by the"
        " tokens of the vocabulary, if the number divides model.vocabularySize. These ranks also divide the tokens"
        " of each sequence among them. Each rank has one part of a layer's weights and state; in exchange, every"
        " layer gathers its tokens twice and sums its outputs twice. It must divide the ranks of a replica,"
        " model.attention.heads and model.feedForward.size; it must divide keyValueHeads or be a multiple of them."
        " Ranks of one node should share a layer.",
    )
    layout: Annotated[Chooser, Since(4)] = Field(
        "Given",
        description="layout says who chooses the layout. Given: this spec does, by the other fields here,"
        " batch.microBatches and activations.keep. Auto: before its first step, the phase takes the layout with the"
        " shortest predicted step that fits into memory, keeps it, and writes it to status.phases[].layout. With"
        " Auto, those fields must be omitted.",
    )
    hardware: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="hardware is the path, in the pods, of a hardware profile written by `pseudoreal"
        " measure-hardware`; layout Auto predicts step times with it. A relative path is relative to the trainer's"
        " working directory. Omitted: for phases with GPUs, Auto assumes GPUs with 80 GB; for others, a small CPU.",
    )


class Activations(ApiModel):
    """Storage of activations between forward and backward pass."""

    keep: Annotated[Keep, Since(4, known="Inputs|All")] = Field(
        "Inputs",
        description="keep says which activations are saved for the backward pass; the others are recomputed."
        " Inputs: only the input of each block (full activation checkpointing); least memory. Products: all except"
        " outputs of activation functions and of norms before a matrix product; cheap to recompute. All: all of"
        " them; most memory, nothing recomputed.",
    )
    home: Literal["Device", "Host"] = Field(
        "Device",
        description="home is the memory in which saved block inputs wait for the backward pass. Device: the GPU's."
        " Host: host memory, which frees device memory and costs copies; it needs keep Inputs.",
    )
    sequence_chunks: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=1_000,
        description="sequenceChunks is the number of chunks of the sequence in which layers without experts are"
        " computed, one chunk after the other, for long sequences: the graph of a layer then has the tensors of one"
        " chunk. The result is the same up to rounding. More than 1 needs keep Inputs, and compile.mode None.",
    )


class UnitHome(ApiModel):
    unit: str = Field(
        pattern=r"^(embedding|head|blocks\.(0|[1-9][0-9]*)(\.experts)?)$",
        max_length=24,
        description="unit is the unit's name: embedding, blocks.N, blocks.N.experts, or head (final norm and head)."
        " If embeddings are Tied, there is no head: its parameters belong to embedding. An entry for blocks.N also"
        " applies to its experts, unless blocks.N.experts has an entry.",
    )
    home: Home = Field(description="home is the memory in which the state of this unit lives between steps.")


class OffloadBudget(ApiModel):
    """Byte limits of a rank; state beyond the device limit goes to the host, and from there to disk."""

    device: Quantity | None = Field(
        None,
        description="device is the maximum number of bytes that a rank may use on its device. Omitted: no limit.",
    )
    host: Quantity | None = Field(
        None,
        description="host is the maximum number of bytes of state that a rank may keep in host memory; the rest"
        " goes to disk. Omitted: no limit.",
    )


class Offload(ApiModel):
    """Home of each unit's state (float32 master weights and moments) between its uses.

    Units are the embedding, each block, and the final norm with the head.
    """

    home: Home = Field(
        "Device",
        description="home is the home of all units without an entry in homes: the memory in which their master"
        " weights and moments live between steps. Device: nothing is offloaded. Host: host memory. Disk: the"
        " offload volume. It must be Device if budget is set.",
    )
    budget: OffloadBudget | None = Field(
        None,
        description="budget gives limits of bytes instead of homes: the plan then chooses the home of each unit and"
        " offloads as few bytes as possible. Omitted: home and homes say where units live.",
    )
    homes: list[UnitHome] = Field(
        [],
        max_length=1024,
        description="homes sets the home of single units. All other units have offload.home.",
        json_schema_extra=list_map("unit"),
    )
    window: int = Field(
        2,
        ge=1,
        le=10_000,
        description="window is the number of device slots for working copies of offloaded or fully sharded units."
        " With 2, one unit is fetched while another computes. A larger window fetches earlier and needs more device"
        " memory.",
    )
    expert_groups: Annotated[int, Since(4)] = Field(
        1,
        strict=True,
        ge=1,
        le=10_000,
        description="expertGroups is the number of groups into which a rank's experts of a layer are cut. Each"
        " group is a unit with its own home. Groups are fetched one after the other, and only if a token was routed"
        " to them, so a layer's experts need not fit on the device together. It must divide the experts of a rank."
        " More than 1 needs schedule Layered and model.norm.placement Pre.",
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source for state whose home is Disk, mounted at"
        f" {OFFLOAD_DIRECTORY}: for instance ephemeral, or a hostPath that user 10001 may write to. Use a fast local"
        " disk. Omitted: an emptyDir with a size limit of twice the state.",
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
        description="minWorkers is the smallest number of pods with which the phase may train; less than workers."
        " Only numbers of pods that the layout and the batch can be divided by are used.",
    )
    patience_seconds: int = Field(
        300,
        ge=1,
        le=2**31,
        description="patienceSeconds is the time for which pods may be unscheduled, or on a lost node, before the"
        " phase continues with fewer pods. After ten times as long, the operator tries more pods again.",
    )


class Compile(ApiModel):
    mode: Literal["None", "Blocks"] = Field(
        "None",
        description="mode says which code torch.compile compiles. It acts on GPUs only and needs an image with a C"
        " compiler and Python's headers. None: nothing. Blocks: each block; in a block with experts, only the"
        " attention.",
    )


class Resources(ApiModel):
    limits: dict[str, Quantity] = Field(
        {},
        max_length=MOST_ITEMS,
        description="limits are resource limits of the trainer container. GPUs are requested here, for instance"
        " nvidia.com/gpu: 8.",
    )
    requests: dict[str, Quantity] = Field(
        {},
        max_length=MOST_ITEMS,
        description="requests are resource requests of the trainer container. An omitted request equals its limit,"
        " as in Kubernetes.",
    )


class Phase(ApiModel):
    name: DnsLabel = Field(
        description="name is the name of the phase, unique within the job. Names of its pods and checkpoints"
        " contain it."
    )
    layers: int | None = Field(
        None,
        ge=1,
        le=1_000,
        description="layers is the number of layers in this phase: at most model.layers, and at least the layers of"
        " the phase before. The last phase always has all. If the first phase has fewer, its initial weights are"
        " scaled for its own depth. Omitted: model.layers.",
    )
    growth: Growth | None = Field(
        None,
        description="growth says how added layers start, if this phase has more layers than the phase before."
        " Growth writes a manifest and copies no weights. Omitted: pattern Stack, initial Copy.",
    )
    experts: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="experts is the number of experts per layer in this phase: at most model.experts.count, which"
        " the last phase always has. If the phase before had K experts, expert j starts as a copy of its expert j"
        " mod K (upcycling); delink.noise makes copies differ. Omitted: model.experts.count.",
    )
    sharing: Sharing | None = Field(
        None,
        description="sharing says which layers share weights in this phase (a pseudo phase). Omitted: every layer"
        " has its own weights (a real phase).",
    )
    until: Until = Field(
        description="until says when the phase ends: as soon as one of its bounds is reached. It needs step or"
        " tokens, so that the phase ends even if no loss is reached.",
        json_schema_extra={"minProperties": 1},
    )
    workers: int = Field(
        1,
        ge=1,
        le=10_000,
        description="workers is the number of pods of the phase. Its ranks are workers * processesPerWorker.",
    )
    elastic: Elastic | None = Field(
        None,
        description="elastic lets the phase train with fewer pods while the cluster has no room for all workers."
        " The batch stays the same. Omitted: the phase waits until all workers have room.",
    )
    spares: int = Field(
        0,
        ge=0,
        le=MOST_SPARES,
        description="spares is the number of additional pods that wait, with the resources of a worker (GPUs"
        " included), to replace a lost worker. The surviving workers then keep their pods. It needs at least 2"
        " workers. 0: after the loss of a worker, all pods are created again.",
    )
    processes_per_worker: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processesPerWorker is the number of ranks (training processes) in each pod. Omitted: one per"
        " GPU in resources.limits; without GPUs, one.",
    )
    batch: Batch = Field(description="batch is the global batch of a training step, and how it is cut.")
    mixture: Annotated[list[Part], Field(max_length=32)] = Field(
        [],
        description="mixture sets, for this phase, which share of the samples comes from each of data.sources."
        " Sources without an entry are not read. The default, an empty list, uses data.sources[].weight.",
        json_schema_extra=list_map("source"),
    )
    parallelism: Parallelism = Field(
        Parallelism(), description="parallelism says how layers, data and state are distributed over the phase's ranks."
    )
    activations: Activations = Field(
        Activations(),
        description="activations says which activations are saved for the backward pass, and in which memory.",
    )
    offload: Offload = Field(
        Offload(),
        description="offload says in which memory (device, host or disk) the state of each unit, master weights and"
        " moments, lives between steps. The default keeps everything on the device. Set it if the model does not"
        " fit there.",
    )
    compile: Compile = Field(
        Compile(),
        description="compile says which code is compiled by torch.compile before training. The default compiles"
        " nothing.",
    )
    resources: Resources = Field(
        Resources(),
        description="resources are the compute resources of the trainer container in each pod of the phase. They"
        " can be changed while the job is suspended.",
    )
    pod: Pod = Field(
        Pod(),
        description="pod overrides spec.pod for the pods of this phase: entries of env replace entries of the same"
        " name, template is merged over spec.pod.template, and each other field replaces the field of spec.pod.",
    )


class Delink(ApiModel):
    optimizer_state: OptimizerState = Field(
        "Scale",
        description="optimizerState says which optimizer moments layers get that shared a block, L of them. Scale:"
        " the first moment divided by L, the second by L squared. Measured: the first divided by L, the second by"
        " the measured ratio between the squared gradients of the block and of a layer, for each tensor (before a"
        " growth: like Scale). Copy: unchanged. Reset: zeros.",
    )
    noise: DecimalString = Field(
        "0",
        description="noise is the fraction, at most 1, of freshly drawn random weights that is mixed into matrices"
        " of copies at the start of a phase, so that copies differ. If several layers, blocks or experts start from"
        " the same one, the first of them gets no noise. 0: no noise.",
    )
    timeout_seconds: int = Field(
        1800,
        ge=1,
        le=2**31,
        description="timeoutSeconds is the maximum time, in seconds, from the end of a phase until the next one may"
        " start, restarts included. After it, onTimeout applies.",
    )
    on_timeout: Literal["Fail", "RollBack"] = Field(
        "Fail",
        description="onTimeout says what happens when timeoutSeconds are over. Fail: the job fails. RollBack: the"
        " earlier phase is trained again, from the newest checkpoint before its last one, and the delink is tried"
        " again; this counts as a restart.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps after each delink during which the learning rate rises"
        " linearly from 0 to the value of its schedule. 0: no new warm-up.",
    )
    measured_steps: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="measuredSteps is the number of last steps of a phase in which optimizerState Measured compares"
        " gradients. A phase that validationLoss or gradientCorrelation ends early trains this many steps more.",
    )
