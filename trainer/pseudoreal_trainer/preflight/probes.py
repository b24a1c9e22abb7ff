"""Probes of one rank: matrix products on its device and all-reduces with one partner; speed and correctness."""

import time
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.plan.sizes import Device

# Each measurement reports the fastest of many tries: other load has delayed that try least.
_PRODUCT_SECONDS = 1.0
"""Seconds spent on products, long enough for a GPU to reach its clock and for other load on a CPU to pass."""
_SUMS = 20
# On a CPU, 256 is small enough for a product to finish within one time slice of the scheduler.
_SIDES: dict[Device, int] = {"accelerator": 4096, "cpu": 256}
_NUMBERS: dict[Device, int] = {"accelerator": 1 << 24, "cpu": 1 << 18}
"""Number of float32 elements in an all-reduce."""


class WrongSum(ArithmeticError):
    """The result of an all-reduce is wrong."""


def product(device: torch.device) -> tuple[float, bool]:
    """Return the seconds of the fastest product, and whether all products were correct."""
    left, right = factors(_SIDES[kind_of(device)])
    weights = (torch.arange(right.shape[1]) % 5 + 1).double()
    # Integers small enough that no order of summation rounds: the expected result is exact.
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
    """Return the seconds of the fastest all-reduce between two ranks. `number`: 0 or 1, this rank's place in the pair.

    Raises WrongSum, and torch's error after `seconds` without a partner.
    """
    try:
        _open_pair(store, number, device, seconds)
    except Exception:
        _reset_group_counter()
        raise
    try:
        return _sums(number, device)
    finally:
        dist.destroy_process_group()


def _open_pair(store: Store, number: int, device: torch.device, seconds: float) -> None:
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=store,
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=seconds),
        device_id=None if device.type == "cpu" else device,
    )


def _reset_group_counter() -> None:
    """Reset torch's counter of process groups by opening and closing a group of one rank.

    Two processes find each other in the store by the number of their group. The counter also counts groups that failed
    to open, so the numbers of two processes may differ. It restarts once a group has been closed properly.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _sums(number: int, device: torch.device) -> float:
    pattern = (torch.arange(_NUMBERS[kind_of(device)]) % 1021).float().to(device)
    seconds = []
    # The first all-reduce opens the connection and is not timed.
    for _ in range(1 + _SUMS):
        numbers = pattern * (1 + number)
        begin = _now(device)
        dist.all_reduce(numbers)
        seconds.append(_now(device) - begin)
        if not torch.equal(numbers, pattern * 3):
            raise WrongSum("a sum over two ranks is wrong")
    return min(seconds[1:])


def _now(device: torch.device) -> float:
    """Return time.perf_counter() after the device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
