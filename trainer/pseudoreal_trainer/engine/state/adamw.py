"""AdamW over a range of a flat vector; on the host in one pass over memory.

Clipping, update and cast are three kernels. One after the other over a vector that no cache holds they touch 42 bytes
of memory for each element of a bfloat16 unit: the gradient twice (8), everything once (28), weights and copy (6). Here
all three run over a piece that fits in a core's cache before the next one begins. What is left is 30 bytes: the
gradient once (4), weights and moments read and written (24), the copy written (2).
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Barrier

import torch
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from torch import Tensor

from pseudoreal_trainer.forecast.memory.memory import PIECE_ELEMENTS
from pseudoreal_trainer.plan.units import VECTOR

PIECE = PIECE_ELEMENTS
"""Elements of a piece. The scaled gradient and the weights of a piece, 2 MiB, stay in a core's cache from one kernel to
the next, and calling three kernels takes a few per cent of their time. tests/benchmarks/one_pass.py compares sizes. How
much faster that is depends on how many cores share the memory: between nothing and the ratio of the bytes, 1.4."""
_LEAST_PIECE = 1 << 14
"""Least elements for which waking another thread is worth its time."""
_EPSILON = 1e-8


@dataclass(frozen=True)
class Slices:
    """A range of a unit's flat vector with its moments and gradient; all of them 1-D and of one length."""

    weights: Tensor
    first_moment: Tensor
    second_moment: Tensor
    gradient: Tensor
    """The gradient. On a device it may be changed; on the host it is only read."""
    compute: Tensor | None
    """Room for the new weights in the compute type; None: the weights are computed with as they are. It has memory of
    its own, as one thread writes to it while others read their parts of the gradient."""
    decayed: int
    """Number of elements at the start on which weight decay acts."""


@dataclass(frozen=True)
class _Step:
    """The figures of an update that are the same for all elements."""

    spec: OptimizerSpec
    number: Tensor
    """Number of the step, a scalar: 1 in the first."""
    rate: float
    scale: float

    def __call__(self, slices: Slices, gradient: Tensor, begin: int, end: int, decay: float) -> None:
        """Updates elements from `begin` on. `gradient`: that of the range alone, scaled."""
        # What torch.optim.AdamW(fused=True) calls. The class loads torch's compiler when it is made, and the function
        # around this kernel takes longer than the kernel takes for a piece.
        torch._fused_adamw_(
            [slices.weights[begin:end]],
            [gradient],
            [slices.first_moment[begin:end]],
            [slices.second_moment[begin:end]],
            [],
            [self.number],
            lr=self.rate,
            beta1=float(self.spec.beta1),
            beta2=float(self.spec.beta2),
            weight_decay=decay,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
        )


class AdamW:
    """AdamW in place (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(self) -> None:
        """Starts as many threads as torch has for one operation."""
        self._threads = torch.get_num_threads()
        self._pool = _single_threaded(self._threads) if self._threads > 1 else None
        self._scratch: dict[tuple[int, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def update(self, spec: OptimizerSpec, slices: Slices, steps: Tensor, rate: float, scale: float) -> None:
        """Updates the weights and moments with the gradient times `scale` (at most 1). `steps`: steps done before, a
        scalar; not changed.

        Every element is updated by itself, so it does not matter how a vector is cut into ranges: to the bit where each
        range begins at a multiple of the processor's vectors, whose rests are rounded in another way.
        """
        step = _Step(spec, steps + 1, rate, scale)
        is_one_kernel = scale == 1.0 and slices.compute is None
        if slices.weights.device.type == "cpu" and not is_one_kernel:
            self._in_pieces(step, slices)
        else:
            _whole(step, slices)

    def _in_pieces(self, step: _Step, slices: Slices) -> None:
        pieces = deque(_pieces(step.spec, slices, self._threads))
        if self._pool is None or len(pieces) == 1:
            self._work(step, slices, pieces, 0)
            return
        workers = range(min(self._threads, len(pieces)))
        done = [self._pool.submit(self._work, step, slices, pieces, worker) for worker in workers]
        # All of them have ended before this one does: the caller gives the vectors to somebody else.
        wait(done)
        for future in done:
            future.result()

    def _work(self, step: _Step, slices: Slices, pieces: deque[tuple[int, int, float]], worker: int) -> None:
        while pieces:
            try:
                begin, end, decay = pieces.popleft()
            except IndexError:
                return  # another thread took the last one
            step(slices, self._scaled(slices.gradient[begin:end], step.scale, worker), begin, end, decay)
            if slices.compute is not None:
                slices.compute[begin:end].copy_(slices.weights[begin:end])

    def _scaled(self, gradient: Tensor, scale: float, worker: int) -> Tensor:
        """The piece's gradient times `scale`, written beside it, to memory that stays in the cache; written over the
        gradient it would go back to main memory."""
        if scale == 1.0:
            return gradient
        key = (worker, gradient.dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(PIECE, dtype=gradient.dtype)
        return torch.mul(gradient, scale, out=self._scratch[key][: len(gradient)])


def _whole(step: _Step, slices: Slices) -> None:
    """Updates all elements kernel after kernel: for a device, where memory is fast and calling kernels takes the
    time."""
    if step.scale != 1.0:
        slices.gradient.mul_(step.scale)
    for begin, end, decay in _ranges(step.spec, slices):
        step(slices, slices.gradient[begin:end], begin, end, decay)
    if slices.compute is not None:
        slices.compute.copy_(slices.weights)


def _ranges(spec: OptimizerSpec, slices: Slices) -> Iterator[tuple[int, int, float]]:
    """The ranges of one weight decay: begin, end and decay."""
    for begin, end, decay in ((0, slices.decayed, spec.weight_decay), (slices.decayed, len(slices.weights), 0.0)):
        if begin < end:
            yield begin, end, float(decay)


def _pieces(spec: OptimizerSpec, slices: Slices, threads: int) -> Iterator[tuple[int, int, float]]:
    """The ranges cut into pieces: begin, end and decay. They are cut at whole vectors of the processor, counted from
    where a range begins, so no piece but the last of a range has a rest."""
    for begin, end, decay in _ranges(spec, slices):
        share = -(-(end - begin) // (threads * VECTOR)) * VECTOR
        length = min(PIECE, max(share, _LEAST_PIECE))
        for start in range(begin, end, length):
            yield start, min(start + length, end), decay


def _single_threaded(threads: int) -> ThreadPoolExecutor:
    """Threads in which an operation of torch does not split itself up further."""
    started = Barrier(threads + 1)

    def enter() -> None:
        torch.get_num_threads()  # the first call in a thread sets the number, so it comes before ours
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "adamw", initializer=enter)
    for _ in range(threads):
        pool.submit(lambda: None)
    started.wait()
    # The number is a thread's own, but it is also what threads begin with that come later.
    torch.set_num_threads(threads)
    return pool


assert PIECE % VECTOR == _LEAST_PIECE % VECTOR == 0
