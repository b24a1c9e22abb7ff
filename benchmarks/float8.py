"""Change of the loss by products in float8: `python -m benchmarks.float8`. Pairs of runs share seed and samples."""

from statistics import mean, stdev

import torch
from pseudoreal_api.spec.optimizer import Optimizer, ProductFormat

from benchmarks import book
from benchmarks.book import WARM_UP

_SEEDS, _RATE, _VALIDATED = range(5), 3e-3, 64
_FORMATS: tuple[ProductFormat, ...] = ("Float8", "MXFP8")


def final_loss(seed: int, products: ProductFormat) -> float:
    """Return the validation loss after the last step, in nats per byte."""
    optimizer = Optimizer(beta2="0.95", weight_decay="0.1")

    def rate(step: int) -> float:
        return _RATE * min(1.0, (step + 1) / WARM_UP)

    return book.final_loss(optimizer, rate, seed, _VALIDATED, products=products)


def main() -> None:
    torch.set_num_threads(1)
    plain = [final_loss(seed, "Compute") for seed in _SEEDS]
    print(f"loss {mean(plain):.4f}")
    for products in _FORMATS:
        pairs = [final_loss(seed, products) - before for seed, before in zip(_SEEDS, plain, strict=True)]
        print(f"{products}: {mean(pairs):+.4f} nats, standard error {stdev(pairs) / len(pairs) ** 0.5:.4f}", flush=True)


if __name__ == "__main__":
    main()
