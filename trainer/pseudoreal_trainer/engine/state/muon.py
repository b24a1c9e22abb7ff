"""Muon: the update of a matrix by its momentum, with all singular values near 1 (K. Jordan, 2024).

With the gradient g times the clip factor, a matrix W of r rows and c columns, and Nesterov's momentum:

    m = 0.95 m + 0.05 g
    d = 0.95 m + 0.05 g     with the new m
    W = (1 - rate decay) W - rate 0.2 sqrt(max(r, c)) NewtonSchulz(d / |d|)

The factor makes the update as large as one by AdamW, so learning rate and weight decay of AdamW fit (Moonlight, arXiv
2502.16982).

A matrix is updated as a whole. Its elements may come in parts: from a disk they come chunk by chunk. Each operation on
single elements is rounded by itself and not fused with another, so the bits do not depend on the parts. On the host the
iterations compute in the master dtype, on a device in the compute dtype; the published Muon computes in bfloat16.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pseudoreal_trainer.plan.newton_schulz import ITERATIONS, A, B, C, scratch_bytes
from pseudoreal_trainer.plan.update_ranges import UpdateRange

MOMENTUM = 0.95
_SCALE = 0.2
"""Root mean square of the elements of an update by AdamW, as a multiple of the learning rate."""
_LEAST_NORM = 1e-7


class Muon:
    """Updates one matrix at a time. Owns the scratch memory of one thread, of the size of the largest matrix so far."""

    def __init__(self, compute: torch.dtype | None = None) -> None:
        """`compute`: dtype of the iterations on a device; None: the master dtype."""
        self._compute = compute
        self._scratch: dict[torch.device, Tensor] = {}

    def reserve(self, ranges: Sequence[UpdateRange], master: torch.dtype, device: torch.device) -> None:
        """Allocate the scratch memory for the matrices among the ranges."""
        sizes = [self._bytes(one, master, device) for one in ranges if one.is_of_muon]
        held = self._scratch.get(device)
        if sizes and (held is None or len(held) < max(sizes)):
            self._scratch[device] = torch.empty(max(sizes), dtype=torch.uint8, device=device)

    def direction(self, matrix: UpdateRange, master: torch.dtype, device: torch.device) -> Tensor:
        """Return the scratch memory, [elements of the matrix], that `accumulate` fills and `orthogonalize` changes.
        Calls with the same matrix return the same memory; a call with another matrix may overwrite it."""
        return self._views(matrix, master, device)[0]

    def accumulate(self, direction: Tensor, momentum: Tensor, gradient: Tensor, scale: float) -> None:
        """Update the momentum of some elements with the gradient times `scale`, and set their direction; [n] each."""
        # A bfloat16 times a number would be rounded to bfloat16 again.
        widened = gradient if gradient.dtype == direction.dtype else direction.copy_(gradient)
        torch.mul(widened, scale * (1 - MOMENTUM), out=direction)
        momentum.mul_(MOMENTUM).add_(direction)
        direction.div_(MOMENTUM).add_(momentum).mul_(MOMENTUM)

    def orthogonalize(self, matrix: UpdateRange, direction: Tensor, rate: float) -> None:
        """Change the direction of all elements to the change of the weights, without decay. `rate`: learning rate,
        without the factor of the matrix."""
        _, x, spare, gram, square = self._views(matrix, direction.dtype, direction.device)
        torch.div(direction, torch.linalg.vector_norm(direction).clamp_(min=_LEAST_NORM), out=direction)
        if x.dtype != direction.dtype:
            x.copy_(direction.view_as(x))
        is_wide = matrix.rows <= matrix.columns
        for _ in range(ITERATIONS):
            torch.mm(*((x, x.T) if is_wide else (x.T, x)), out=gram)
            torch.addmm(gram, gram, gram, beta=B, alpha=C, out=square)
            torch.addmm(x, *((square, x) if is_wide else (x, square)), beta=A, out=spare)
            x, spare = spare, x
        size = rate * matrix.rate * _SCALE * math.sqrt(max(matrix.rows, matrix.columns))
        direction.copy_(x.reshape(-1)).mul_(-size)

    def apply(self, weights: Tensor, change: Tensor, matrix: UpdateRange, rate: float) -> None:
        """Update the weights of some elements, [n], after `orthogonalize`."""
        weights.mul_(1 - rate * matrix.rate * matrix.decay).add_(change)

    def _views(self, matrix: UpdateRange, master: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return the scratch memory of a matrix: direction, both X, G, and b G + c G G. In the master dtype, the
        direction is the first X."""
        self.reserve([matrix], master, device)
        memory, compute = self._scratch[device], self._dtype(master, device)
        whole, short = (matrix.rows, matrix.columns), min(matrix.rows, matrix.columns)
        shapes = [(whole, compute), (whole, compute), ((short, short), compute), ((short, short), compute)]
        if compute != master:
            shapes.insert(0, (whole, master))
        views, begin = [], 0
        for shape, dtype in shapes:
            end = begin + math.prod(shape) * dtype.itemsize
            views.append(memory[begin:end].view(dtype).view(shape))
            begin = end
        return [views[0].view(-1), *(views if compute == master else views[1:])]

    def _bytes(self, matrix: UpdateRange, master: torch.dtype, device: torch.device) -> int:
        return scratch_bytes(matrix.rows, matrix.columns, master.itemsize, self._dtype(master, device).itemsize)

    def _dtype(self, master: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of the iterations."""
        return master if device.type == "cpu" else self._compute or master
