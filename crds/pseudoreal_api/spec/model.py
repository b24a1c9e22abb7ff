"""The model: a decoder-only transformer."""

from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from pseudoreal_api.base import SET, ApiModel, DecimalString
from pseudoreal_api.wire.contract import Since

Family = Literal["Llama3", "Qwen2", "Qwen3", "Mistral", "OLMo2", "Mixtral", "Qwen3MoE"]
Bias = Literal["None", "QueryKeyValue", "All"]
QueryKeyNorm = Literal["None", "PerHead", "AllHeads"]
Placement = Literal["Pre", "Post", "Both"]
Activation = Literal["GELU", "SwiGLU"]
InitialWeights = Literal["FanIn", "HuggingFace", "Megatron", "OLMo2", "TorchTitan"]

Layers = Annotated[list[Annotated[int, Field(ge=0, le=9_999)]], Field(max_length=256)]
"""Indices of some of the model's layers, counted from 0."""


class Llama3Scaling(ApiModel):
    """Frequencies as in Llama 3.1: slow ones are divided, fast ones kept, with a slope between."""

    factor: DecimalString = Field(
        description="factor is the number by which the lowest rotary frequencies are divided: the longest sequence"
        " that the model is to handle, divided by originalSequenceLength. Llama 3.1 has 8."
    )
    original_sequence_length: int = Field(
        ge=1,
        le=10_000_000,
        description="originalSequenceLength is the sequence length, in tokens, of the training before the scaling."
        " Llama 3.1 has 8192.",
    )
    low_frequency_factor: DecimalString = Field(
        "1",
        description="lowFrequencyFactor divides originalSequenceLength to a wavelength, in tokens. Frequencies with"
        " a longer wavelength are divided by the whole factor. Between this wavelength and the one of"
        " highFrequencyFactor, the divisor is interpolated.",
    )
    high_frequency_factor: DecimalString = Field(
        "4",
        description="highFrequencyFactor divides originalSequenceLength to a wavelength, in tokens. Frequencies"
        " with a shorter wavelength stay as they are.",
    )


class YarnScaling(ApiModel):
    """Frequencies as in YaRN (arXiv 2309.00071): slow ones are divided, fast ones kept, with a slope between. Attention
    is sharpened."""

    factor: DecimalString = Field(
        description="factor is the number by which the lowest rotary frequencies are divided: the longest sequence"
        " that the model is to handle, divided by originalSequenceLength."
    )
    original_sequence_length: int = Field(
        ge=1,
        le=10_000_000,
        description="originalSequenceLength is the sequence length, in tokens, of the training before the scaling.",
    )
    beta_fast: DecimalString = Field(
        "32",
        description="betaFast is a number of rotations within originalSequenceLength tokens. Frequencies with at"
        " least this many rotations stay as they are.",
    )
    beta_slow: DecimalString = Field(
        "1",
        description="betaSlow is a number of rotations within originalSequenceLength tokens. Frequencies with fewer"
        " rotations are divided by the whole factor. Between betaSlow and betaFast, the divisor is interpolated.",
    )
    attention_factor: DecimalString | None = Field(
        None,
        description="attentionFactor is the number by which rotated queries and keys are multiplied. Omitted: 0.1"
        " ln(factor) + 1, as in the paper.",
    )


class Scaling(ApiModel):
    type: Literal["Llama3", "Yarn"] = Field(
        description="type says which formula changes the rotary frequencies, and so which of the fields below must"
        " be set."
    )
    llama3: Llama3Scaling | None = Field(
        None,
        description="llama3 has the parameters of the formula of Llama 3.1. Set it with type Llama3. Omitted with"
        " every other type.",
    )
    yarn: YarnScaling | None = Field(
        None,
        description="yarn has the parameters of YaRN (arXiv 2309.00071). Set it with type Yarn. Omitted with every"
        " other type.",
    )


class Rotary(ApiModel):
    """Rotary position embeddings: each pair of a head's features is rotated by an angle growing with the position."""

    base: Annotated[DecimalString, Since(4)] = Field(
        default_factory=lambda: "10000",
        description="base is the base of the rotary frequencies (theta): pair i of a head is rotated by base^(-2i /"
        " headSize) radians per token. A larger base suits longer sequences. Omitted: the value of model.family;"
        " without a family, 10000.",
    )
    scaling: Annotated[Scaling | None, Since(4)] = Field(
        None,
        description="scaling lowers rotary frequencies for sequences that are longer than those of an earlier"
        " training. Set it to continue from weights whose config.json has rope_scaling. Omitted: frequencies follow"
        " from base alone.",
    )


class Window(ApiModel):
    size: int = Field(
        ge=1,
        le=10_000_000,
        description="size is the number of tokens to which each token attends: itself and the size - 1 tokens"
        " before it.",
    )
    layers: Annotated[Layers, Field(min_length=1)] | None = Field(
        None,
        description="layers are the indices, counted from 0, of the layers with the window. The other layers attend"
        " to all earlier tokens. A window has no weights, so layers with and without it may share a block. Omitted:"
        " every layer has the window.",
        json_schema_extra=SET,
    )


class Attention(ApiModel):
    heads: int = Field(
        ge=1,
        le=10_000,
        description="heads is the number of attention heads. If headSize is omitted, hiddenSize must be a multiple"
        " of 2 * heads.",
    )
    key_value_heads: Annotated[int | None, Since(4)] = Field(
        None,
        ge=1,
        le=10_000,
        description="keyValueHeads is the number of key and value heads (grouped-query attention; 1 is multi-query"
        " attention). heads / keyValueHeads adjacent query heads use the same keys and values. Omitted: heads, so"
        " every query head has its own.",
    )
    head_size: Annotated[int | None, Since(4)] = Field(
        None,
        ge=2,
        le=100_000,
        description="headSize is the number of features of a head. Omitted: hiddenSize / heads.",
    )
    bias: Annotated[Bias, Since(4)] = Field(
        default_factory=lambda: "None",
        description="bias says which projections of attention add a bias vector. None: no projection."
        " QueryKeyValue: the projections of queries, keys and values. All: these and the output projection."
        " Omitted: the value of model.family; without a family, None.",
    )
    query_key_norm: Annotated[QueryKeyNorm, Since(4)] = Field(
        default_factory=lambda: "None",
        description="queryKeyNorm says whether queries and keys pass an RMS norm before the rotary embedding. None:"
        " no norm. PerHead: each head is normalized by itself, and all heads have the same weights. AllHeads: the"
        " concatenation of all heads is normalized as one vector. Omitted: the value of model.family; without a"
        " family, None.",
    )
    window: Annotated[Window | None, Since(4)] = Field(
        None,
        description="window is a sliding window: it limits the earlier tokens to which a token attends. Omitted:"
        " each token attends to itself and to all earlier tokens.",
    )
    rotary: Rotary = Field(
        Rotary(),
        description="rotary configures the rotary position embedding (RoPE). Its defaults suit models that are"
        " trained from scratch.",
    )


class Norm(ApiModel):
    """RMS norms of the layers, and the final one."""

    placement: Annotated[Placement, Since(4)] = Field(
        default_factory=lambda: "Pre",
        description="placement says where a layer has RMS norms. Pre: on the input of attention and of the MLP."
        " Post: on their output, before it is added to the residual stream. Both: on input and output. Omitted: the"
        " value of model.family; without a family, Pre.",
    )
    epsilon: Annotated[DecimalString, Since(4)] = Field(
        default_factory=lambda: "1e-6",
        description="epsilon is the number added to the mean square, under the square root of an RMS norm; it is at"
        " least 1e-37. Omitted: the value of model.family; without a family, 1e-6.",
    )


class FeedForward(ApiModel):
    size: int = Field(
        ge=1, le=1_000_000, description="size is the intermediate size of the MLP: the number of its hidden features."
    )
    activation: Activation = Field(
        default_factory=lambda: "GELU",
        description="activation is the form of the MLP. GELU: two matrices, up and down, with GELU between them."
        " SwiGLU: three matrices, up, gate and down; SiLU(gate) multiplies up. Omitted: the value of model.family;"
        " without a family, GELU.",
    )
    bias: Annotated[Literal["None", "All"], Since(4)] = Field(
        "None",
        description="bias says whether the matrices of the MLP add a bias vector. None: no matrix does. All: each"
        " matrix does.",
    )


class TopK(ApiModel):
    """Top-k routing: each token goes to the experts with the highest router scores. No expert is ever full."""

    per_token: int = Field(
        ge=1,
        le=10_000,
        description="perToken is the number of experts that compute each token (k of top-k); at most count.",
    )
    size: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="size is the intermediate size of the MLP of one expert. Omitted: feedForward.size.",
    )
    score: Literal["Softmax", "Sigmoid"] = Field(
        "Softmax",
        description="score says how the router's outputs (logits) become scores of experts. Softmax: softmax over"
        " all experts. Sigmoid: sigmoid of each logit, as in DeepSeek-V3.",
    )
    weights: Literal["Renormalised", "Scores"] = Field(
        "Renormalised",
        description="weights says by which numbers the outputs of a token's chosen experts are multiplied before"
        " they are summed. Renormalised: by their scores, divided by the sum of these scores. Scores: by their"
        " scores.",
    )
    scale: DecimalString = Field(
        "1",
        description="scale is a constant that multiplies these weights; DeepSeek-V3 has 2.5. The default 1 leaves"
        " them as they are.",
    )
    shared_experts: int = Field(
        0,
        ge=0,
        le=1_000,
        description="sharedExperts is the number of additional experts, of the same size, that compute every token"
        " with weight 1. The router does not choose them, and count does not include them.",
    )
    bias_update_rate: Annotated[DecimalString | None, Since(4)] = Field(
        None,
        description="biasUpdateRate turns on balancing without a loss term, as in DeepSeek-V3, which has 0.001."
        " Each expert gets a balancing bias. The bias is added to the expert's score only when experts are chosen,"
        " not in the weights of their outputs. After each step, the bias of an expert with fewer tokens than the"
        " mean rises by this rate, and the bias of an expert with more tokens falls by it; then the mean of these"
        " changes is subtracted from every bias. 0 freezes the biases. Omitted: experts have no balancing bias.",
    )
    auxiliary_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="auxiliaryLoss is the coefficient of a balance loss that is added to the training loss. The"
        " balance loss of a layer and a sequence is count * sum over experts e of f_e * P_e, where f_e is the"
        " fraction of the sequence's routing choices that went to e, and P_e is the mean score of e, with the"
        " scores of each token divided by their sum. It is averaged over sequences and is 1 at perfect balance. The"
        " reported loss does not include it. 0 turns it off.",
    )
    balance_over: Annotated[Literal["Sequence", "Step"], Since(4)] = Field(
        "Sequence",
        description="balanceOver says over which tokens auxiliaryLoss takes its fractions. Sequence: over each"
        " sequence, as in DeepSeek-V3. Step: over all tokens of a step, so a single sequence may use few experts."
        " Step needs the routing choices of all micro-batches before the first backward pass of a layer: use"
        " schedule Layered or GPipe, or one micro-batch.",
    )
    router_z_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="routerZLoss is the coefficient of the router z-loss (ST-MoE has 0.001), which keeps router"
        " logits small: for each layer, the mean over tokens of logsumexp(logits)^2 is added to the training loss."
        " The reported loss does not include it; auxiliary_loss in metrics.jsonl does. 0 turns it off.",
    )


class MixtureOfExperts(ApiModel):
    type: Annotated[Literal["Prototypes", "TopK"], Since(4)] = Field(
        "Prototypes",
        description="type says how tokens are routed to experts. Prototypes: experts form groups, and each group"
        " routes every token to one of its experts, as in M6; set prototypes and capacityFactor. TopK: each token"
        " goes to the experts with the highest scores, as in Mixtral and DeepSeek-V3; set topK.",
    )
    count: int = Field(
        ge=1,
        le=1_000_000,
        description="count is the number of experts in a layer, over all prototypes. Each expert is an MLP of the"
        " form of feedForward. topK.size may give experts another intermediate size than feedForward.size.",
    )
    prototypes: int = Field(
        1,
        ge=1,
        le=100_000,
        description="prototypes is the number of groups of experts, with type Prototypes. Each group routes every"
        " token to one of its experts, and the outputs of all groups are summed.",
    )
    capacity_factor: DecimalString = Field(
        "1.25",
        description="capacityFactor limits the tokens of one sequence that an expert accepts, with type Prototypes:"
        " at most capacityFactor * sequenceLength * prototypes / count tokens, rounded up. If"
        " spec.data.documents.masking separates documents, the limit applies to each document. The expert does not"
        " compute further tokens. With count / prototypes, no token is ever refused.",
    )
    top_k: Annotated[TopK | None, Since(4)] = Field(
        None, description="topK configures top-k routing. Set it with type TopK. Omitted with type Prototypes."
    )
    dense_layers: Annotated[Layers, Since(4)] = Field(
        [],
        description="denseLayers are the indices, counted from 0, of layers that have a dense MLP, as feedForward"
        " describes it, in place of experts. They share no block with layers that have experts. The default is that"
        " every layer has experts.",
        json_schema_extra=SET,
    )


class Model(ApiModel):
    """A decoder-only transformer."""

    family: Family | None = Field(
        None,
        description="family is a model family whose published architecture fills the omitted fields of attention,"
        " norm and feedForward. Set it to train or continue such a model. Sizes are never filled. Omitted: omitted"
        " fields have the defaults that their descriptions name.",
    )
    layers: int = Field(
        ge=1,
        le=10_000,
        description="layers is the number of transformer layers of the final model. Phases before the last one may"
        " train fewer (phases[].layers).",
    )
    hidden_size: int = Field(
        ge=2,
        le=1_000_000,
        description="hiddenSize is the number of features of a token in the residual stream (d_model).",
    )
    sequence_length: int = Field(
        ge=2, le=10_000_000, description="sequenceLength is the number of tokens in a training sequence."
    )
    vocabulary_size: Annotated[int, Since(4)] = Field(
        256,
        ge=1,
        le=10_000_000,
        description="vocabularySize is the number of rows of the embedding and of the head: at least the number of"
        " tokens of the tokenizer. The default 256 fits text that is trained as bytes. Rows beyond the tokenizer's"
        " tokens take part in the softmax.",
    )
    embeddings: Annotated[Literal["Separate", "Tied"], Since(4)] = Field(
        "Separate",
        description="embeddings says whether the embedding and the head have separate weights. Separate: two"
        " matrices, in two units. Tied: one matrix; it and the final norm are the unit embedding, and there is no"
        " unit head.",
    )
    initial_weights: Annotated[InitialWeights, Since(4)] = Field(
        "FanIn",
        description="initialWeights is the distribution of initial weights in a model with L layers. All are normal"
        " with mean 0; output matrices are those whose output is added to the residual stream. FanIn: standard"
        " deviation fan-in^-1/2, divided by (2 L)^1/2 in output matrices, and 1 in an untied embedding."
        " HuggingFace: 0.02 in every matrix. Megatron: 0.02, divided by (2 L)^1/2 in output matrices. OLMo2: 0.02,"
        " truncated at three standard deviations. TorchTitan: as Megatron, but truncated at three standard"
        " deviations, with 1 in an untied embedding and hiddenSize^-1/2 in the head, and with the matrix up of"
        " SwiGLU divided like output matrices.",
    )
    logit_soft_cap: Annotated[DecimalString | None, Since(4)] = Field(
        None,
        description="logitSoftCap bounds the logits of the head, as in Gemma 2: each logit x becomes logitSoftCap *"
        " tanh(x / logitSoftCap). Omitted: logits are not bounded.",
    )
    attention: Attention = Field(description="attention describes the causal self-attention of every layer.")
    norm: Norm = Field(
        Norm(), description="norm describes the RMS norms: the norms of the layers, and the final norm before the head."
    )
    feed_forward: FeedForward = Field(
        description="feedForward describes the MLP (feed-forward part) of every layer, or each expert's, if the"
        " model has experts."
    )
    experts: MixtureOfExperts | None = Field(
        None,
        description="experts makes the model a mixture of experts: each layer has a router and experts in place of"
        " its MLP. The experts of a layer are a unit of their own, blocks.N.experts, with a home and shards of its"
        " own. parallelism.expertRanks spreads them over ranks. Omitted: the model is dense.",
    )

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """Fill omitted fields with the family's values: a parsed model contains every value."""
        if not isinstance(given, dict) or given.get("family") not in FAMILIES:
            return given
        return _laid_over(FAMILIES[given["family"]], given)

    @property
    def head_size(self) -> int:
        return self.attention.head_size or self.hidden_size // self.attention.heads

    @property
    def query_size(self) -> int:
        """Width of all query heads of a token together."""
        return self.attention.heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of all key heads of a token together, equal to the width of all value heads."""
        return (self.attention.key_value_heads or self.attention.heads) * self.head_size

    @property
    def expert(self) -> FeedForward:
        """Shape of each expert."""
        return self.feed_forward.model_copy(update={"size": self._expert_size})

    @property
    def shared_expert(self) -> FeedForward | None:
        """Shape of all shared experts, computed as one MLP with their joint width; None if there are none."""
        count = self.top_k.shared_experts if self.top_k else 0
        return self.feed_forward.model_copy(update={"size": count * self._expert_size}) if count else None

    @property
    def expert_capacity(self) -> int:
        """Number of tokens of a sequence accepted by an expert of a prototype: `capacityFactor` times its even share,
        rounded up.

        The capacity for a training sequence also applies to shorter sequences, so that a prefix is computed exactly as
        in the whole sequence.
        """
        assert self.experts is not None, "callers ask for the capacity only of a model with experts"
        share = Fraction(self.sequence_length * self.experts.prototypes, self.experts.count)
        return ceil(Fraction(self.experts.capacity_factor) * share)

    @property
    def _expert_size(self) -> int:
        return self.top_k.size if self.top_k and self.top_k.size else self.feed_forward.size

    @property
    def top_k(self) -> TopK | None:
        """Top-k routing parameters; None for other routing, or without experts."""
        return self.experts.top_k if self.experts else None

    @property
    def balances_steps(self) -> bool:
        """Whether an auxiliary loss depends on all routing decisions of a step."""
        return self.top_k is not None and self.top_k.balance_over == "Step"

    @property
    def layers_with_experts(self) -> int:
        return self.layers - len(set(self.experts.dense_layers)) if self.experts else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def window_of(self, layer: int) -> int | None:
        """Return the attention window of the layer in tokens; None if each token attends to all earlier tokens."""
        window = self.attention.window
        return None if window is None or (window.layers and layer not in window.layers) else window.size


_QWEN3 = {
    "attention": {"queryKeyNorm": "PerHead", "rotary": {"base": "1000000"}},
    "norm": {"epsilon": "1e-6"},
    "feedForward": {"activation": "SwiGLU"},
}
_MISTRAL = {
    "attention": {"rotary": {"base": "1000000"}},
    "norm": {"epsilon": "1e-5"},
    "feedForward": {"activation": "SwiGLU"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama3": {
        "attention": {"rotary": {"base": "500000"}},
        "norm": {"epsilon": "1e-5"},
        "feedForward": {"activation": "SwiGLU"},
    },
    "Qwen2": {
        "attention": {"bias": "QueryKeyValue", "rotary": {"base": "1000000"}},
        "norm": {"epsilon": "1e-6"},
        "feedForward": {"activation": "SwiGLU"},
    },
    "Qwen3": _QWEN3,
    "Mistral": _MISTRAL,
    "OLMo2": {
        "attention": {"queryKeyNorm": "AllHeads", "rotary": {"base": "500000"}},
        "norm": {"placement": "Post", "epsilon": "1e-6"},
        "feedForward": {"activation": "SwiGLU"},
    },
    "Mixtral": _MISTRAL,
    "Qwen3MoE": _QWEN3,
}
"""Defaults of each model family: the values common to all its published models, and the newest value where models
differ. Mistral and Mixtral have no window here (Mistral 7B had one until v0.2)."""


def _laid_over(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return `given`, with omitted fields taken from `base`, recursively."""
    named = {to_camel(name): value for name, value in given.items()}
    nested = {
        n: _laid_over(base[n], named[n]) for n in base if isinstance(base[n], dict) and isinstance(named.get(n), dict)
    }
    return base | named | nested
