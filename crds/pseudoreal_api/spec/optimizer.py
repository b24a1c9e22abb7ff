"""The optimizer, its learning-rate schedule, and the number formats."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import SET, ApiModel, DecimalString, list_map
from pseudoreal_api.wire.contract import Since

ClippingMode = Literal["Global", "PerUnit", "None"]
GradientFormat = Literal["Master", "BFloat16"]
MomentFormat = Literal["Master", "BFloat16", "Float8"]
ProductFormat = Literal["Compute", "Float8", "MXFP8"]
MOMENT_BLOCK = 16
"""Number of elements of a block of moments with the format Float8."""
PRODUCT_BLOCK = 32
"""Neighbouring numbers of a row that share a scale in MXFP8; the last block of a row may have fewer."""
TensorGroup = Literal["Embedding", "Head", "Attention", "FeedForward", "Experts", "Router", "Norms", "Biases"]


class Clipping(ApiModel):
    mode: ClippingMode = Field(
        "Global",
        description="mode says which gradient norm is limited. Global: the norm of the whole gradient, as in"
        " torch.nn.utils.clip_grad_norm_; updates start after the backward pass and overlap the next forward pass."
        " PerUnit: the norm of each unit by itself; updates overlap the backward pass. None: no limit; updates"
        " overlap the backward pass.",
    )
    norm: DecimalString = Field(
        "1.0",
        description="norm is the maximum gradient norm. A larger gradient (with PerUnit, a unit's gradient) is"
        " scaled down to this norm.",
    )
    updates: Annotated[Literal["AfterNorm", "Speculative"], Since(4)] = Field(
        "AfterNorm",
        description="updates says when updates start, with mode Global. AfterNorm: when the norm of the whole"
        " gradient is known. Speculative: on the host, as soon as the gradient of a unit is reduced; if the step is"
        " then clipped, its updates are undone and repeated. The results have the same bits. Speculative needs"
        " memory for a second copy of weights and moments.",
    )


class Multiplier(ApiModel):
    """What is different for some of the tensors."""

    tensors: TensorGroup = Field(
        description="tensors is the group of tensors to which the multiplier applies. Embedding, Head: this matrix;"
        " tied embeddings are one matrix, Embedding. Attention: the matrices of attention. FeedForward: the"
        " matrices of dense MLPs. Experts: the matrices of experts, shared ones included. Router: the routers."
        " Norms: the weights of norms. Biases: the bias vectors of projections, without balancing biases of"
        " experts."
    )
    learning_rate: DecimalString = Field(
        "1",
        description="learningRate is the number that multiplies the learning rate of these tensors. 0 freezes them.",
    )
    weight_decay: DecimalString = Field(
        "1",
        description="weightDecay is the number that multiplies the weight decay of these tensors, in addition to"
        " the multiplier learningRate. 0: they do not decay.",
    )


class Optimizer(ApiModel):
    """The update of weights with one learning-rate schedule through all phases, gradient clipping, and terms of the
    minimized loss."""

    algorithm: Annotated[Literal["AdamW", "Muon"], Since(4)] = Field(
        "AdamW",
        description="algorithm is the optimizer. AdamW: for all tensors. Muon: momentum orthogonalized by"
        " Newton-Schulz, at the scale of AdamW's updates (arXiv 2502.16982), for the matrices of attention, MLPs"
        " and experts; AdamW for all other tensors. Muon saves 4 bytes per parameter of these matrices. It needs"
        " stateSharding None, as it needs whole matrices, and moments Master.",
    )
    learning_rate: DecimalString = Field(
        "3e-4", description="learningRate is the peak learning rate: the value after the warm-up."
    )
    warmup_steps: int = Field(
        100,
        ge=0,
        le=1_000_000_000,
        description="warmupSteps is the number of steps, from the start of the job, in which the learning rate"
        " rises linearly from 0 to its peak.",
    )
    schedule: Literal["Cosine", "Linear", "Constant", "WarmupStableDecay"] = Field(
        "Cosine",
        description="schedule says how the learning rate changes after the warm-up, until the end of the last"
        " phase. Cosine, Linear: it falls along that curve to finalFraction of the peak. Constant: it stays at the"
        " peak. WarmupStableDecay: it stays at the peak, then falls linearly during the last steps (decayFraction).",
    )
    decay_fraction: DecimalString = Field(
        "0.2",
        description="decayFraction is the fraction of the steps after the warm-up in which the learning rate falls"
        " at the end, with schedule WarmupStableDecay.",
    )
    final_fraction: DecimalString = Field(
        "0.1", description="finalFraction is the learning rate at the end of the last phase, as a fraction of the peak."
    )
    weight_decay: DecimalString = Field(
        "0.1",
        description="weightDecay is the decoupled weight decay of all matrices except those of decayExclusions."
        " Biases and weights of norms never decay.",
    )
    decay_exclusions: Annotated[list[Literal["Embedding", "Head"]], Since(4)] = Field(
        [],
        max_length=2,
        description="decayExclusions are matrices without weight decay. The default excludes none. With tied"
        " embeddings, the one matrix is Embedding.",
        json_schema_extra=SET,
    )
    multipliers: Annotated[list[Multiplier], Field(max_length=8), Since(4)] = Field(
        [],
        description="multipliers give groups of tensors another learning rate or weight decay. The default gives"
        " all tensors the same.",
        json_schema_extra=list_map("tensors"),
    )
    beta1: DecimalString = Field(
        "0.9", description="beta1 is the exponential decay rate of the first moment of AdamW; less than 1."
    )
    beta2: DecimalString = Field(
        "0.95", description="beta2 is the exponential decay rate of the second moment of AdamW; less than 1."
    )
    epsilon: Annotated[DecimalString, Since(4)] = Field(
        "1e-8",
        description="epsilon is added to the square root of AdamW's second moment, by which the update is divided;"
        " at least 1e-37.",
    )
    moments: Annotated[MomentFormat, Since(4)] = Field(
        "Master",
        description="moments is the number format in which AdamW's moments are stored. Master: the format of master"
        " weights. BFloat16: saves 4 bytes per parameter. Float8: saves 5.9 bytes per parameter; 16 numbers have a"
        " common scale. BFloat16 and Float8 are rounded stochastically, with the same bits in every layout; updates"
        " take longer.",
    )
    clipping: Clipping = Field(Clipping(), description="clipping limits the norm of the gradient.")
    z_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="zLoss is the coefficient of the z-loss, which keeps logits small: the mean over tokens of"
        " logsumexp(logits)^2 is added to the training loss. 1e-5 is usual. The reported loss does not include it."
        " 0 turns it off.",
    )
    non_finite: Literal["Fail", "Skip"] = Field(
        "Fail",
        description="nonFinite says what happens if a loss or gradient is infinite or NaN. Fail: the execution ends"
        " before such a value reaches a weight. Skip: the update is skipped, and training continues with the next"
        " samples. If clipping is Global, or the loss is not finite, the whole update is skipped; otherwise, only"
        " units whose gradient is not finite. After 10 such steps in a row, the execution ends.",
    )
    idle_experts: Annotated[Literal["Update", "Skip"], Since(4)] = Field(
        "Update",
        description="idleExperts says how a step updates experts to which none of its tokens were routed. Update:"
        " with a zero gradient, like torch with dense gradients: moments decay, and weights change by the first"
        " moment and by weight decay. Skip: weights and moments stay as they are; bias correction still counts all"
        " steps. Skip needs clipping Global.",
    )


class Precision(ApiModel):
    compute: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16",
        description="compute is the number format of forward and backward passes. Master weights are float32; with"
        " float64, which serves exact comparisons, they are float64.",
    )
    gradients: Annotated[GradientFormat, Since(4)] = Field(
        "Master",
        description="gradients is the number format of summed gradients. Master: the format of master weights."
        " BFloat16: the sum is rounded to the nearest before norm and update, with the same bits in every layout."
        " BFloat16 halves the bytes of gradients on the way to host or disk, and there.",
    )
    products: Annotated[ProductFormat, Since(4)] = Field(
        "Compute",
        description="products is the number format of the operands of matrix products in blocks. Compute: the format"
        " compute. Float8: e4m3, with a power of two for each row. MXFP8: e4m3, with a power of two for each 32"
        " numbers of a row. On devices without such products, the rounded numbers are multiplied in the format compute."
        " Routed experts, routers, embedding, head, and gradients of weights are multiplied in the format compute.",
    )
    kernels: Annotated[Literal["Fastest", "Deterministic"], Since(4)] = Field(
        "Fastest",
        description="kernels says which GPU kernels are used. Fastest: the fastest; two runs may differ in"
        " rounding. Deterministic: kernels that give the same bits in each run with the same layout; slower.",
    )
