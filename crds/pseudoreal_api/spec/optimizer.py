"""The optimizer, its learning-rate schedule, and the number formats."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import SET, ApiModel, DecimalString, list_map
from pseudoreal_api.wire.contract import Since

ClippingMode = Literal["Global", "PerUnit", "None"]
GradientFormat = Literal["Master", "BFloat16"]
MomentFormat = Literal["Master", "BFloat16", "Float8"]
MOMENT_BLOCK = 16
"""Number of elements of a block of moments with the format Float8."""
TensorGroup = Literal["Embedding", "Head", "Attention", "FeedForward", "Experts", "Router", "Norms", "Biases"]


class Clipping(ApiModel):
    mode: ClippingMode = Field(
        "Global",
        description="mode says which norm bounds the gradient. Global: the norm of the whole gradient; updates"
        " wait for all of it and overlap the next step's forward pass. PerUnit: each unit's own norm;"
        " updates overlap the backward pass. None: no bound; updates overlap the backward pass.",
    )
    norm: DecimalString = Field(
        "1.0",
        description="norm is the largest norm that a gradient (PerUnit: a unit's gradient) may have; a larger one"
        " is scaled down to it.",
    )
    updates: Annotated[Literal["AfterNorm", "Speculative"], Since(4)] = Field(
        "AfterNorm",
        description="updates says when updates start with mode Global. AfterNorm: when the norm is known. Speculative:"
        " on the host, when a unit's gradient is reduced; a clipped step undoes and repeats"
        " them. Same bits; needs memory for a copy of weights and moments.",
    )


class Multiplier(ApiModel):
    """What is different for some of the tensors."""

    tensors: TensorGroup = Field(
        description="tensors names them. Embedding, Head: that matrix; where model.embeddings are Tied, the one matrix"
        " is the Embedding. Attention: the matrices of attention. FeedForward: those of feed-forward parts without"
        " experts. Experts: those of experts, shared ones included. Router: the router's. Norms: the weights of norms."
        " Biases: what projections add; a balancing bias is not one of them."
    )
    learning_rate: DecimalString = Field(
        "1",
        description="learningRate multiplies their learning rate; 0 keeps them as they are.",
    )
    weight_decay: DecimalString = Field(
        "1",
        description="weightDecay multiplies their weight decay, beside learningRate.",
    )


class Optimizer(ApiModel):
    """The update of weights with one learning-rate schedule through all phases, gradient clipping, and terms of the
    minimized loss."""

    algorithm: Annotated[Literal["AdamW", "Muon"], Since(4)] = Field(
        "AdamW",
        description="algorithm of the update. Muon: for the matrices of attention, of feed-forward parts and of each"
        " expert, the momentum with all singular values near 1, at the scale of AdamW's updates (arXiv 2502.16982);"
        " AdamW for all other tensors. Muon needs whole matrices, so no stateSharding, and moments Master; 4 bytes a"
        " parameter of these matrices less.",
    )
    learning_rate: DecimalString = Field("3e-4", description="learningRate is the peak learning rate.")
    warmup_steps: int = Field(
        100,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps of linear warm-up, counted from the job's start.",
    )
    schedule: Literal["Cosine", "Linear", "Constant", "WarmupStableDecay"] = Field(
        "Cosine",
        description="schedule says how the learning rate changes from the end of the warm-up to the end of the"
        " last phase. Cosine, Linear: it decays along that curve. Constant: it stays at the peak."
        " WarmupStableDecay: it stays at the peak and decays linearly at the end.",
    )
    decay_fraction: DecimalString = Field(
        "0.2",
        description="decayFraction is the share of the steps after the warm-up, at their end, in which"
        " WarmupStableDecay decays.",
    )
    final_fraction: DecimalString = Field(
        "0.1", description="finalFraction is the learning rate at the end of the last phase, as a share of the peak."
    )
    weight_decay: DecimalString = Field(
        "0.1",
        description="weightDecay is the decoupled weight decay of all matrices but those of decayExclusions. Biases and"
        " the weights of norms do not decay.",
    )
    decay_exclusions: Annotated[list[Literal["Embedding", "Head"]], Since(4)] = Field(
        [],
        max_length=2,
        description="decayExclusions are matrices that do not decay. Where model.embeddings are Tied, the one matrix is"
        " the Embedding.",
        json_schema_extra=SET,
    )
    multipliers: Annotated[list[Multiplier], Field(max_length=8), Since(4)] = Field(
        [],
        description="multipliers give groups of tensors another learning rate or weight decay.",
        json_schema_extra=list_map("tensors"),
    )
    beta1: DecimalString = Field("0.9", description="beta1 is the decay rate of AdamW's first moment.")
    beta2: DecimalString = Field("0.95", description="beta2 is the decay rate of AdamW's second moment.")
    epsilon: Annotated[DecimalString, Since(4)] = Field(
        "1e-8",
        description="epsilon is added to the root of the second moment, which divides the first; 1e-37 at least.",
    )
    moments: Annotated[MomentFormat, Since(4)] = Field(
        "Master",
        description="moments is their format. Master: that of master weights. BFloat16, Float8: rounded stochastically,"
        " alike in every layout; slower updates. BFloat16: 4 bytes a parameter less. Float8: 5.9 less, in blocks of 16"
        " 8-bit floats with a common scale.",
    )
    clipping: Clipping = Field(Clipping(), description="clipping bounds the norm of the gradient.")
    z_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="zLoss is the factor of a term of the loss: the mean over the tokens of the square of"
        " the logarithm of the softmax's denominator. It keeps logits small; 1e-5 is usual. The reported"
        " loss is without it.",
    )
    non_finite: Literal["Fail", "Skip"] = Field(
        "Fail",
        description="nonFinite says what follows when a loss or a gradient is infinite or not a number. Fail: the"
        " execution ends before such a value reaches a weight. Skip: the update is left out, of the whole"
        " model with clipping Global or if the loss is not finite, else of each unit (embedding, block, head) whose"
        " gradient is not; training goes on with the next samples."
        " After 10 such steps in a row the execution ends.",
    )
    idle_experts: Annotated[Literal["Update", "Skip"], Since(4)] = Field(
        "Update",
        description="idleExperts says what happens in a step to experts that none of its tokens chose. Update: they are"
        " updated with a gradient of zero: their moments shrink, and the weights go on by the first moment and decay."
        " Skip: their weights and moments stay as they are, and the bias correction counts all steps of the job."
        " Needs clipping Global.",
    )


class Precision(ApiModel):
    compute: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16",
        description="compute is the number format of the forward and backward pass. Master weights are float32"
        " (float64 with float64, which exists for exact comparisons).",
    )
    gradients: Annotated[GradientFormat, Since(4)] = Field(
        "Master",
        description="gradients is the format of summed gradients. Master: that of master weights. BFloat16: rounded to"
        " the nearest, before the norm and the update, alike in every layout; half of the bytes from the device to the"
        " home, and in the home if that is not the device.",
    )
    kernels: Annotated[Literal["Fastest", "Deterministic"], Since(4)] = Field(
        "Fastest", description="kernels of GPUs. Deterministic: with the same bits in each run of a layout; slower."
    )
