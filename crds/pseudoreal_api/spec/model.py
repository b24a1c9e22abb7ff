"""The parts of the spec that say what is trained: model, data, optimizer, precision."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DecimalString
from pseudoreal_api.wire.contract import Since

ClippingMode = Literal["global", "perUnit", "none"]


class FeedForward(ApiModel):
    hidden: Annotated[int, Field(ge=1, le=1_000_000, description="hidden is the width of the feed-forward layer.")]
    activation: Literal["gelu", "swiglu"] = Field(
        "gelu",
        description="activation is the form of the feed-forward layer. gelu: two matrices. swiglu: three"
        " matrices, one of which gates another.",
    )


class MixtureOfExperts(ApiModel):
    experts: int = Field(
        ge=1,
        le=1_000_000,
        description="experts is the number of experts of a layer, over all prototypes; each is a feed-forward"
        " layer as ffn describes it.",
    )
    prototypes: int = Field(
        1,
        ge=1,
        le=100_000,
        description="prototypes is the number of groups of experts. Each group routes every token to one of its"
        " experts, and the outputs of the groups are summed.",
    )
    capacity_factor: DecimalString = Field(
        "1.25",
        description="capacityFactor is the number of tokens of a sequence that an expert accepts, as a multiple"
        " of its even share, rounded up. Further tokens pass the layer unchanged. With a factor of"
        " experts / prototypes no expert is ever full.",
    )


class Model(ApiModel):
    """A decoder-only transformer."""

    layers: int = Field(
        ge=1, le=10_000, description="layers is the number of transformer layers; every phase has this depth."
    )
    hidden: int = Field(ge=2, le=1_000_000, description="hidden is the width of the residual stream.")
    heads: int = Field(ge=1, le=10_000, description="heads is the number of attention heads; it must divide hidden.")
    sequence: int = Field(ge=2, le=10_000_000, description="sequence is the number of tokens in a training sequence.")
    ffn: FeedForward = Field(description="ffn describes the feed-forward part of each layer.")
    moe: MixtureOfExperts | None = Field(
        None,
        description="moe replaces the feed-forward part of each layer by experts. They belong to the unit of"
        " their block: they share its home and its shards and are not spread over ranks one by one."
        " Omitted: the model is dense.",
    )


class Validation(ApiModel):
    fraction: DecimalString = Field(
        "0.02", description="fraction is the share of the corpus, at its end, that is kept for validation."
    )
    every_steps: int = Field(
        100,
        ge=1,
        le=1_000_000_000,
        description="everySteps is the number of training steps between two measurements of the validation loss.",
    )
    sequences: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="sequences is the largest number of sequences that are measured; they are spread evenly over"
        " the validation text.",
    )


class Data(ApiModel):
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="path is the folder of the corpus in the trainer pod. A relative path means the trainer"
        " image's working directory; under `pseudoreal run` it means the folder of the job file.",
    )
    pattern: str = Field(
        "**/*.txt",
        min_length=1,
        max_length=256,
        description="pattern is a glob pattern, relative to path, that the files of the corpus match.",
    )
    tokenizer: Literal["bytes"] = Field(
        "bytes", description="tokenizer turns text into tokens. bytes: one token for each byte."
    )
    validation: Validation = Field(Validation(), description="validation says how the validation loss is measured.")
    seed: int = Field(
        0, ge=0, le=2**31, description="seed determines the order of the samples and the initial weights."
    )
    volume: dict[str, Any] | None = Field(
        None,
        description="volume is a Kubernetes volume source (for instance persistentVolumeClaim) that is mounted"
        " read-only at path, which must then be absolute. Omitted: the corpus is part of the image.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Clipping(ApiModel):
    mode: ClippingMode = Field(
        "global",
        description="mode says which norm bounds the gradient. global: the norm of the whole gradient; updates"
        " wait for all of it and overlap the next step's forward pass. perUnit: each unit's own norm;"
        " updates overlap the backward pass. none: the gradient is not bounded; updates overlap the"
        " backward pass.",
    )
    norm: DecimalString = Field(
        "1.0",
        description="norm is the largest norm that a gradient (perUnit: a unit's gradient) may have; a larger one"
        " is scaled down to it.",
    )


class Optimizer(ApiModel):
    """AdamW, with one learning-rate schedule that runs through all phases."""

    learning_rate: DecimalString = Field("3e-4", description="learningRate is the peak learning rate.")
    warmup_steps: int = Field(
        100,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps of linear warm-up, counted from the job's start.",
    )
    schedule: Literal["cosine", "linear", "constant", "warmupStableDecay"] = Field(
        "cosine",
        description="schedule says how the learning rate changes from the end of the warm-up to the end of the"
        " last phase. cosine, linear: it decays along that curve. constant: it stays at the peak."
        " warmupStableDecay: it stays at the peak and decays linearly at the end.",
    )
    decay_fraction: DecimalString = Field(
        "0.2",
        description="decayFraction is the share of the steps after the warm-up, at their end, in which"
        " warmupStableDecay decays.",
    )
    final_fraction: DecimalString = Field(
        "0.1", description="finalFraction is the learning rate at the end of the last phase, as a share of the peak."
    )
    weight_decay: DecimalString = Field("0.1", description="weightDecay is the decoupled weight decay of all matrices.")
    beta1: DecimalString = Field("0.9", description="beta1 is the decay rate of the first moment.")
    beta2: DecimalString = Field("0.95", description="beta2 is the decay rate of the second moment.")
    clipping: Clipping = Field(Clipping(), description="clipping bounds the norm of the gradient.")
    non_finite: Annotated[Literal["Fail", "Skip"], Since(2, binding=True)] = Field(
        "Fail",
        description="nonFinite says what follows when a loss or a gradient is infinite or not a number. Fail: the"
        " attempt ends before such a value reaches a weight. Skip: the update is left out, that of the"
        " whole model with clipping global or when the loss is not finite, otherwise that of each unit"
        " (embedding, block, head) whose gradient is not; training goes on with the next samples."
        " After 10 such steps in a row the attempt ends.",
    )


class Precision(ApiModel):
    compute: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16",
        description="compute is the number format of the forward and backward pass. Master weights are float32"
        " (float64 with float64, which exists for exact comparisons).",
    )
