"""Change of the loss by products in float8: `python -m benchmarks.float8`. Pairs of runs share seed and samples."""

from statistics import mean, stdev

import torch
from pseudoreal_api.spec.optimizer import Optimizer

from benchmarks import book
from benchmarks.book import WARM_UP

_SEEDS, _RATE, _VALIDATED = range(5), 3e-3, 64


def final_loss(seed: int, *, float8: bool) -> float:
    """Return the validation loss after the last step, in nats per byte."""
    optimizer = Optimizer(beta2="0.95", weight_decay="0.1")

    def rate(step: int) -> float:
        return _RATE * min(1.0, (step + 1) / WARM_UP)

    return book.final_loss(optimizer, rate, seed, _VALIDATED, float8=float8)


def main() -> None:
    torch.set_num_threads(1)
    plain, rounded = ([final_loss(seed, float8=float8) for seed in _SEEDS] for float8 in (False, True))
    pairs = [there - here for here, there in zip(plain, rounded, strict=True)]
    error = stdev(pairs) / len(pairs) ** 0.5
    print(f"loss {mean(plain):.4f}, in float8 {mean(pairs):+.4f} nats, standard error {error:.4f}")


if __name__ == "__main__":
    main()
