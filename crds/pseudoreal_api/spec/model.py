"""The model: a decoder-only transformer."""

from typing import Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DecimalString


class Attention(ApiModel):
    heads: int = Field(
        ge=1,
        le=10_000,
        description="heads is the number of attention heads; twice their number must divide hiddenSize.",
    )


class FeedForward(ApiModel):
    size: int = Field(ge=1, le=1_000_000, description="size is the width between the matrices of the layer.")
    activation: Literal["GELU", "SwiGLU"] = Field(
        "GELU",
        description="activation is the form of the feed-forward layer. GELU: two matrices. SwiGLU: three"
        " matrices, one of which gates another.",
    )


class MixtureOfExperts(ApiModel):
    count: int = Field(
        ge=1,
        le=1_000_000,
        description="count is the number of experts of a layer, over all prototypes; each is a feed-forward"
        " layer as feedForward describes it.",
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
        " count / prototypes no expert is ever full.",
    )


class Model(ApiModel):
    """A decoder-only transformer."""

    layers: int = Field(
        ge=1, le=10_000, description="layers is the number of transformer layers; every phase has this depth."
    )
    hidden_size: int = Field(ge=2, le=1_000_000, description="hiddenSize is the width of the residual stream.")
    sequence_length: int = Field(
        ge=2, le=10_000_000, description="sequenceLength is the number of tokens in a training sequence."
    )
    attention: Attention = Field(description="attention describes the attention of each layer.")
    feed_forward: FeedForward = Field(description="feedForward describes the feed-forward part of each layer.")
    experts: MixtureOfExperts | None = Field(
        None,
        description="experts replace the feed-forward part of each layer. They belong to the unit of"
        " their block: they share its home and its shards and are not spread over ranks one by one."
        " Omitted: the model is dense.",
    )
