"""Products of experts on a CPU, forward and backward: in a loop, and by torch's grouped product.

In one thread, alternately: `python -m benchmarks.moe.steps.grouped RESULT`.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.progress import progress
from pydantic import TypeAdapter
from torch import Tensor
from torch.nn import functional as F

from benchmarks.agreement import LossesDiffer
from benchmarks.moe.results import LOG, Product
from benchmarks.moe.steps.turns import ENVIRONMENT

COUNTS = (16, 64, 256)
ROWS, INPUTS, OUTPUTS = 8192, 128, 256
TURNS = 9
NEW, LOOP, GROUPED = "loop, new numbers of rows", "loop", "grouped"
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_Way = Callable[[Tensor, Tensor, list[int]], Tensor]


def _loop(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(sizes), weights, strict=True)])


def _grouped(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


_WAYS: dict[str, _Way] = {LOOP: _loop, GROUPED: _grouped}


def measure() -> list[Product]:
    with tempfile.TemporaryDirectory() as folder, progress.step("products of experts", log=LOG):
        file = Path(folder, "result.json")
        shell.run([sys.executable, "-m", "benchmarks.moe.steps.grouped", str(file)], LOG, environment=ENVIRONMENT)
        return TypeAdapter(list[Product]).validate_json(file.read_bytes())


@dataclass
class Operands:
    rows: Tensor
    """[ROWS, in], ordered by expert."""
    weights: Tensor
    """[experts, out, in]."""


def operands(experts: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    rows = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float32).to(dtype)
    weights = torch.randn(experts, OUTPUTS, INPUTS, generator=generator, dtype=torch.float32).to(dtype)
    return Operands(rows.requires_grad_(), weights.requires_grad_())


def sizes_of(experts: int, rows: int, generator: torch.Generator) -> list[int]:
    """Draw an expert for each row, and return the number of rows of each expert. In training, too, the numbers differ
    between steps."""
    return torch.randint(experts, (rows,), generator=generator).bincount(minlength=experts).tolist()


def products(experts: int, dtype: torch.dtype) -> list[Product]:
    """Measure both ways alternately. Raises LossesDiffer unless the results are equal to the bit."""
    generator = torch.Generator().manual_seed(experts)
    given, name = operands(experts, dtype, generator), str(dtype).removeprefix("torch.")
    draws = [sizes_of(experts, ROWS, generator) for _ in range(TURNS + 1)]
    try:
        if not torch.equal(*(way(given.rows, given.weights, draws[0]) for way in _WAYS.values())):
            raise LossesDiffer(f"{experts} experts in {name}: the grouped product is another one than the loop's")
    except (RuntimeError, ValueError) as error:
        failed = Product(experts=experts, dtype=name, way=GROUPED, error=str(error).splitlines()[0])
        return [*_timed({LOOP: _loop}, given, draws, experts, name), failed]
    return _timed(_WAYS, given, draws, experts, name)


def _timed(ways: dict[str, _Way], given: Operands, draws: list[list[int]], experts: int, dtype: str) -> list[Product]:
    taken: dict[str, list[float]] = {NEW: [], **{name: [] for name in ways}}
    for turn, sizes in enumerate(draws):
        taken[NEW].append(_seconds(_loop, given, sizes))
        for name in sorted(ways, reverse=turn % 2 == 1):
            taken[name].append(_seconds(ways[name], given, sizes))
    return [Product(experts=experts, dtype=dtype, way=name, turns=seconds[1:]) for name, seconds in taken.items()]


def _seconds(way: _Way, given: Operands, sizes: list[int]) -> float:
    """Return processor seconds, which exclude other programs."""
    begin = time.thread_time()
    out = way(given.rows, given.weights, sizes)
    # On the CPU, autograd runs on this thread.
    torch.autograd.grad(out, (given.rows, given.weights), out.detach())
    return time.thread_time() - begin


def main(result: Path) -> None:
    torch.set_num_threads(1)
    found = [each for dtype in DTYPES for experts in COUNTS for each in products(experts, dtype)]
    result.write_bytes(TypeAdapter(list[Product]).dump_json(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
