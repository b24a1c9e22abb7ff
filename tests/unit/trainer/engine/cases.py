"""What the engine is tried with: a small model under many layouts."""

from dataclasses import dataclass
from itertools import cycle
from typing import Any

from pseudoreal_api.spec.model import Attention, FeedForward, MixtureOfExperts, Model
from pseudoreal_api.spec.optimizer import Clipping
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from pseudoreal_api.spec.phase import Home, Sharing
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sharing import blocks_of_layers

STEPS = 5
SEQUENCES_OF_A_MICRO_BATCH = 4
RATE = 1e-2


@dataclass(frozen=True)
class Case:
    pipeline: int = 1
    data: int = 1
    micro_batches: int = 2
    order: Any = "Layered"
    sharding: Any = "None"
    homes: str = "d"
    """A letter for each unit, repeated: d(evice), h(ost), D(isk)."""
    window: int = 2
    recompute: bool = True
    stash: bool = False
    clipping: Any = "None"
    layers: int = 4
    blocks: int | None = None
    """None: as many as layers."""
    pattern: Any = "Cycle"
    activation: Any = "GELU"
    experts: int = 0
    """0: a dense feed-forward part."""
    prototypes: int = 1
    precision: str = "float64"
    next_sharing: tuple[int, Any] | None = None
    """Blocks and pattern of the next phase; None: nothing is measured."""

    @property
    def world(self) -> int:
        return self.pipeline * self.data

    @property
    def name(self) -> str:
        """The fields that differ from a plain case."""
        plain = Case()
        differing = {k: v for k, v in self.__dict__.items() if v != getattr(plain, k)}
        return " ".join(f"{key}={value}" for key, value in differing.items()) or "plain"

    @property
    def model(self) -> Model:
        ffn = FeedForward(size=24, activation=self.activation)
        # Of the 6 tokens of a sequence, some find their expert full.
        experts = MixtureOfExperts(count=self.experts, prototypes=self.prototypes) if self.experts else None
        return Model(
            layers=self.layers,
            hidden_size=8,
            attention=Attention(heads=2),
            sequence_length=6,
            feed_forward=ffn,
            experts=experts,
        )

    @property
    def sharing(self) -> Sharing:
        return Sharing(blocks=self.blocks or self.layers, pattern=self.pattern)

    @property
    def optimizer(self) -> OptimizerSpec:
        norm = {"Global": "0.5", "PerUnit": "0.2", "None": "1.0"}[self.clipping]
        return OptimizerSpec(clipping=Clipping(mode=self.clipping, norm=norm))

    @property
    def layout(self) -> Layout:
        names: dict[str, Home] = {"d": "Device", "h": "Host", "D": "Disk"}
        units = self.sharing.blocks + 2
        homes = tuple(names[letter] for _, letter in zip(range(units), cycle(self.homes), strict=False))
        return Layout(
            layer_blocks=blocks_of_layers(self.sharing, self.layers),
            pipeline=self.pipeline,
            data=self.data,
            micro_batches=self.micro_batches,
            order=self.order,
            sharding=self.sharding,
            homes=homes,
            window=self.window,
            recompute=self.recompute,
            stash=self.stash,
            clipping=self.clipping,
            measures=self.next_sharing is not None,
        )

    @property
    def next_blocks(self) -> tuple[int, ...]:
        """Entry l is the block of layer l in the next phase."""
        assert self.next_sharing is not None, "only of a case that measures"
        blocks, pattern = self.next_sharing
        return blocks_of_layers(Sharing(blocks=blocks, pattern=pattern), self.layers)
