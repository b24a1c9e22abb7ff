"""What gradients in bfloat16 cost in seconds, and what they change in the loss: `python -m benchmarks.gradients
[seconds | loss]`.

`seconds` times an update on the host with gradients in float32 and in bfloat16, in turns, so that other load on the
machine affects both. `loss` trains a small model on a book, in pairs that share seed and samples.
"""

import sys
import time
from collections.abc import Sequence
from statistics import mean, median, stdev

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.plan.update_ranges import UpdateRange

from benchmarks import book
from benchmarks.book import WARM_UP

_ARMS = (torch.float32, torch.bfloat16)
_ELEMENTS, _ROUNDS = 1 << 25, 9
_SEEDS, _RATE = range(5), 3e-3
_BETAS2 = ("0.95", "0.999")


def seconds_per_element(threads: int, scale: float) -> list[float]:
    """Return the median seconds of an update with this clip factor, per element, for each dtype of the gradient."""
    torch.set_num_threads(threads)
    optimizer, (weights, first, second) = AdamW(), (torch.rand(_ELEMENTS) for _ in range(3))
    compute, ranges = torch.empty(_ELEMENTS, dtype=torch.bfloat16), (UpdateRange(0, _ELEMENTS, decay=0.1),)
    gradients, found = [torch.rand(_ELEMENTS).to(dtype) for dtype in _ARMS], [list[float]() for _ in _ARMS]
    for turn in range(_ROUNDS + 1):
        for gradient, seconds in zip(gradients, found, strict=True):
            slices = Slices(weights, first, second, gradient, compute, ranges)
            begin = time.perf_counter()
            optimizer.update(Optimizer(), slices, turn, 1e-3, scale)
            seconds.append(time.perf_counter() - begin)
    return [median(seconds[1:]) / _ELEMENTS for seconds in found]


def final_loss(gradients: torch.dtype, seed: int, beta2: str) -> float:
    """Return the validation loss after the last step, in nats per byte."""
    optimizer = Optimizer(beta2=beta2, weight_decay="0.1")
    return book.final_loss(
        optimizer, lambda step: _RATE * min(1.0, (step + 1) / WARM_UP), seed, 64, gradients=gradients
    )


def main(arguments: Sequence[str]) -> None:
    if "loss" not in arguments:
        for threads in (1, 2):
            for scale in (1.0, 0.99):
                wide, rounded = seconds_per_element(threads, scale)
                print(
                    f"{threads} threads, factor {scale}: float32 {1e9 * wide:.2f} ns, bfloat16 {1e9 * rounded:.2f} ns"
                )
    torch.set_num_threads(1)
    if "seconds" not in arguments:
        for beta2 in _BETAS2:
            losses = {dtype: [final_loss(dtype, seed, beta2) for seed in _SEEDS] for dtype in _ARMS}
            pairs = [a - b for a, b in zip(losses[torch.bfloat16], losses[torch.float32], strict=True)]
            error = stdev(pairs) / len(pairs) ** 0.5
            usual = mean(losses[torch.float32])
            print(f"beta2 {beta2}: loss {usual:.4f}, bfloat16 {mean(pairs):+.6f} nats, standard error {error:.6f}")


if __name__ == "__main__":
    main(sys.argv[1:])
