"""Cases for tests of the engine: a small model under many layouts."""

import json
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from typing import Any

from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Clipping, Multiplier
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from pseudoreal_api.spec.phase import Home, Keep, Sharing
from pseudoreal_trainer.model.sampling import Sampling
from pseudoreal_trainer.plan.layout import Layout

from tests.support.depth import DEPTH

STEPS = DEPTH.of(3, 5)
"""Steps of a case: the second has moments of the first, and the third reads what the second wrote."""
SEED = 3
"""Seed of the first weights, and of the bits that round moments."""
SEQUENCES_OF_A_MICRO_BATCH = 4
RATE = 1e-2
PROMPTS = [[5], [7, 0, 200], [9, 9, 4, 8, 2, 6, 1, 3]]
"""Prompts with fewer and with more tokens than a sequence; the second one contains the end of a document."""
WRITTEN = 5
"""Tokens that are written after each prompt."""
SAMPLING = Sampling(200, temperature=1.0, seed=11)
END = 0
"""Token that ends documents."""


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "Llama3": {
        "family": "Llama3",
        "attention": {
            "heads": 4,
            "keyValueHeads": 2,
            "headSize": 6,
            "rotary": {"scaling": {"type": "Llama3", "llama3": {"factor": "2", "originalSequenceLength": 12}}},
        },
        "feedForward": {"size": 24},
    },
    "Qwen2": {
        "family": "Qwen2",
        "attention": {"heads": 2, "keyValueHeads": 1, "window": {"size": 3, "layers": [0, 3]}},
        "feedForward": {"size": 24},
    },
    "Qwen3": {
        "family": "Qwen3",
        "attention": {"heads": 2, "headSize": 6},
        "feedForward": {"size": 24},
    },
    "Mistral": {
        "family": "Mistral",
        "attention": {"heads": 4, "keyValueHeads": 2, "window": {"size": 4}},
        "feedForward": {"size": 24},
    },
    "OLMo2": {"family": "OLMo2", "attention": {"heads": 2}, "feedForward": {"size": 24}},
    "all biases and norms": {
        "attention": {"heads": 2, "bias": "All", "queryKeyNorm": "AllHeads"},
        "norm": {"placement": "Both"},
        "feedForward": {"size": 24, "bias": "All"},
    },
    "Mixtral": {
        "family": "Mixtral",
        "attention": {"heads": 4, "keyValueHeads": 2},
        "feedForward": {"size": 12},
        "experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2}},
    },
    "Qwen3MoE": {
        "family": "Qwen3MoE",
        "attention": {"heads": 2},
        "feedForward": {"size": 20},
        "experts": {
            "type": "TopK",
            "count": 5,
            "topK": {"perToken": 2, "size": 8, "score": "Sigmoid", "scale": "1.5", "sharedExperts": 1},
            "denseLayers": [1, 3],
        },
    },
    "in balance": {
        "feedForward": {"size": 20},
        "experts": {
            "type": "TopK",
            "count": 7,
            "topK": {
                **{"perToken": 3, "size": 6, "score": "Sigmoid"},
                **{"biasUpdateRate": "0.03", "auxiliaryLoss": "0.2", "routerZLoss": "0.05"},
            },
            "denseLayers": [1, 3],
        },
    },
}
"""Name -> fields of the model that differ from a plain case."""


EIGHT_IN_BALANCE = json.dumps(
    {
        "experts": {
            "type": "TopK",
            "count": 8,
            "topK": {
                **{"perToken": 3, "size": 6, "score": "Sigmoid", "sharedExperts": 1},
                **{"biasUpdateRate": "0.03", "auxiliaryLoss": "0.2", "routerZLoss": "0.05"},
            },
            "denseLayers": [1],
        }
    }
)
"""Fields of a model with experts that spread evenly over ranks."""


WIDE = json.dumps({"hiddenSize": 16})
"""Fields of a model in which each tensor has a multiple of 16 elements, so that 8-bit moments are allowed."""
EIGHT_IN_WIDE = json.dumps(json.loads(WIDE) | json.loads(EIGHT_IN_BALANCE))


@dataclass(frozen=True)
class Case:
    steps: int = STEPS
    pipeline: int = 1
    data: int = 1
    micro_batches: int = 2
    sequences: int = SEQUENCES_OF_A_MICRO_BATCH
    """Sequences of a micro-batch, over all data ranks."""
    order: Any = "Layered"
    sharding: Any = "None"
    replicas: int = 1
    expert_ranks: int = 1
    expert_groups: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1
    homes: str = "d"
    """One letter per unit, repeated: d(evice), h(ost), D(isk)."""
    window: int = 2
    keep: Keep = "Inputs"
    sequence_chunks: int = 1
    stash: bool = False
    clipping: Any = "None"
    norm: str | None = None
    """Largest norm of a gradient; None: a norm that clips, for the mode of clipping."""
    speculates: bool = False
    layers: int = 4
    blocks: int | None = None
    """None: as many as layers."""
    pattern: Any = "Cycle"
    part: Any = "Blocks"
    """Part of a layer that layers share."""
    activation: Any = "GELU"
    experts: int = 0
    """0: a dense MLP."""
    prototypes: int = 1
    options: str = ""
    """Name of an entry of OPTIONS."""
    drawn: str = ""
    """Further fields of the model, as JSON."""
    precision: str = "float64"
    algorithm: Any = "AdamW"
    moments: Any = "Master"
    gradients: Any = "Master"
    products: Any = "Compute"
    next_sharing: tuple[int, Any] | None = None
    """Blocks and pattern of the next phase; None: nothing is measured."""
    vocabulary: int = 256
    tied: bool = False
    """Whether embeddings are tied."""
    loss_chunk: int | None = None
    soft_cap: str | None = None
    z_loss: str = "0"
    epsilon: str = "1e-8"
    exclusions: tuple[Any, ...] = ()
    """Matrices without weight decay."""
    multipliers: tuple[tuple[Any, str, str], ...] = ()
    """Groups of tensors, with the factors of their learning rate and their weight decay."""
    idle: Any = "Update"
    """Treatment of experts to which no token goes."""
    documents: bool = False
    """Whether attention stays within documents, which END ends."""

    @property
    def world(self) -> int:
        return self.pipeline * self.data

    @property
    def name(self) -> str:
        """Fields that differ from a plain case."""
        plain = Case()
        differing = {k: v for k, v in self.__dict__.items() if v != getattr(plain, k)}
        return " ".join(f"{key}={value}" for key, value in differing.items()) or "plain"

    @property
    def model(self) -> Model:
        # Of the 6 tokens of a sequence, some find their expert full.
        experts = {"count": self.experts, "prototypes": self.prototypes} if self.experts else None
        fields: dict[str, Any] = {
            "layers": self.layers,
            "hiddenSize": 8,
            "attention": {"heads": 2},
            "sequenceLength": 6,
            "feedForward": {"size": 24, "activation": self.activation},
            "experts": experts,
            "vocabularySize": self.vocabulary,
            "embeddings": "Tied" if self.tied else "Separate",
            "logitSoftCap": self.soft_cap,
        }
        return Model.model_validate(fields | OPTIONS[self.options] | json.loads(self.drawn or "{}"))

    @property
    def sharing(self) -> Sharing:
        return Sharing(blocks=self.blocks or self.layers, pattern=self.pattern, parts=[self.part])

    @property
    def optimizer(self) -> OptimizerSpec:
        norm = self.norm or {"Global": "0.5", "PerUnit": "0.2", "None": "1.0"}[self.clipping]
        return OptimizerSpec(
            clipping=Clipping(mode=self.clipping, norm=norm),
            z_loss=self.z_loss,
            epsilon=self.epsilon,
            decay_exclusions=list(self.exclusions),
            idle_experts=self.idle,
            algorithm=self.algorithm,
            moments=self.moments,
            multipliers=[Multiplier(tensors=t, learning_rate=r, weight_decay=d) for t, r, d in self.multipliers],
        )

    @property
    def layout(self) -> Layout:
        names: dict[str, Home] = {"d": "Device", "h": "Host", "D": "Disk"}
        layout = Layout(
            layer_blocks=blocks_of_layers(self.sharing, self.layers),
            layer_experts=experts_of_layers(self.sharing, self.model),
            pipeline=self.pipeline,
            data=self.data,
            micro_batches=self.micro_batches,
            order=self.order,
            sharding=self.sharding,
            replicas=self.replicas,
            expert_ranks=self.expert_ranks,
            expert_groups=self.expert_groups,
            context_ranks=self.context_ranks,
            tensor_ranks=self.tensor_ranks,
            window=self.window,
            keep=self.keep,
            sequence_chunks=self.sequence_chunks,
            stash=self.stash,
            clipping=self.clipping,
            speculates=self.speculates,
            ends_are_one=self.tied,
            vocabulary=self.model.vocabulary_size,
            loss_chunk=self.loss_chunk,
            measures=self.next_sharing is not None,
            balances_steps=self.model.balances_steps,
        )
        return replace(layout, homes=tuple(names[letter] for letter in islice(cycle(self.homes), layout.units)))

    @property
    def following(self) -> Sharing | None:
        """Sharing of the next phase; None: nothing is measured."""
        if self.next_sharing is None:
            return None
        blocks, pattern = self.next_sharing
        return Sharing(blocks=blocks, pattern=pattern, parts=[self.part])


def each(**fields: Any) -> list[Case]:
    """Return the cases of a row of a table, in which a list stands for several values: a case with each combination of
    values with `--deep`; else as few cases as have each value of each list."""
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    number = max(map(len, values))
    usual = zip(*(islice(cycle(one), number) for one in values), strict=True)
    return [Case(**dict(zip(fields, chosen, strict=True))) for chosen in DEPTH.of(usual, product(*values))]
