"""Cases measured on a GPU: two dense models with several homes, clippings and batches, the most informative first.
Pure."""

from dataclasses import dataclass
from typing import Any, Literal

from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.optimizer import ClippingMode
from pseudoreal_api.spec.phase import Home
from pydantic import BaseModel

Stack = Literal["pseudoreal", "fully_shard"]
Updates = Literal["AfterNorm", "Speculative"]
MICRO_BATCHES = 4
SEQUENCE = 2048
TOKENS = (8192, 24576, 65536)
TIMED = 3
_FIRST_WARM_UP, _WARM_UP = 2, 1


class Point(BaseModel, frozen=True):
    """A batch size of a case."""

    tokens: int
    """Tokens per step."""
    micro_batches: int = MICRO_BATCHES


class Case(BaseModel, frozen=True):
    """One process: a model and its state on one stack, trained on batches of several sizes in sequence."""

    model: str
    stack: Stack
    home: Home
    """Home of the state. For fully_shard: device, or host by CPUOffloadPolicy."""
    clipping: ClippingMode
    points: tuple[Point, ...]
    updates: Updates = "AfterNorm"
    """Start of updates with global clipping, as in `optimizer.clipping.updates`."""
    is_compiled: bool = False
    """Whether blocks are compiled, as with `compile.mode: Blocks`."""

    @property
    def label(self) -> str:
        return f"{self.model}, {self.stack}, {self.home}, {self.settings}"

    @property
    def settings(self) -> str:
        """Clipping, and settings that differ from the defaults."""
        speculates, compiled = ["Speculative"] * (self.updates == "Speculative"), ["compiled"] * self.is_compiled
        return ", ".join([self.clipping, *speculates, *compiled])


@dataclass(frozen=True)
class Suite:
    models: dict[str, Model]
    cases: tuple[Case, ...]
    """Cases in order of importance: if time is short, the last ones are left out."""


def suite(*, tiny: bool) -> Suite:
    """Return the cases; with `tiny`, cases of a few seconds on any machine, to try the program."""
    if tiny:
        small, large = _TINY
        return Suite(_TINY, tuple(case for case in _cases((small, large), (128, 256)) if case.model == small))
    small, large = _MODELS
    return Suite(_MODELS, tuple(_cases((small, large), TOKENS)))


def warm_up(case: Case, number: int) -> int:
    """Return the number of untimed steps at the case's point with this index; the first point also warms up kernels."""
    assert 0 <= number < len(case.points)
    return _FIRST_WARM_UP if number == 0 else _WARM_UP


def _dense(layers: int, hidden: int, heads: int, sequence: int) -> Model:
    return Model(
        layers=layers,
        hidden_size=hidden,
        attention=Attention(heads=heads),
        sequence_length=sequence,
        feed_forward=FeedForward(size=4 * hidden),
    )


_MODELS = {"1B": _dense(20, 2048, 16, SEQUENCE), "4B": _dense(20, 4096, 32, SEQUENCE)}
"""1.0 and 4.0 billion parameters; a block of the larger model is as large as in a model of 7 billion."""
_TINY = {"tiny": _dense(2, 64, 2, 32), "small": _dense(4, 64, 2, 32)}


def _cases(models: tuple[str, str], tokens: tuple[int, ...]) -> list[Case]:
    small, large = models
    every, ends = tuple(Point(tokens=t) for t in tokens), tuple(Point(tokens=t) for t in (tokens[0], tokens[-1]))
    # fully_shard gathers all weights again for each micro-batch, so its users choose as few micro-batches as fit.
    whole = tuple(Point(tokens=point.tokens, micro_batches=1) for point in ends)

    def ours(
        model: str, home: Home, clipping: ClippingMode, points: tuple[Point, ...] = every, **settings: Any
    ) -> Case:
        return Case(model=model, stack="pseudoreal", home=home, clipping=clipping, points=points, **settings)

    def theirs(model: str, home: Home, points: tuple[Point, ...]) -> Case:
        return Case(model=model, stack="fully_shard", home=home, clipping="Global", points=points)

    # Speculative updates keep a second copy of the state. For the larger model, most hosts lack that memory.
    return [
        ours(small, "Host", "Global", updates="Speculative"),
        theirs(small, "Host", (*ends, *whole)),
        ours(small, "Host", "Global", ends),
        ours(small, "Host", "Global", whole, updates="Speculative"),
        ours(small, "Device", "Global", ends),
        theirs(small, "Device", (*ends, *whole)),
        ours(large, "Host", "PerUnit", ends),
        ours(small, "Host", "PerUnit", ends),
        ours(small, "Device", "Global", ends, is_compiled=True),
        theirs(large, "Host", whole),
        ours(large, "Host", "Global", ends),
        ours(small, "Disk", "PerUnit", ends),
        ours(large, "Device", "Global", ends),
        theirs(large, "Device", whole),
    ]
