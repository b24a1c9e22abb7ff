"""What moments in bfloat16 and in blocks of 8-bit floats cost in seconds, and what they change in the loss: `python -m
benchmarks.moments [seconds | loss]`.

`seconds` times an update on the host with moments in float32, in bfloat16 and in blocks, in turns, so that other load
on the machine affects all of them. `loss` trains a small model on a book, in pairs that share seed and samples: moments
in float32, and in both other formats with stochastic rounding and rounded to the nearest, which the product does not
offer.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median, stdev
from typing import Literal
from unittest.mock import patch

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.state.blocks import BLOCKS, put, stored_length
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.engine.state.rounding import MomentRounding, RandomRange
from pseudoreal_trainer.plan.update_ranges import UpdateRange

from benchmarks import book
from benchmarks.book import WARM_UP

Arm = Literal["float32", "bfloat16", "bfloat16, nearest", "blocks", "blocks, nearest"]
_ARMS: tuple[Arm, ...] = ("float32", "bfloat16", "bfloat16, nearest", "blocks", "blocks, nearest")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "blocks": BLOCKS}
_ELEMENTS, _ROUNDS = 1 << 25, 9
_SEEDS, _RATE = range(5), 3e-3
_BETAS2 = ("0.95", "0.999")


def seconds_per_element(threads: int) -> dict[torch.dtype, float]:
    """Return dtype of the moments -> median seconds of an update that clips, per element."""
    torch.set_num_threads(threads)
    optimizer, found = AdamW(), dict[torch.dtype, list[float]]()
    slices = {dtype: _slices(dtype) for dtype in _DTYPES.values()}
    for turn in range(_ROUNDS + 1):
        for dtype, of_dtype in slices.items():
            begin = time.perf_counter()
            optimizer.update(Optimizer(), of_dtype, turn, 1e-3, 0.99)
            found.setdefault(dtype, []).append(time.perf_counter() - begin)
    return {dtype: median(seconds[1:]) / _ELEMENTS for dtype, seconds in found.items()}


def _slices(moments: torch.dtype) -> Slices:
    weights, gradient = (torch.rand(_ELEMENTS) for _ in range(2))
    first, second = (torch.empty(stored_length(_ELEMENTS, moments), dtype=moments) for _ in range(2))
    put("first_moment", torch.rand(_ELEMENTS), first)
    put("second_moment", torch.rand(_ELEMENTS), second)
    compute, ranges = torch.empty(_ELEMENTS, dtype=torch.bfloat16), (UpdateRange(0, _ELEMENTS, decay=0.1),)
    return Slices(weights, first, second, gradient, compute, ranges, random=(RandomRange(0, _ELEMENTS, 1, 0),))


def final_loss(arm: Arm, seed: int, beta2: str) -> float:
    """Return the validation loss after the last step, in nats per byte."""
    optimizer = Optimizer(beta2=beta2, weight_decay="0.1")
    with _rounding(arm):
        moments = _DTYPES[arm.partition(",")[0]]
        return book.final_loss(optimizer, lambda step: _RATE * min(1.0, (step + 1) / WARM_UP), seed, 64, moments)


@contextmanager
def _rounding(arm: Arm) -> Iterator[None]:
    """Rounded to the nearest, all random bits are one half of the last place; ties, which are rare, are rounded away
    from zero."""
    if not arm.endswith("nearest"):
        yield
        return

    def half(self: MomentRounding, _: object, __: int, length: int, ___: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._words[:length].fill_(1 << 15), self._shifted[:length].fill_(1 << 15)

    with patch.object(MomentRounding, "_random_halves", half):
        yield


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    if "loss" not in arguments:
        for threads in (1, 2):
            found = seconds_per_element(threads)
            wide = found[torch.float32]
            formats = [
                f"{name} {1e9 * found[dtype]:.2f} ns ({found[dtype] / wide:.2f})" for name, dtype in _DTYPES.items()
            ]
            print(f"{threads} threads: {', '.join(formats)}")
    torch.set_num_threads(1)
    if "seconds" not in arguments:
        for beta2 in _BETAS2:
            losses = {arm: [final_loss(arm, seed, beta2) for seed in _SEEDS] for arm in _ARMS}
            print(f"beta2 {beta2}: loss with float32 {mean(losses['float32']):.4f}")
            for arm in _ARMS[1:]:
                pairs = [a - b for a, b in zip(losses[arm], losses["float32"], strict=True)]
                error = stdev(pairs) / len(pairs) ** 0.5
                print(f"  {arm}: {mean(pairs):+.4f} nats, standard error {error:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
