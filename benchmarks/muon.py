"""What Muon changes in the loss and what its update costs: `python -m benchmarks.muon [loss | seconds]`.

`loss` trains a small model on a book with AdamW and with Muon, over equal tokens. Each algorithm has its own learning
rate, the best of a bracket with a seed that is not compared; then pairs of runs share seed and samples. `seconds` times
an update of one block on the host, beside AdamW in turns.
"""

import sys
import time
from collections.abc import Sequence
from statistics import mean, median, stdev

import numpy as np
import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.plan.newton_schulz import flops
from pseudoreal_trainer.plan.update_ranges import UpdateRange

from benchmarks import book
from benchmarks.book import STEPS, WARM_UP

_ALGORITHMS = ("AdamW", "Muon")
_RATES = ("4e-3", "8e-3", "1.6e-2", "3.2e-2", "6.4e-2")
_BRACKET_SEED, _SEEDS = 100, range(5)
_SHAPES = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
_ROUNDS = 5


def final_loss(algorithm: str, rate: float, seed: int) -> float:
    """Return the validation loss after the last step, in nats per byte. The rate decays to a tenth."""

    def of_step(step: int) -> float:
        return rate * min((step + 1) / WARM_UP, 1 - 0.9 * (step - WARM_UP) / (STEPS - WARM_UP))

    return book.final_loss(Optimizer.model_validate({"algorithm": algorithm}), of_step, seed, 128)


def compare_losses() -> None:
    best: dict[str, float] = {}
    for algorithm in _ALGORITHMS:
        bracket = {rate: final_loss(algorithm, float(rate), _BRACKET_SEED) for rate in _RATES}
        best[algorithm] = float(min(bracket, key=lambda rate: bracket[rate]))
        print(f"{algorithm}: " + ", ".join(f"{rate} {loss:.4f}" for rate, loss in bracket.items()), flush=True)
    losses = {algorithm: [final_loss(algorithm, rate, seed) for seed in _SEEDS] for algorithm, rate in best.items()}
    pairs = [muon - adamw for adamw, muon in zip(*losses.values(), strict=True)]
    error = stdev(pairs) / len(pairs) ** 0.5
    print(f"AdamW {mean(losses['AdamW']):.4f}, Muon {mean(pairs):+.4f} nats per byte, standard error {error:.4f}")


def compare_seconds(threads: int) -> None:
    """Print the seconds of an update of a block with 12.6 M parameters."""
    torch.set_num_threads(threads)
    length = sum(rows * columns for rows, columns in _SHAPES)
    weights, gradient, first, second = (torch.rand(length) for _ in range(4))
    ends = np.cumsum([rows * columns for rows, columns in _SHAPES]).tolist()
    begins = [0, *ends[:-1]]
    matrices = tuple(
        UpdateRange(begin, end, decay=0.1, columns=columns)
        for begin, end, (_, columns) in zip(begins, ends, _SHAPES, strict=True)
    )
    arms = {"AdamW": (UpdateRange(0, length, decay=0.1),), "Muon": matrices}
    optimizer, found = AdamW(), dict[str, list[float]]()
    for turn in range(_ROUNDS + 1):
        for algorithm, ranges in arms.items():
            slices = Slices(weights, first, second, gradient, torch.empty(length, dtype=torch.bfloat16), ranges)
            begin = time.perf_counter()
            optimizer.update(Optimizer(), slices, turn, 1e-3, 0.99)
            found.setdefault(algorithm, []).append(time.perf_counter() - begin)
    adamw, muon = (median(found[algorithm][1:]) for algorithm in _ALGORITHMS)
    operations = sum(flops(*shape) for shape in _SHAPES)
    print(
        f"{threads} threads: AdamW {1e3 * adamw:.0f} ms, Muon {1e3 * muon:.0f} ms,"
        f" {operations / (muon - adamw) / 1e9:.0f} GFLOP/s in its products"
    )


def main(arguments: Sequence[str]) -> None:
    if "loss" not in arguments:
        for threads in (1, 2):
            compare_seconds(threads)
    torch.set_num_threads(1)
    if "seconds" not in arguments:
        compare_losses()


if __name__ == "__main__":
    main(sys.argv[1:])
