"""Compare AdamW on the host in one pass over memory with three passes, over vectors larger than all caches: `python -m
benchmarks.one_pass [MiB of a vector] [pieces, in Ki elements ...]`.

Both run alternately in one process, so that other load on the machine affects both. Prints nanoseconds per element and
the median of the ratios.
"""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.engine.state import memory
from pseudoreal_trainer.engine.state.memory import AdamW, Slices
from pseudoreal_trainer.plan.update_ranges import UpdateRange

_ROUNDS, _WARM_UP = 15, 1
_RATE, _CLIP = 1e-3, 0.999


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


@torch.no_grad()
def compare(length: int, piece: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round, with three passes and with one, for bfloat16 compute and float32 master
    weights."""
    weights, first, second, gradient = (torch.rand(length) for _ in range(4))
    slices = Slices(
        weights,
        first,
        second,
        gradient,
        torch.empty(length, dtype=torch.bfloat16),
        (UpdateRange(0, length, decay=0.1),),
    )
    memory.PIECE = piece
    spec, optimizer = Optimizer(), AdamW()
    kernel = memory._kernel(spec, 3, _RATE, _CLIP, weights.device)
    three: list[float] = []
    one: list[float] = []
    for _ in range(_WARM_UP + _ROUNDS):
        three.append(_seconds(lambda: memory._whole(kernel, slices)))
        one.append(_seconds(lambda: optimizer.update(spec, slices, 2, _RATE, _CLIP)))
    return three[_WARM_UP:], one[_WARM_UP:]


def main(arguments: Sequence[str]) -> None:
    length = int(arguments[0] if arguments else 256) * 2**20 // 4
    pieces = [int(argument) * 1024 for argument in arguments[1:]] or [memory.PIECE]
    for piece in pieces:
        three, one = compare(length, piece)
        ratios = [a / b for a, b in zip(three, one, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        print(
            f"{torch.get_num_threads()} threads, pieces of {piece // 1024:5} Ki:"
            f" three passes {median(three) / length * 1e9:.2f} ns, one pass {median(one) / length * 1e9:.2f} ns,"
            f" ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
