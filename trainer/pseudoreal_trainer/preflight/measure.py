"""A product of matrices on the device of a rank, and sums over two ranks: how fast, and whether they are right."""

import time
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

# Of many tries the fastest counts: it is the one that nothing else has held up.
_PRODUCT_SECONDS = 1.0
"""Seconds spent on products: long enough for a GPU to reach its clock, and for what else a CPU has to do to pass."""
_SUMS = 20
# On a CPU a product fits between two turns of the scheduler.
_SIDES = {"cuda": 4096, "cpu": 256}
_NUMBERS = {"cuda": 1 << 24, "cpu": 1 << 18}
"""How many numbers are summed, of four bytes each."""


class WrongSum(ArithmeticError):
    """What arrived is not what was sent."""


def product(device: torch.device) -> tuple[float, bool]:
    """Seconds of the fastest product, and whether all of them were right."""
    left, right = factors(_SIDES[device.type])
    weights = (torch.arange(right.shape[1]) % 5 + 1).double()
    # Whole numbers so small that no order of summation rounds them: the answer is known to the bit.
    expected = left.double() @ (right.double() @ weights)
    left, right = left.to(device), right.to(device)
    fastest, is_right = inf, True
    end = _now(device) + _PRODUCT_SECONDS
    while (begin := _now(device)) < end:
        answer = multiply(left, right)
        fastest = min(fastest, _now(device) - begin)
        is_right &= torch.equal((answer.double() @ weights.to(device)).cpu(), expected)
    return fastest, is_right


def factors(side: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(side * side).reshape(side, side)
    return (index * 7 % 17 - 8).float(), (index * 11 % 13 - 6).float()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def sums(store: Store, number: int, device: torch.device, seconds: float) -> float:
    """Seconds of the fastest sum over two ranks, of which this is `number` 0 or 1.

    Raises WrongSum, and what torch raises after `seconds` without a partner.
    """
    try:
        _open_pair(store, number, device, seconds)
    except Exception:
        _count_anew()
        raise
    try:
        return _sums(number, device)
    finally:
        dist.destroy_process_group()


def _open_pair(store: Store, number: int, device: torch.device, seconds: float) -> None:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _count_anew() -> None:
    """Counts groups anew. Two processes find each other by the number of their group, and one that could not begin is
    counted all the same; the count starts anew once a group has ended as it should."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _sums(number: int, device: torch.device) -> float:
    pattern = (torch.arange(_NUMBERS[device.type]) % 1021).float().to(device)
    seconds = []
    # The first makes the connection.
    for _ in range(1 + _SUMS):
        numbers = pattern * (1 + number)
        begin = _now(device)
        dist.all_reduce(numbers)
        seconds.append(_now(device) - begin)
        if not torch.equal(numbers, pattern * 3):
            raise WrongSum("a sum over two ranks is wrong")
    return min(seconds[1:])


def _now(device: torch.device) -> float:
    """The time (time.perf_counter) once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
