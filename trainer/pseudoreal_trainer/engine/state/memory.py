"""State of a unit on this rank: master weights, moments, the gradient between reduction and update; and AdamW.

On the host, AdamW goes over memory once. Clipping, update and cast are three kernels. If each kernel ran over the whole
vector, and the vector did not fit in the cache, the kernels would move 42 bytes of memory per element of a bfloat16
unit: the gradient twice (8), everything once (28), weights and copy (6). Here all three kernels run over a piece
before the next piece starts. If the piece stays in the caches, this moves 30 bytes: the gradient once (4), weights and
moments read and written (24), the copy written (2). Moments in bfloat16 make it 22, in blocks of 8-bit floats 18. They
are widened to the master dtype in scratch memory, updated there, and rounded back (`rounding`). A gradient in bfloat16
takes 2 bytes less, and is widened in the same way.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Barrier
from typing import Any, Literal

import torch
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Event
from pseudoreal_trainer.engine.state import blocks
from pseudoreal_trainer.engine.state.blocks import stored_length, stored_part
from pseudoreal_trainer.engine.state.muon import Muon
from pseudoreal_trainer.engine.state.pinned import BounceBuffers
from pseudoreal_trainer.engine.state.rounding import MomentRounding, RandomRange
from pseudoreal_trainer.plan.memory.tiers import PIECE_ELEMENTS, ROUNDED_ELEMENTS_ON_DEVICE
from pseudoreal_trainer.plan.sizes import without_second_moment
from pseudoreal_trainer.plan.units import MOMENTS, VECTOR, Kind
from pseudoreal_trainer.plan.update_ranges import UpdateRange, without

Purpose = Literal["weights", "moments", "gradients", "previous"]
"""Purpose of memory. Weights are counted in both dtypes; previous: weights and moments before a speculative update."""

PIECE = PIECE_ELEMENTS
"""Number of elements that each of torch's threads updates at a time. Most of the scaled gradient and of the weights of
so many elements stays in the caches from one kernel to the next. benchmarks/one_pass.py compares sizes."""
_LEAST_PIECE = 1 << 14
"""Minimum number of elements in a piece, so that the piece is worth waking a thread for."""
_WORKERS = 2
"""Maximum number of threads of Python that update a unit, each with a part of torch's threads. While torch wakes the
threads of one, the threads of the other compute. More would wait for each other, and the thread that launches passes
would wait for all of them: each needs Python's lock between two kernels (decision 0040)."""


@dataclass(frozen=True)
class Shard:
    """The range of a unit's flat vector that a state covers, and its dtypes."""

    begin: int
    length: int
    ranges: tuple[UpdateRange, ...]
    """Update ranges, relative to `begin`. They cover all elements except padding after a balancing bias."""
    master: torch.dtype
    compute: torch.dtype
    moments: torch.dtype
    """Dtype of the stored moments: the master dtype, bfloat16, or BLOCKS."""
    random: tuple[RandomRange, ...] = ()
    """Ranges of random bits for rounding moments, relative to `begin`; unused if moments have the master dtype."""
    has_rounded_gradient: bool = False
    """Whether the gradient is kept in bfloat16; otherwise in the master dtype."""

    @cached_property
    def of_muon(self) -> int:
        """Number of elements that Muon updates. They are the first ones, and have no second moment."""
        return sum(one.end - one.begin for one in self.ranges if one.is_of_muon)

    def first_of(self, kind: Kind) -> int:
        """Return the index of the first element that has this kind."""
        return self.of_muon if kind == "second_moment" else 0

    def first_stored(self, kind: Kind) -> int:
        """Return the index of the first element for which there is memory of this kind; at most `first_of`."""
        return without_second_moment(self.first_of(kind))

    def dtype_of(self, kind: Kind) -> torch.dtype:
        return self.master if kind == "weights" else self.moments

    @property
    def gradient(self) -> torch.dtype:
        """Dtype of the kept gradient."""
        return torch.bfloat16 if self.has_rounded_gradient else self.master

    @property
    def balancing(self) -> slice:
        """Elements of the balancing bias; empty without one."""
        balancing = [one.elements for one in self.ranges if one.is_balancing]
        return balancing[0] if balancing else slice(self.length, self.length)


class State(ABC):
    """State of a unit in its home. While a step runs, only the reduction and update threads change it."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.steps = 0
        """Number of updates done."""

    @abstractmethod
    def put(self, kind: Kind, values: Tensor) -> None:
        """Set weights, first moment or second moment, [length]. Values are rounded to the nearest of the dtype. Second
        moments of elements that Muon updates are ignored."""

    @abstractmethod
    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        """Return the elements begin..end-1 of weights, first moment or second moment, as they are stored. `begin` is at
        least `shard.first_of(kind)`; in blocks, it is the first element of a block. Read-only; valid until the unit's
        next update. From a disk, valid only until the next call for any unit."""

    @abstractmethod
    def compute_weights(self) -> Tensor:
        """Return the weights in the compute dtype, [length], without a copy; valid until the next update."""

    @abstractmethod
    def keep_gradient(self, gradient: Tensor) -> None:
        """Copy the reduced gradient, [length], unless it is in `gradient_memory` already. Its dtype is that of kept
        gradients. The copy may be asynchronous, on the current stream."""

    def drop_gradient(self) -> None:  # noqa: B027
        """Discard the kept gradient, if any, and the update that was made with it, if it is speculative."""

    def gradient_memory(self) -> Tensor | None:
        """Return the memory, [length], to which `keep_gradient` copies; None if `keep_gradient` uses a bounce buffer. A
        reduction may write its result there directly."""
        return None

    def are_weights_ready(self) -> bool:
        """Return whether `compute_weights` would return without waiting."""
        return True

    @abstractmethod
    def kept_bytes(self) -> dict[Purpose, int]:
        """Return purpose -> bytes in the home, including padding. If a vector is a view of a larger vector, the bytes
        of the larger vector are counted."""

    @abstractmethod
    def update(self, spec: OptimizerSpec, rate: float, scale: float, idle: Sequence[range] = ()) -> None:
        """Update the state with the kept gradient times `scale`, the clip factor (at most 1). `idle`: ranges of the
        unit's flat vector that stay unchanged, in order."""

    def speculate(self, spec: OptimizerSpec, rate: float) -> None:
        """Copy the state, and update it with the kept gradient, unclipped. `update` with the same rate, or
        `drop_gradient`, follows. Only states on the host implement it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no copy of its state")

    def read_ahead(self, after: Future[Any]) -> None:
        """Start to read the compute weights once `after` is done. Only states on disk implement it."""
        raise NotImplementedError(f"{type(self).__name__} has its weights in memory")

    def release_weights(self, event: Event) -> None:  # noqa: B027
        """Record that the result of `compute_weights` is no longer read after the event."""

    def close(self) -> None:  # noqa: B027
        """Release resources that the process does not release by itself."""


@dataclass(frozen=True)
class Vectors:
    """Vectors of a state in memory; all [length]. Some may be views of larger vectors."""

    weights: Tensor
    compute_weights: Tensor
    """The same tensor as `weights` if the dtypes are equal."""
    gradient: Tensor | None
    """Memory of the reduced gradient. None: the gradient passes through a bounce buffer."""
    compute_parts: int = 1
    """Number of shards in the resident working copy, if `compute_weights` is one of these shards; else 1."""
    gradient_parts: int = 1
    """Number of shards in the resident whole gradient, if `gradient` is one of these shards; else 1."""
    keeps_previous: bool = False
    """Whether there is memory for weights and moments before a speculative update."""


class MemoryState(State):
    """State in the memory of the device or of the host."""

    def __init__(self, shard: Shard, vectors: Vectors, adamw: "AdamW", buffers: BounceBuffers) -> None:
        super().__init__(shard)
        self._vectors, self._adamw, self._buffers = vectors, adamw, buffers
        self._buffer: Tensor | None = None
        """Bounce buffer of the gradient, from `keep_gradient` until the gradient is used."""
        device = vectors.weights.device
        first, second = (
            torch.zeros(
                stored_length(shard.length - shard.first_stored(kind), shard.moments),
                dtype=shard.moments,
                device=device,
            )
            for kind in MOMENTS
        )
        self._kinds: dict[Kind, Tensor] = {
            "weights": vectors.weights,
            "first_moment": first,
            "second_moment": second,
        }
        # Written once: otherwise a host with too little memory would end the pod at the first speculative update.
        self._previous = (
            [torch.empty_like(vector).zero_() for vector in self._kinds.values()] if vectors.keeps_previous else None
        )
        """Weights and moments before a speculative update, each [length]; None: updates are never speculative."""
        self._is_speculative = False
        """Whether the state is the result of a speculative update."""

    def put(self, kind: Kind, values: Tensor) -> None:
        blocks.put(kind, values[self.shard.first_stored(kind) :], self._kinds[kind])
        if kind == "weights" and self._own_copy is not None:
            self._own_copy.copy_(self._kinds["weights"])

    def part(self, kind: Kind, begin: int, end: int) -> Tensor:
        first = self.shard.first_stored(kind)
        return stored_part(self._kinds[kind], slice(begin - first, end - first))

    def compute_weights(self) -> Tensor:
        return self._vectors.compute_weights

    def keep_gradient(self, gradient: Tensor) -> None:
        if self._vectors.gradient is None:
            self._buffer = self._buffers.take()
        kept = self.gradient()
        if gradient.data_ptr() != kept.data_ptr():
            kept.copy_(gradient, non_blocking=True)

    def gradient(self) -> Tensor:
        if self._vectors.gradient is not None:
            return self._vectors.gradient
        assert self._buffer is not None, "`keep_gradient` comes before each use of the gradient"
        return self._buffer.view(self.shard.gradient)[: self.shard.length]

    def drop_gradient(self) -> None:
        self._undo()
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None

    def gradient_memory(self) -> Tensor | None:
        return self._vectors.gradient

    def kept_bytes(self) -> dict[Purpose, int]:
        vectors, (weights, first, second) = self._vectors, self._kinds.values()
        masters = 0 if self._own_copy is None else weights.nbytes
        gradient = 0 if vectors.gradient is None else vectors.gradient.nbytes
        kept: dict[Purpose, int] = {
            "weights": masters + vectors.compute_weights.nbytes * vectors.compute_parts,
            "moments": first.nbytes + second.nbytes,
            "gradients": gradient * vectors.gradient_parts,
        }
        if self._previous is not None:
            kept["previous"] = sum(vector.nbytes for vector in self._previous)
        return kept

    def update(self, spec: OptimizerSpec, rate: float, scale: float, idle: Sequence[range] = ()) -> None:
        begin = self.shard.begin
        try:
            if self._is_speculative and scale == 1.0:
                self._restore([slice(max(0, one.start - begin), max(0, one.stop - begin)) for one in idle])
                self._is_speculative = False
            else:
                self._undo()
                self._update(spec, rate, scale, without(self.shard.ranges, idle, begin))
        finally:
            self.drop_gradient()

    def speculate(self, spec: OptimizerSpec, rate: float) -> None:
        assert self._previous is not None, "the plan speculates only on units with memory for a copy of the state"
        self._update(spec, rate, 1.0, self.shard.ranges, self._previous)
        self._is_speculative = True

    def _update(
        self,
        spec: OptimizerSpec,
        rate: float,
        scale: float,
        ranges: tuple[UpdateRange, ...],
        previous: Sequence[Tensor] | None = None,
    ) -> None:
        weights, first, second = self._kinds.values()
        slices = Slices(
            weights,
            first,
            second,
            self.gradient(),
            self._own_copy,
            ranges,
            previous,
            random=self.shard.random,
            without_second=self.shard.first_stored("second_moment"),
        )
        self._adamw.update(spec, slices, self.steps, rate, scale)
        self.steps += 1

    def _undo(self) -> None:
        """Restore the state before a speculative update, if the state is the result of one."""
        if self._is_speculative:
            self._restore([one.elements for one in self.shard.ranges])
            self.steps -= 1
            self._is_speculative = False

    def _restore(self, parts: Sequence[slice]) -> None:
        assert self._previous is not None, "a speculative update copies the state"
        for part in parts:
            for (kind, vector), previous in zip(self._kinds.items(), self._previous, strict=True):
                own = _moved(part, -self.shard.first_stored(kind))
                stored_part(vector, own).copy_(stored_part(previous, own))
            if self._own_copy is not None:
                self._own_copy[part].copy_(self._kinds["weights"][part])

    @property
    def _own_copy(self) -> Tensor | None:
        """Weights in the compute dtype, if it differs from the master dtype; else None."""
        return None if self._vectors.compute_weights is self._vectors.weights else self._vectors.compute_weights


@dataclass(frozen=True)
class Slices:
    """The same range of a unit's weights, moments, gradient and compute-dtype weights. The tensors are 1-D and of equal
    length, apart from `without_second` and from moments in blocks."""

    weights: Tensor
    first_moment: Tensor
    second_moment: Tensor
    gradient: Tensor
    """Gradient in the master dtype, or on the host in bfloat16. The update reads it; on a device, the update may also
    overwrite it."""
    compute: Tensor | None
    """Memory for the new weights in the compute dtype; None: passes use `weights` directly. Overlaps no other vector,
    because one thread writes here while others read their parts of the gradient."""
    ranges: tuple[UpdateRange, ...]
    """Update ranges. They cover all elements except padding after a balancing bias."""
    previous: Sequence[Tensor] | None = None
    """Memory for weights, first and second moment before the update; None: they are not kept."""
    random: Sequence[RandomRange] = ()
    """Ranges of random bits for rounding moments, relative to the first element."""
    without_second: int = 0
    """Number of elements, at the start of the range, that the second moment lacks."""

    @property
    def are_moments_rounded(self) -> bool:
        return self.first_moment.dtype != self.weights.dtype

    @property
    def is_gradient_rounded(self) -> bool:
        return self.gradient.dtype != self.weights.dtype

    def moments(self, part: slice) -> list[Tensor]:
        of_second = _moved(part, -self.without_second)
        return [stored_part(self.first_moment, part), stored_part(self.second_moment, of_second)]

    def keep_previous(self, part: slice) -> None:
        """Copy weights and moments of a part, if there is memory for them."""
        if self.previous is not None:
            of_second = _moved(part, -self.without_second)
            vectors = (self.weights, part), (self.first_moment, part), (self.second_moment, of_second)
            for previous, (vector, own) in zip(self.previous, vectors, strict=True):
                stored_part(previous, own).copy_(stored_part(vector, own))


def _moved(part: slice, by: int) -> slice:
    """Return the slice moved by a number of elements; without elements before the first."""
    return slice(max(0, part.start + by), max(0, part.stop + by))


@dataclass(frozen=True)
class _Kernel:
    """The AdamW kernel, with the arguments shared by all elements of an update."""

    spec: OptimizerSpec
    update: int
    """Number of the update: 1 for the first."""
    number: Tensor
    """The same number, a scalar on the device."""
    rate: float
    scale: float

    def __call__(self, weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], part: UpdateRange) -> None:
        """Update the elements of a range. All tensors are of this range only; the gradient is scaled."""
        # The kernel of torch.optim.AdamW(fused=True). That class loads torch's compiler when it is created, and the
        # function around this kernel takes longer than the kernel takes for a piece.
        torch._fused_adamw_(
            [weights],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [self.number],
            lr=self.rate * part.rate,
            beta1=float(self.spec.beta1),
            beta2=float(self.spec.beta2),
            weight_decay=part.decay,
            eps=float(self.spec.epsilon),
            amsgrad=False,
            maximize=False,
        )


class AdamW:
    """AdamW in place (Loshchilov and Hutter, arXiv 1711.05101), and Muon for the ranges that say so. One caller at a
    time: scratch memory is shared."""

    def __init__(self, muon: Muon | None = None, threads: int | None = None) -> None:
        """`threads`: number of threads that compute an update on the host; None: as many as torch uses for one
        operation."""
        self.muon = muon or Muon()
        threads = threads or torch.get_num_threads()
        self._workers = min(threads, _WORKERS)
        self._piece = threads * PIECE // self._workers
        self._pool = _pool(self._workers, threads) if threads > 1 else None
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}
        self._roundings: dict[tuple[int, torch.device, torch.dtype, torch.dtype], MomentRounding] = {}

    @torch.no_grad()
    def update(self, spec: OptimizerSpec, slices: Slices, steps: int, rate: float, scale: float) -> None:
        """Update weights and moments with the gradient times `scale` (at most 1). `steps`: number of earlier updates.

        Every element is updated by itself, so a vector may be cut into any ranges. The results are bitwise the same if
        each range starts at a multiple of VECTOR: the tail of a range, shorter than a SIMD vector, may be rounded
        differently.
        """
        slices = self._orthogonalized(_balanced(slices), rate, scale)
        kernel = _kernel(spec, steps + 1, rate, scale, slices.weights.device)
        rounds = slices.are_moments_rounded
        if slices.weights.device.type == "cpu":
            self._in_pieces(kernel, slices)
        elif rounds:
            self._rounding_on_device(kernel, slices)
        else:
            _whole(kernel, slices)

    def _orthogonalized(self, slices: Slices, rate: float, scale: float) -> Slices:
        """Update the matrices of Muon. Return the slices with all other ranges, for AdamW."""
        for one in slices.ranges:
            if one.is_of_muon:
                slices.keep_previous(one.elements)
                weights = slices.weights[one.elements]
                direction = self.muon.direction(one, weights.dtype, weights.device)
                momentum, gradient = slices.first_moment[one.elements], slices.gradient[one.elements]
                self.muon.accumulate(direction, momentum, gradient, scale)
                self.muon.orthogonalize(one, direction, rate)
                self.muon.apply(weights, direction, one, rate)
                if slices.compute is not None:
                    slices.compute[one.elements].copy_(weights)
        return replace(slices, ranges=tuple(one for one in slices.ranges if not one.is_of_muon))

    def _in_pieces(self, kernel: _Kernel, slices: Slices) -> None:
        pieces = deque(_pieces(slices.ranges, self._workers, self._piece))
        if self._pool is None:
            self._work(kernel, slices, pieces, 0)
            return
        workers = range(min(self._workers, len(pieces)))
        done = [self._pool.submit(self._work, kernel, slices, pieces, worker) for worker in workers]
        # Wait for all threads before raising an error: the caller gives the vectors to another owner.
        wait(done)
        for future in done:
            future.result()

    def _work(self, kernel: _Kernel, slices: Slices, pieces: deque[UpdateRange], worker: int) -> None:
        while pieces:
            try:
                piece = pieces.popleft()
            except IndexError:
                return  # another thread took the last one
            slices.keep_previous(piece.elements)
            gradient = self._scaled(slices.gradient[piece.elements], kernel.scale, slices.weights.dtype, worker)
            if slices.are_moments_rounded:
                self._update_rounded(kernel, slices, gradient, piece, worker)
            else:
                kernel(slices.weights[piece.elements], gradient, slices.moments(piece.elements), piece)
            if slices.compute is not None:
                slices.compute[piece.elements].copy_(slices.weights[piece.elements])

    def _scaled(self, gradient: Tensor, scale: float, master: torch.dtype, worker: int) -> Tensor:
        """Return the piece's gradient times `scale` in the master dtype, in a scratch buffer that stays in the cache;
        scaling in place would write the gradient back to main memory. Scale 1 and the master dtype: the gradient
        itself."""
        if scale == 1.0 and gradient.dtype == master:
            return gradient
        key = (worker, master)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(self._piece, dtype=master)
        scaled = self._scratch[key][: len(gradient)]
        # A bfloat16 times a number would be rounded to bfloat16 again.
        widened = gradient if gradient.dtype == master else scaled.copy_(gradient)
        return widened if scale == 1.0 else torch.mul(widened, scale, out=scaled)

    def _rounding_on_device(self, kernel: _Kernel, slices: Slices) -> None:
        """Like `_whole`, with moments widened piece by piece: scratch memory for whole vectors would be larger than the
        memory that rounded moments save."""
        _scale(kernel, slices)
        for piece in _pieces(slices.ranges, 1, ROUNDED_ELEMENTS_ON_DEVICE):
            self._update_rounded(kernel, slices, slices.gradient[piece.elements], piece, 0)
        if slices.compute is not None:
            slices.compute.copy_(slices.weights)

    def _update_rounded(
        self, kernel: _Kernel, slices: Slices, gradient: Tensor, piece: UpdateRange, worker: int
    ) -> None:
        """Update a piece whose moments are stored in bfloat16 or in blocks. The weights are updated with moments that
        are not rounded yet."""
        weights, moments = slices.weights[piece.elements], slices.moments(piece.elements)
        rounding = self._rounding(worker, weights, moments[0].dtype)
        kernel(weights, gradient, rounding.widen(moments, len(weights)), piece)
        rounding.round_into(moments, slices.random, piece.begin, len(weights), kernel.update)

    def _rounding(self, worker: int, weights: Tensor, moments: torch.dtype) -> MomentRounding:
        key = (worker, weights.device, weights.dtype, moments)
        if key not in self._roundings:
            length = self._piece if weights.device.type == "cpu" else ROUNDED_ELEMENTS_ON_DEVICE
            self._roundings[key] = MomentRounding(length, weights.dtype, weights.device, moments)
        return self._roundings[key]


def _kernel(spec: OptimizerSpec, update: int, rate: float, scale: float, device: torch.device) -> _Kernel:
    return _Kernel(spec, update, torch.full((), float(update), device=device), rate, scale)


def _balanced(slices: Slices) -> Slices:
    """Add the change of a balancing bias, unclipped. Return the slices with all other ranges, for AdamW."""
    for one in slices.ranges:
        if one.is_balancing:
            slices.keep_previous(one.elements)
            slices.weights[one.elements].add_(slices.gradient[one.elements])
            if slices.compute is not None:
                slices.compute[one.elements].copy_(slices.weights[one.elements])
    return replace(slices, ranges=tuple(one for one in slices.ranges if not one.is_balancing))


def _whole(kernel: _Kernel, slices: Slices) -> None:
    """Run each kernel over all elements before the next kernel. Used on a device, where memory is fast and launches are
    slow."""
    _scale(kernel, slices)
    for part in slices.ranges:
        kernel(slices.weights[part.elements], slices.gradient[part.elements], slices.moments(part.elements), part)
    if slices.compute is not None:
        slices.compute.copy_(slices.weights)


def _scale(kernel: _Kernel, slices: Slices) -> None:
    """Scale the whole gradient in place."""
    assert slices.previous is None, "only units in host memory speculate"
    if kernel.scale != 1.0:
        slices.gradient.mul_(kernel.scale)


def _pieces(ranges: Sequence[UpdateRange], workers: int, most: int) -> Iterator[UpdateRange]:
    """Yield the ranges cut into pieces of at most `most` elements. Cuts are at multiples of VECTOR, relative to the
    start of a range, so only the last piece of a range has a tail shorter than a SIMD vector."""
    for one in ranges:
        share = -(-(one.end - one.begin) // (workers * VECTOR)) * VECTOR
        length = min(most, max(share, _LEAST_PIECE))
        for start in range(one.begin, one.end, length):
            yield replace(one, begin=start, end=min(start + length, one.end))


def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Return a pool of workers that share `threads` threads of torch: each worker runs a kernel with its part of
    them."""
    started, numbers = Barrier(workers + 1), iter(range(workers))
    number = torch.get_num_threads()

    def enter() -> None:
        torch.get_num_threads()  # the first call in a thread sets the number, so it comes before ours
        torch.set_num_threads(len(range(next(numbers), threads, workers)))
        started.wait()

    pool = ThreadPoolExecutor(workers, "adamw", initializer=enter)
    for _ in range(workers):
        pool.submit(lambda: None)
    started.wait()
    # Restore the number: `set_num_threads` in the workers also sets it for threads created later.
    torch.set_num_threads(number)
    return pool


assert PIECE % (_WORKERS * VECTOR) == _LEAST_PIECE % VECTOR == 0, "pieces are cut at whole vectors of the processor"
