"""The home of each unit's state. Pure.

A budget moves as few units as possible. The blocks that the forward pass needs last move first: the next step needs
their updates latest, and their copies may stay in the window between forward and backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pseudoreal_api.quantity import bytes_of, readable_bytes
from pseudoreal_api.spec.phase import Home, Offload, OffloadBudget

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.tiers import Tiers, min_resident_device_bytes, resident_bytes, unit_state
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import EMBEDDING, HEAD, Unit, block_name, block_of


@dataclass(frozen=True)
class Bounds:
    """Limits in bytes for a rank. None: no limit."""

    device: int | None = None
    host: int | None = None


def budget_bounds(budget: OffloadBudget | None) -> Bounds:
    if budget is None:
        return Bounds()
    return Bounds(*(None if bound is None else bytes_of(bound) for bound in (budget.device, budget.host)))


Peaks = tuple[Tiers, ...]
"""Peak bytes of activations on each pipeline rank, by tier."""


def activation_peaks(layout: Layout, sizes: Sizes) -> Peaks:
    """Return the activation peaks of a step, which depend on neither homes nor sharding. Builds the plan of a whole
    step."""
    at_home = replace(layout, homes=(), sharding="None")
    return tuple(activation_peak(layout, sizes, rank, records) for rank, records in enumerate(step_plan(at_home)))


def homes_from_spec(offload: Offload, sizes: Sizes) -> tuple[Home, ...]:
    """Return the home of each unit: its entry in `homes`, or else `home`. An entry for a block also applies to the
    experts of the same number, unless these experts have an entry."""
    if not offload.homes:
        return (offload.home,) * len(sizes.units)
    named: dict[str, Home] = {entry.unit: entry.home for entry in offload.homes}
    blocks = (named.get(_block_name(unit), offload.home) for unit in sizes.units)
    return tuple(named.get(unit.name, home) for unit, home in zip(sizes.units, blocks, strict=True))


def _block_name(unit: Unit) -> str:
    block = block_of(unit.name)
    return unit.name if block is None else block_name(block)


def choose_homes(offload: Offload, layout: Layout, sizes: Sizes, peaks: Peaks) -> tuple[Home, ...]:
    """Return the home of each unit: the home that the spec names, or a farther one if the budget forces the unit
    out."""
    activation_bytes = [peak.device for peak in peaks]
    return _move_units(
        offload, layout, sizes, activation_bytes, lambda moved, rank: resident_bytes(moved, sizes, rank).device
    )


def nearest_homes(offload: Offload, layout: Layout, sizes: Sizes) -> tuple[Home, ...]:
    """Return the nearest possible home of each unit: its home if there were no activations and as few resident bytes as
    possible.

    A rank moves units in a fixed order until the rest fits. With less room, it moves the same units and then more. If
    ranks share units, a move by one rank may make room on another rank: then only the homes named in the spec are
    certain.
    """
    if any(len(users) > 1 for users in layout.users):
        return homes_from_spec(offload, sizes)
    return _move_units(
        offload, layout, sizes, [0] * layout.pipeline, lambda now, rank: min_resident_device_bytes(now, sizes, rank)
    )


def _move_units(
    offload: Offload, layout: Layout, sizes: Sizes, activation_bytes: Sequence[int], needs: Callable[[Layout, int], int]
) -> tuple[Home, ...]:
    """Return the home of each unit after the budget has moved units. `activation_bytes`: device bytes of activations on
    each pipeline rank. `needs`: returns the other device bytes that a rank needs."""
    named = {entry.unit for entry in offload.homes}
    movable = [
        unit
        for unit in _order_of_moving(layout, sizes)
        if named.isdisjoint({sizes.units[unit].name, _block_name(sizes.units[unit])})
    ]
    choice, bounds = (
        _HomeChoice(layout, sizes, movable, [*homes_from_spec(offload, sizes)]),
        budget_bounds(offload.budget),
    )
    if bounds.device is not None:
        room = [bounds.device - size for size in activation_bytes]
        choice.move("Device", "Host", room, lambda state: state.device, needs)
    if bounds.host is not None:
        choice.move("Host", "Disk", [bounds.host] * layout.pipeline, lambda state: state.host)
    return tuple(choice.homes)


@dataclass(frozen=True)
class _HomeChoice:
    layout: Layout
    sizes: Sizes
    movable: list[int]
    """Units, in the order in which they move."""
    homes: list[Home]
    """Home of each unit after the moves so far."""

    def move(
        self,
        source: Home,
        target: Home,
        room: Sequence[int],
        part: Callable[[Tiers], int],
        needs: Callable[[Layout, int], int] | None = None,
    ) -> None:
        """Move units until every rank fits, or has no movable unit left. `room`: bytes available on each pipeline rank.
        `part`: returns the bytes of a unit's state that use this room. `needs`: returns all bytes of a rank that use
        this room, including the state; None: only the state does."""
        near, far = (self.layout.with_homes((home,) * self.layout.units) for home in (source, target))
        for rank in range(self.layout.pipeline):
            now, local = self._now, self.layout.local_units(rank)
            state = sum(part(unit_state(now, self.sizes, unit)) for unit in local)
            for unit in self.movable:
                if rank not in self.layout.users[unit] or self.homes[unit] != source:
                    continue
                # Check the state first: its bytes are cheap to compute.
                if state <= room[rank] and (needs is None or needs(self._now, rank) <= room[rank]):
                    break
                self.homes[unit] = target
                state += part(unit_state(far, self.sizes, unit)) - part(unit_state(near, self.sizes, unit))

    @property
    def _now(self) -> Layout:
        return self.layout.with_homes(tuple(self.homes))


def host_state(layout: Layout, sizes: Sizes, rank: int) -> int:
    """Return the bytes of state that a rank keeps on its host."""
    return sum(unit_state(layout, sizes, unit).host for unit in layout.local_units(rank))


def budget_violations(layout: Layout, sizes: Sizes, peaks: Peaks, budget: Bounds) -> list[str]:
    """Return one sentence for each limit of the budget that some rank exceeds. The sentence is about the rank that
    exceeds the limit most. On the host, a budget limits only the state."""
    state = [host_state(layout, sizes, rank) for rank in range(layout.pipeline)]
    return [
        *_violations(
            [peak.device for peak in _peak_bytes(layout, sizes, peaks)],
            budget.device,
            "offload.budget.device",
            _device_remedy(layout),
        ),
        *_violations(state, budget.host, "offload.budget.host", _HOST),
    ]


def machine_violations(layout: Layout, sizes: Sizes, peaks: Peaks, machine: Bounds) -> list[str]:
    """Return one sentence for each limit of the machine that some rank exceeds. On the host, buffers count as well."""
    needs, profile = _peak_bytes(layout, sizes, peaks), "the hardware profile's"
    return [
        *_violations(
            [peak.device for peak in needs], machine.device, f"{profile} device_bytes", _device_remedy(layout)
        ),
        *_violations([peak.host for peak in needs], machine.host, f"{profile} host_bytes", _HOST),
    ]


def _device_remedy(layout: Layout) -> str:
    may_group = layout.order == "Layered" and any(map(layout.has_experts, range(layout.head)))
    groups = " cut experts into groups (offload.expertGroups)," if may_group else ""
    return (
        f"let more units move (offload.budget, offload.homes), lower offload.window,{groups} raise batch.microBatches,"
        " or take more ranks"
    )


_HOST = "let units move to disk (offload.budget, offload.homes), or take more ranks"


def _peak_bytes(layout: Layout, sizes: Sizes, peaks: Peaks) -> list[Tiers]:
    """Return the peak bytes of each pipeline rank, by tier."""
    return [resident_bytes(layout, sizes, rank) + peak for rank, peak in enumerate(peaks)]


def _violations(needs: Sequence[int], bound: int | None, source: str, remedy: str) -> list[str]:
    if bound is None:
        return []
    rank = max(range(len(needs)), key=needs.__getitem__)
    if needs[rank] <= bound:
        return []
    return [
        f"{source} is {readable_bytes(bound)}, but pipeline rank {rank} needs {readable_bytes(needs[rank])} there,"
        f" {readable_bytes(needs[rank] - bound)} ({needs[rank] - bound} bytes) more; {remedy}"
    ]


def _order_of_moving(layout: Layout, sizes: Sizes) -> list[int]:
    """Return the units in the order in which they move: experts first, from the latest first use to the earliest; then
    blocks in the same order; then the two small units at the ends. Experts come first because they have the most bytes,
    and each token needs few of them."""
    positions = reversed(range(layout.head + 1))
    first_use = {unit: position for position in positions for unit in layout.units_of(position)}
    ends = [unit for unit in first_use if sizes.units[unit].name in (EMBEDDING, HEAD)]
    layers = sorted(first_use.keys() - set(ends), key=first_use.__getitem__, reverse=True)
    return [*sorted(layers, key=lambda unit: not sizes.units[unit].is_experts), *sorted(ends, reverse=True)]
