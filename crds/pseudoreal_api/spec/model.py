"""The parts of the spec that say what is trained: model, data, optimizer, precision."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DecimalString
from pseudoreal_api.wire.contract import Since

ClippingMode = Literal["global", "perUnit", "none"]


class FeedForward(ApiModel):
    hidden: Annotated[int, Field(ge=1, le=1_000_000, description="Width of the feed-forward layer.")]
    activation: Literal["gelu", "swiglu"] = Field(
        "gelu", description="gelu: two matrices. swiglu: three matrices, the first two gated."
    )


class MixtureOfExperts(ApiModel):
    experts: int = Field(
        ge=1,
        le=1_000_000,
        description="Experts of a layer, over all prototypes; each is a feed-forward part as ffn says.",
    )
    prototypes: int = Field(
        1,
        ge=1,
        le=100_000,
        description="Groups of experts; each routes every token to one of its experts, and their outputs are summed.",
    )
    capacity_factor: DecimalString = Field(
        "1.25",
        description="Tokens of a sequence that an expert accepts, as a multiple of its even share, rounded up. The"
        " others pass by it unchanged. A factor of experts / prototypes: none is ever full.",
    )


class Model(ApiModel):
    """A decoder-only transformer."""

    layers: int = Field(ge=1, le=10_000, description="Transformer layers; every phase has this depth.")
    hidden: int = Field(ge=2, le=1_000_000, description="Width of the residual stream.")
    heads: int = Field(ge=1, le=10_000, description="Attention heads; must divide hidden.")
    sequence: int = Field(ge=2, le=10_000_000, description="Tokens in a training sequence.")
    ffn: FeedForward = Field(description="The feed-forward part of each layer.")
    moe: MixtureOfExperts | None = Field(
        None,
        description="Replaces the feed-forward part of each layer by experts. They belong to the unit of their block:"
        " its home and its shards are theirs, and they are not spread over ranks one by one. Omitted: dense.",
    )


class Validation(ApiModel):
    fraction: DecimalString = Field("0.02", description="Share of the corpus, at its end, kept for validation.")
    every_steps: int = Field(
        100, ge=1, le=1_000_000_000, description="Steps between two measurements of the validation loss."
    )
    sequences: int = Field(
        64, ge=1, le=1_000_000, description="Sequences measured at most, spread evenly over the validation text."
    )


class Data(ApiModel):
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="Folder of the corpus in the trainer pod. A relative path means the trainer image's working"
        " directory; under `pseudoreal run` it means the folder of the job file.",
    )
    pattern: str = Field(
        "**/*.txt", min_length=1, max_length=256, description="Files of the corpus below path, as a glob pattern."
    )
    tokenizer: Literal["bytes"] = Field("bytes", description="bytes: one token for each byte.")
    validation: Validation = Field(Validation(), description="How the validation loss is measured.")
    seed: int = Field(0, ge=0, le=2**31, description="Seed of the order of the samples and of the first weights.")
    volume: dict[str, Any] | None = Field(
        None,
        description="A Kubernetes volume source (for instance persistentVolumeClaim) mounted read-only at path,"
        " which is then absolute. Omitted: the corpus is part of the image.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Clipping(ApiModel):
    mode: ClippingMode = Field(
        "global",
        description="global: by the norm of the whole gradient; updates wait for all of it and overlap the next"
        " step's forward pass. perUnit: each unit by its own norm; updates overlap the backward pass. none: updates as"
        " with perUnit.",
    )
    norm: DecimalString = Field("1.0", description="Largest norm that a gradient (perUnit: a unit's gradient) keeps.")


class Optimizer(ApiModel):
    """AdamW, with one learning-rate schedule that runs through all phases."""

    learning_rate: DecimalString = Field("3e-4", description="Peak learning rate.")
    warmup_steps: int = Field(
        100, ge=0, le=1_000_000_000, description="Steps of linear warm-up, counted from the job's start."
    )
    schedule: Literal["cosine", "linear", "constant", "warmupStableDecay"] = Field(
        "cosine",
        description="After the warm-up, to the end of the last phase: cosine and linear decay; constant does not;"
        " warmupStableDecay stays at the peak and decays linearly at the end.",
    )
    decay_fraction: DecimalString = Field(
        "0.2", description="warmupStableDecay: share of the steps after the warm-up, at their end, that decay."
    )
    final_fraction: DecimalString = Field(
        "0.1", description="Learning rate at the end of the last phase, as a share of the peak."
    )
    weight_decay: DecimalString = Field("0.1", description="Decoupled weight decay of all matrices.")
    beta1: DecimalString = Field("0.9", description="Decay of the first moment.")
    beta2: DecimalString = Field("0.95", description="Decay of the second moment.")
    clipping: Clipping = Field(Clipping(), description="Bound on the gradient.")
    non_finite: Annotated[Literal["Fail", "Skip"], Since(2, binding=True)] = Field(
        "Fail",
        description="What follows when a loss or a gradient is infinite or no number. Fail: the attempt ends before"
        " such a value reaches a weight. Skip: the update is left out, of the whole model with clipping global or when"
        " the loss is not finite, otherwise of the units (embedding, blocks, head) whose gradients are not; training"
        " goes on with the next samples. After 10 such steps in a row the attempt ends.",
    )


class Precision(ApiModel):
    compute: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16",
        description="Type of the forward and backward pass. Master weights are float32"
        " (float64 with float64, which exists for exact comparisons).",
    )
