"""Made-up hardware profiles."""

from typing import Any

from pseudoreal_trainer.estimate.time.hardware import Collectives, HardwareProfile, PassSpeed, Speeds, TransferSpeed

FAST = 1e30


def transfer(speed: float = FAST) -> TransferSpeed:
    return TransferSpeed(latency_seconds=0, bytes_per_second=speed)


def profile(*, overlaps: bool = True, ranks: int = 1, flops: float = FAST, **slow: Any) -> HardwareProfile:
    """Return a profile in which only the parts named in `slow` take time."""
    row = PassSpeed(
        compute="float32",
        hidden=32,
        tokens=64,
        block_forward_flops_per_second=flops,
        block_backward_flops_per_second=flops,
        head_flops_per_second=FAST,
    )
    links = {
        name: transfer(slow.pop(name, FAST)) for name in ("h2d", "d2h", "disk_read", "disk_write", "point_to_point")
    }
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    groups = Collectives(ranks=2, **{kind: transfer(slow.pop(kind, FAST)) for kind in kinds})
    fields: dict[str, Any] = {
        "pass_seconds": 0,
        "memory_bytes_per_second": FAST,
        "update_on_device_seconds_per_element": 0,
        "update_on_host_seconds_per_element": 0,
        "agree_seconds": 0,
    }
    speeds = Speeds(ranks=ranks, passes=[row], collectives=[groups], **(fields | links | slow))
    return HardwareProfile(name="made up", overlaps=overlaps, speeds=[speeds])
