"""Hardware profile: the speeds of a machine. `pseudoreal measure-hardware` writes it, predictions read it."""

from bisect import bisect
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Precision = Literal["bfloat16", "float32", "float64"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TransferSpeed(_Model):
    latency_seconds: Seconds
    bytes_per_second: Rate

    def seconds(self, size: int) -> float:
        return self.latency_seconds + size / self.bytes_per_second if size else 0.0


class Collectives(_Model):
    """Speeds of collectives among `ranks` ranks, all active at the same time."""

    ranks: int = Field(ge=2)
    all_gather: TransferSpeed = Field(description="For the bytes that each rank sends, as in bytes_moved_per_step.")
    reduce_scatter: TransferSpeed
    all_reduce: TransferSpeed


class PassSpeed(_Model):
    """Effective speed of forward and backward passes over `tokens` tokens, with all overhead included."""

    compute: Precision
    hidden: int = Field(ge=1)
    tokens: int = Field(ge=1)
    block_forward_flops_per_second: Rate
    block_backward_flops_per_second: Rate = Field(description="Without the forward pass that recomputation repeats.")
    head_flops_per_second: Rate = Field(description="Forward and backward pass of the final norm, head and loss.")
    scratch_share: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="What kernels held for themselves in a block's backward pass, for each byte that the plan counts.",
    )


class Speeds(_Model):
    """Speeds of one rank while `ranks` ranks of a machine do the same at the same time."""

    ranks: int = Field(ge=1)
    passes: list[PassSpeed] = Field(min_length=1)
    pass_seconds: Seconds = Field(description="What a record of the plan costs besides its computation.")
    memory_bytes_per_second: Rate = Field(description="Device memory, read and written.")
    update_on_device_seconds_per_element: Seconds = Field(description="Clipping, AdamW and the cast to bfloat16.")
    update_on_host_seconds_per_element: Seconds
    host_flops_per_second: Rate | None = Field(
        None, description="Of float32 matrix products on the host. null: not measured."
    )
    h2d: TransferSpeed
    d2h: TransferSpeed
    disk_read: TransferSpeed
    disk_write: TransferSpeed
    point_to_point: TransferSpeed
    collectives: list[Collectives]
    agree_seconds: Seconds = Field(description="A sum of a few numbers over all ranks.")


class HardwareProfile(_Model):
    version: Literal[1] = 1
    name: str
    overlaps: bool = Field(
        description="Copies, collectives and updates run beside compute, as on a GPU. False: all of them share the"
        " cores that compute uses."
    )
    device_bytes: int | None = Field(None, ge=1, description="Memory of a rank's device for tensors. null: not known.")
    host_bytes: int | None = Field(
        None, ge=1, description="Host memory of a rank, for its state and its buffers. null: not known."
    )
    speeds: list[Speeds] = Field(min_length=1)

    def for_ranks(self, ranks: int) -> Speeds:
        """Return the speeds measured with this number of ranks on the machine. If there are none, return the speeds for
        the next smaller number of ranks, or else for the smallest."""
        known = sorted(self.speeds, key=lambda speeds: speeds.ranks)
        return known[max(0, bisect([speeds.ranks for speeds in known], ranks) - 1)]


def read_profile(path: Path) -> HardwareProfile:
    """Return the profile at `path`. Raises ValueError if the file cannot be read or is not a profile."""
    try:
        return HardwareProfile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"the hardware profile {path} is not one: {where}: {first['msg']};"
            " `pseudoreal measure-hardware` writes a new one"
        ) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"the hardware profile {path} cannot be read: {error}") from error


def collectives_for(speeds: Speeds, ranks: int) -> Collectives:
    """Return the collectives of the smallest measured group with at least `ranks` ranks; if all measured groups are
    smaller, of the largest group. Raises ValueError if no collectives were measured."""
    if not speeds.collectives:
        raise ValueError(
            f"the hardware profile has no collectives, but the phase has groups of {ranks} ranks; measure it on a"
            " machine with more than one core or device"
        )
    by_size = sorted(speeds.collectives, key=lambda known: known.ranks)
    return next((known for known in by_size if known.ranks >= ranks), by_size[-1])


def pass_speed(speeds: Speeds, compute: Precision, hidden: int, tokens: int) -> PassSpeed:
    """Return the speed of a pass: log-linear interpolation between measured points, and the nearest point outside of
    them. Raises ValueError if the profile has no measurement in this precision."""
    rows = [row for row in speeds.passes if row.compute == compute]
    if not rows:
        raise ValueError(
            f"the hardware profile has no speeds for precision.compute {compute}; measure anew, or take one of"
            f" {', '.join(sorted({row.compute for row in speeds.passes}))}"
        )

    def value(field: str, more: float = 0.0) -> float:
        """`more`: offset added to the values during the interpolation, because 0 has no logarithm."""
        widths = sorted({row.hidden for row in rows})
        found = _between([(width, _along_tokens(rows, width, tokens, field, more)) for width in widths], hidden)
        return max(0.0, found - more)

    return PassSpeed(
        compute=compute,
        hidden=hidden,
        tokens=tokens,
        block_forward_flops_per_second=value("block_forward_flops_per_second"),
        block_backward_flops_per_second=value("block_backward_flops_per_second"),
        head_flops_per_second=value("head_flops_per_second"),
        scratch_share=value("scratch_share", 1.0),
    )


def _along_tokens(rows: Sequence[PassSpeed], hidden: int, tokens: int, field: str, more: float) -> float:
    return _between(sorted((row.tokens, more + getattr(row, field)) for row in rows if row.hidden == hidden), tokens)


def _between(points: Sequence[tuple[int, float]], at: int) -> float:
    places = [place for place, _ in points]
    upper = bisect(places, at)
    if upper in (0, len(points)):
        return points[min(upper, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    share = log(at / x0) / log(x1 / x0)
    return exp(log(y0) + share * (log(y1) - log(y0)))
