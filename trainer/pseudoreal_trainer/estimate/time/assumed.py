"""Assumed machines for phases without a profile: the figures of examples/hardware/gpu-cluster.yaml, and a CPU."""

from pseudoreal_trainer.estimate.time.hardware import (
    Collectives,
    HardwareProfile,
    PassSpeed,
    Precision,
    Speeds,
    TransferSpeed,
)
from pseudoreal_trainer.plan.sizes import Device


def assumed_profile(device: Device) -> HardwareProfile:
    """Return a profile for comparing layouts. All its figures are assumed, not measured."""
    return _GPUS if device == "accelerator" else _CPU


def _passes(speeds: dict[Precision, float]) -> list[PassSpeed]:
    """Return the same speed for all sizes, in operations per second."""
    return [
        PassSpeed(
            compute=compute,
            hidden=1024,
            tokens=1024,
            block_forward_flops_per_second=speed,
            block_backward_flops_per_second=speed,
            head_flops_per_second=speed / 4,
        )
        for compute, speed in speeds.items()
    ]


def _collectives(ranks: int, latency: float, speed: float) -> Collectives:
    once, twice = (TransferSpeed(latency_seconds=seconds, bytes_per_second=speed) for seconds in (latency, 2 * latency))
    return Collectives(ranks=ranks, all_gather=once, reduce_scatter=once, all_reduce=twice)


_GPUS = HardwareProfile(
    name="assumed machines with 8 GPUs of 80 GB",
    overlaps=True,
    device_bytes=74_000_000_000,
    host_bytes=225_000_000_000,
    speeds=[
        Speeds(
            ranks=1,
            passes=_passes({"bfloat16": 4e14, "float32": 5e13, "float64": 5e13}),
            pass_seconds=2e-5,
            memory_bytes_per_second=2.5e12,
            update_on_device_seconds_per_element=1.1e-11,
            update_on_host_seconds_per_element=5.6e-10,
            h2d=TransferSpeed(latency_seconds=1e-5, bytes_per_second=5.5e10),
            d2h=TransferSpeed(latency_seconds=1e-5, bytes_per_second=5.5e10),
            disk_read=TransferSpeed(latency_seconds=1e-4, bytes_per_second=3.4e9),
            disk_write=TransferSpeed(latency_seconds=1e-4, bytes_per_second=1.4e9),
            point_to_point=TransferSpeed(latency_seconds=2e-5, bytes_per_second=4.5e10),
            collectives=[_collectives(8, 3e-5, 3e11), _collectives(64, 2e-4, 4e10)],
            agree_seconds=5e-4,
        )
    ],
)

_MEMORY = TransferSpeed(latency_seconds=1e-6, bytes_per_second=1e10)
_DISK = TransferSpeed(latency_seconds=1e-4, bytes_per_second=1e9)

_CPU = HardwareProfile(
    name="assumed CPUs",
    overlaps=False,
    device_bytes=None,
    host_bytes=None,
    speeds=[
        Speeds(
            ranks=1,
            passes=_passes({"bfloat16": 2e10, "float32": 4e10, "float64": 2e10}),
            pass_seconds=5e-5,
            memory_bytes_per_second=1e10,
            update_on_device_seconds_per_element=2e-9,
            update_on_host_seconds_per_element=2e-9,
            h2d=_MEMORY,
            d2h=_MEMORY,
            disk_read=_DISK,
            disk_write=_DISK,
            point_to_point=TransferSpeed(latency_seconds=1e-4, bytes_per_second=1e9),
            collectives=[_collectives(2, 1e-4, 1e9)],
            agree_seconds=2e-4,
        )
    ],
)
