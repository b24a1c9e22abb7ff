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

    factor: DecimalString = Field(description="factor is the number that the slowest frequencies are divided by.")
    original_sequence_length: int = Field(
        ge=1,
        le=10_000_000,
        description="originalSequenceLength is the length in tokens that the model was trained on before.",
    )
    low_frequency_factor: DecimalString = Field(
        "1",
        description="lowFrequencyFactor is the number of turns over the original length below which a frequency is"
        " divided by the whole factor.",
    )
    high_frequency_factor: DecimalString = Field(
        "4",
        description="highFrequencyFactor is the number of turns over the original length from which a frequency is"
        " kept.",
    )


class YarnScaling(ApiModel):
    """Frequencies as in YaRN (arXiv 2309.00071): slow ones are divided, fast ones kept, with a slope between. Attention
    is sharpened."""

    factor: DecimalString = Field(description="factor is the number that the slowest frequencies are divided by.")
    original_sequence_length: int = Field(
        ge=1,
        le=10_000_000,
        description="originalSequenceLength is the length in tokens that the model was trained on before.",
    )
    beta_fast: DecimalString = Field(
        "32",
        description="betaFast is the number of turns over the original length from which a frequency is kept.",
    )
    beta_slow: DecimalString = Field(
        "1",
        description="betaSlow is the number of turns over the original length below which a frequency is divided by"
        " the whole factor.",
    )
    attention_factor: DecimalString | None = Field(
        None,
        description="attentionFactor is the number that rotated queries and keys are multiplied by. Omitted: 0.1"
        " ln(factor) + 1.",
    )


class Scaling(ApiModel):
    type: Literal["Llama3", "Yarn"] = Field(description="type says which of the fields below is set.")
    llama3: Llama3Scaling | None = Field(
        None, description="llama3 scales as Llama 3.1 does. Omitted with every other type."
    )
    yarn: YarnScaling | None = Field(None, description="yarn scales as YaRN does. Omitted with every other type.")


class Rotary(ApiModel):
    """Rotary position embeddings: each pair of a head's features is rotated by an angle growing with the position."""

    base: Annotated[DecimalString, Since(4)] = Field(
        default_factory=lambda: "10000",
        description="base determines the frequencies: pair i of a head turns by base^(-2i / headSize) a token."
        " Omitted: as the family says, else 10000.",
    )
    scaling: Annotated[Scaling | None, Since(4)] = Field(
        None,
        description="scaling stretches the frequencies for longer sequences than a model was trained on. Omitted: they"
        " are as base says.",
    )


class Window(ApiModel):
    size: int = Field(
        ge=1,
        le=10_000_000,
        description="size is the number of tokens that a token attends to: itself and those before it.",
    )
    layers: Annotated[Layers, Field(min_length=1)] | None = Field(
        None,
        description="layers are the layers, counted from 0, that have the window; the others attend to all earlier"
        " tokens. It is no weight, so layers with and without it may share a block. Omitted: every layer has it.",
        json_schema_extra=SET,
    )


class Attention(ApiModel):
    heads: int = Field(
        ge=1,
        le=10_000,
        description="heads is the number of attention heads; without headSize, twice their number must divide"
        " hiddenSize.",
    )
    key_value_heads: Annotated[int | None, Since(4)] = Field(
        None,
        ge=1,
        le=10_000,
        description="keyValueHeads is the number of heads that have keys and values of their own (grouped-query"
        " attention); each serves heads / keyValueHeads neighbouring heads. Omitted: heads.",
    )
    head_size: Annotated[int | None, Since(4)] = Field(
        None,
        ge=2,
        le=100_000,
        description="headSize is the width of a head. Omitted: hiddenSize / heads.",
    )
    bias: Annotated[Bias, Since(4)] = Field(
        default_factory=lambda: "None",
        description="bias says which projections add a vector. None: none does. QueryKeyValue: those of queries, keys"
        " and values. All: the output's, too. Omitted: as the family says, else None.",
    )
    query_key_norm: Annotated[QueryKeyNorm, Since(4)] = Field(
        default_factory=lambda: "None",
        description="queryKeyNorm says what is normalised before positions turn queries and keys. None: nothing."
        " PerHead: each head by itself, with one weight for all. AllHeads: all heads as one vector. Omitted: as the"
        " family says, else None.",
    )
    window: Annotated[Window | None, Since(4)] = Field(
        None, description="window limits how far back tokens attend. Omitted: they attend to all earlier tokens."
    )
    rotary: Rotary = Field(Rotary(), description="rotary sets the rotary positions.")


class Norm(ApiModel):
    """RMS norms of the layers, and the final one."""

    placement: Annotated[Placement, Since(4)] = Field(
        default_factory=lambda: "Pre",
        description="placement says what is normalised. Pre: the input of attention and of the feed-forward part. Post:"
        " their output, before it is added. Both: input and output. Omitted: as the family says, else Pre.",
    )
    epsilon: Annotated[DecimalString, Since(4)] = Field(
        default_factory=lambda: "1e-6",
        description="epsilon is added to the mean square; 1e-37 at least. Omitted: as the family says, else 1e-6.",
    )


class FeedForward(ApiModel):
    size: int = Field(ge=1, le=1_000_000, description="size is the width between the matrices of the layer.")
    activation: Activation = Field(
        default_factory=lambda: "GELU",
        description="activation is the form of the feed-forward layer. GELU: two matrices. SwiGLU: three"
        " matrices, one of which gates another. Omitted: as the family says, else GELU.",
    )
    bias: Annotated[Literal["None", "All"], Since(4)] = Field(
        "None", description="bias says whether the matrices add a vector. None: none does. All: each does."
    )


class TopK(ApiModel):
    """Top-k routing: each token goes to the experts with the highest router scores. No expert is ever full."""

    per_token: int = Field(
        ge=1,
        le=10_000,
        description="perToken is the number of experts that each token goes to, at most count.",
    )
    size: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="size is the width between the matrices of an expert. Omitted: feedForward.size.",
    )
    score: Literal["Softmax", "Sigmoid"] = Field(
        "Softmax",
        description="score makes scores of the router's outputs. Softmax: over all experts. Sigmoid: of each by"
        " itself.",
    )
    weights: Literal["Renormalised", "Scores"] = Field(
        "Renormalised",
        description="weights says what the outputs of a token's experts are multiplied by. Renormalised: their"
        " scores, divided by the sum of them. Scores: their scores.",
    )
    scale: DecimalString = Field("1", description="scale multiplies these weights.")
    shared_experts: int = Field(
        0,
        ge=0,
        le=1_000,
        description="sharedExperts is the number of further experts of the same size that every token goes to, with"
        " the weight 1.",
    )
    bias_update_rate: Annotated[DecimalString | None, Since(4)] = Field(
        None,
        description="biasUpdateRate gives each expert a balancing bias, which is added to its score when experts are"
        " chosen and is in no weight. After each step the bias of an expert with fewer tokens than the mean grows by"
        " the rate, that of one with more shrinks by it, and the mean of all is taken off, as in DeepSeek-V3, which"
        " had 0.001. With 0 biases stay as they are. Omitted: there are none.",
    )
    auxiliary_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="auxiliaryLoss is the factor of a term that is added to the loss: for each layer and in the mean"
        " over the sequences, count times the sum over the experts of the expert's share of the sequence's choices and"
        " of its scores. It is 1, times the factor, where experts are in balance. The loss that is reported is without"
        " it.",
    )
    balance_over: Annotated[Literal["Sequence", "Step"], Since(4)] = Field(
        "Sequence",
        description="balanceOver says of which tokens auxiliaryLoss takes the shares. Sequence: of each sequence, as in"
        " DeepSeek-V3. Step: of all tokens of a step, so that single sequences may keep to few experts. Step needs all"
        " micro-batches to have chosen before the first goes back through a layer: schedule Layered or GPipe, or one"
        " micro-batch.",
    )
    router_z_loss: Annotated[DecimalString, Since(4)] = Field(
        "0",
        description="routerZLoss is the factor of a term that is added to the loss: for each layer the mean over the"
        " tokens of the square of the logarithm of the sum of the exponentials of the router's outputs, which keeps"
        " these small, as in ST-MoE, which had 0.001. The loss that is reported is without it; auxiliary_loss in the"
        " metrics is with it.",
    )


class MixtureOfExperts(ApiModel):
    type: Annotated[Literal["Prototypes", "TopK"], Since(4)] = Field(
        "Prototypes",
        description="type says how tokens find experts. Prototypes: as prototypes and capacityFactor say. TopK: as topK"
        " says.",
    )
    count: int = Field(
        ge=1,
        le=1_000_000,
        description="count is the number of experts of a layer, over all prototypes; each is a feed-forward"
        " layer as feedForward describes it, of another size if topK has one.",
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
        description="capacityFactor is the number of tokens of a sequence, or of a document where documents are masked,"
        " that an expert accepts, as a multiple of its even share of a sequence, rounded up. Further tokens pass the"
        " layer unchanged. With a factor of count / prototypes no expert is ever full.",
    )
    top_k: Annotated[TopK | None, Since(4)] = Field(
        None, description="topK is set with type TopK. Omitted with type Prototypes."
    )
    dense_layers: Annotated[Layers, Since(4)] = Field(
        [],
        description="denseLayers are the layers, counted from 0, that have a feed-forward part as feedForward describes"
        " it in place of experts. They share no block with other layers.",
        json_schema_extra=SET,
    )


class Model(ApiModel):
    """A decoder-only transformer."""

    family: Family | None = Field(
        None,
        description="family fills what is omitted of attention, norm and feedForward as the models of that name have"
        " it; sizes are always given. Omitted: it is filled as the fields themselves say.",
    )
    layers: int = Field(
        ge=1,
        le=10_000,
        description="layers is the number of transformer layers; phases before the last may have fewer.",
    )
    hidden_size: int = Field(ge=2, le=1_000_000, description="hiddenSize is the width of the residual stream.")
    sequence_length: int = Field(
        ge=2, le=10_000_000, description="sequenceLength is the number of tokens in a training sequence."
    )
    vocabulary_size: Annotated[int, Since(4)] = Field(
        256,
        ge=1,
        le=10_000_000,
        description="vocabularySize is the number of rows of the embedding and of the head: at least the number of"
        " tokens of the data, which is 256 where text is trained on as bytes. Rows beyond those take part in the loss"
        " like any other.",
    )
    embeddings: Annotated[Literal["Separate", "Tied"], Since(4)] = Field(
        "Separate",
        description="embeddings says whether the embedding and the head are one matrix. Separate: two matrices, in a"
        " unit each. Tied: one matrix, which is in one unit with the final norm, the unit embedding.",
    )
    initial_weights: Annotated[InitialWeights, Since(4)] = Field(
        "FanIn",
        description="initialWeights says how matrices begin, with L layers. FanIn: normal numbers with the standard"
        " deviation fan-in^-1/2, divided by (2 L)^1/2 in matrices whose output is added to the residual stream; 1 in an"
        " embedding of its own. HuggingFace: 0.02 everywhere. Megatron: 0.02, divided by (2 L)^1/2 in those matrices."
        " OLMo2: 0.02, with nothing beyond three standard deviations. TorchTitan: as Megatron, but 1 in an embedding"
        " of its own, hiddenSize^-1/2 in the head, with nothing beyond three standard deviations, and the matrix up"
        " of SwiGLU is divided, too.",
    )
    logit_soft_cap: Annotated[DecimalString | None, Since(4)] = Field(
        None,
        description="logitSoftCap bounds the logits: each becomes logitSoftCap * tanh(logit / logitSoftCap). Omitted:"
        " they are not bounded.",
    )
    attention: Attention = Field(description="attention describes the attention of each layer.")
    norm: Norm = Field(Norm(), description="norm describes the norms.")
    feed_forward: FeedForward = Field(description="feedForward describes the feed-forward part of each layer.")
    experts: MixtureOfExperts | None = Field(
        None,
        description="experts replace the feed-forward part of each layer. They belong to the unit of"
        " their block: they share its home and its shards and are not spread over ranks one by one."
        " Omitted: the model is dense.",
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
