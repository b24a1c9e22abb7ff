"""The fastest layouts of a phase, best first. Layouts that a forecast cannot tell apart in seconds are ordered by their
free memory. Pure.

Layouts wait in a priority queue ordered by a lower bound on their seconds. A layout that reaches the front is
simulated, and waits again with its simulated seconds. The first simulated layout to reach the front is therefore the
fastest of all, and most layouts are never simulated. Most layouts have only a bound that they share with others, the
seconds of their passes; a layout with this bound that reaches the front waits once more with the bound of all its
resources. With a budget that moves units, the second bound assumes the nearest possible homes; a layout that reaches
the front waits once more with the bound for its own homes, whose choice needs a plan of the step.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.optimizer import MomentFormat
from pseudoreal_api.spec.phase import Home

from pseudoreal_trainer.estimate.fit import activations_fit, least_state_fits, room, state_fits, violations
from pseudoreal_trainer.estimate.search.bound import min_pass_seconds, min_step_seconds
from pseudoreal_trainer.estimate.search.space import (
    Choice,
    StateChoice,
    choices,
    chosen,
    context_choices,
    tensor_choices,
)
from pseudoreal_trainer.estimate.time.costs import ROUNDING_ON_GPU, ROUNDING_ON_HOST, MeasuredCosts
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.estimate.time.predict import STEPS
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes
from pseudoreal_trainer.plan.memory.homes import Peaks, activation_peaks, choose_homes, nearest_homes
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.sizes import Device, Sizes

Homes = tuple[Home, ...]
"""Home of each unit."""

SECONDS_RESOLUTION = 0.01
"""Largest difference between the seconds of two steps, as a share of the smaller one, that counts as none."""
MEMORY_STEPS = 10
"""Number of steps in which free memory is compared: a forecast of the peak is accurate to a tenth."""


@dataclass(frozen=True)
class Found:
    """A layout that fits, and the seconds of its step."""

    choice: Choice
    seconds: float
    free_memory: int
    """Free device memory of the rank that has the least, in whole tenths of the device; 0 if the device's memory is not
    known."""


@dataclass
class Counts:
    """Statistics of a search."""

    layouts: int = 0
    too_large: int = 0
    simulated: int = 0


class Search:
    """Search for the fastest layouts of one phase."""

    def __init__(self, config: PhaseConfig, device: Device, profile: HardwareProfile, threads: int) -> None:
        self._config, self._profile = config, profile
        has_budget = config.offload.budget is not None
        self._least = _with_fastest_updates(profile, config.optimizer.moments) if has_budget else profile
        """Profile for lower bounds. With a budget, updates on devices are at least as fast as on hosts, because the
        budget may move units to hosts."""
        self._device, self._threads = device, threads
        self._sizes: dict[tuple[int, int], Sizes] = {}
        """(expert ranks, tensor ranks) -> sizes with a rank's own part of the units."""
        self._peaks: dict[Choice, Peaks] = {}
        """Choice without its sharding and replicas, on which activation peaks do not depend -> activation peaks. Shared
        because building the plan of a step takes the longest."""
        self._alike: dict[tuple[int, bool], Layout] = {}
        """(pipeline ranks, whether layers are assigned to them round-robin) -> the first layout with this assignment.
        Later layouts with the same assignment share its cached properties."""
        self._pass_seconds: dict[Choice, float] = {}
        """Choice without the fields on which passes do not depend -> lower bound on the seconds of a step."""
        self._nearest: dict[StateChoice, Homes | None] = {}
        self._homes: dict[Choice, Homes | None] = {}
        """Choice without its replicas -> homes; None: the layout does not fit."""
        self.counts = Counts()

    def fastest(self) -> Iterator[Found]:
        """Yield the layouts that fit, fastest first. Layouts at most `SECONDS_RESOLUTION` slower than the fastest of
        them count as equally fast, and are sorted by free memory, most first, then by simplicity. Raises ValueError if
        the profile lacks a figure needed by the phase."""
        equal: list[Found] = []
        for found in self._by_seconds():
            if equal and found.seconds > equal[0].seconds * (1 + SECONDS_RESOLUTION):
                yield from _by_free_memory(equal)
                equal = []
            equal.append(found)
        yield from _by_free_memory(equal)

    def _by_seconds(self) -> Iterator[Found]:
        """Yield the layouts that fit, fastest first: layouts with whole matrices, or, if none of them fits, layouts
        with matrices over tensor ranks. Both together would take three times as long."""
        config = self._config
        cuts = [(context, tensor) for context in context_choices(config) for tensor in tensor_choices(config, context)]
        for is_whole in (True, False):
            found = self._fastest_of([cut for cut in cuts if (cut[1] == 1) == is_whole])
            if (first := next(found, None)) is not None:
                yield first
                yield from found
                return

    def _fastest_of(self, cuts: Iterable[tuple[int, int]]) -> Iterator[Found]:
        """Yield the layouts with these numbers of context ranks and tensor ranks that fit, fastest first."""
        every = chain.from_iterable(choices(self._config, *cut) for cut in cuts)
        waiting = [entry for choice in every if (entry := self._first_entry(choice)) is not None]
        heapq.heapify(waiting)
        while waiting:
            entry = heapq.heappop(waiting)
            if entry.simulated:
                yield Found(entry.choice, entry.seconds, self._free_memory(entry.choice))
            elif (further := self._next_entry(entry)) is not None:
                heapq.heappush(waiting, further)
            else:
                self.counts.too_large += 1

    def _first_entry(self, choice: Choice) -> "_Entry | None":
        """Return a choice with the bound of its passes; None if the choice cannot fit."""
        self.counts.layouts += 1
        state = choice.of_state
        if state not in self._nearest:
            self._nearest[state] = self._nearest_homes(choice)
        if self._nearest[state] is None:
            self.counts.too_large += 1
            return None
        kind = _of_passes(choice)
        if kind not in self._pass_seconds:
            layout, sizes = self._fixed_layout(choice), self._sizes_of(choice)
            self._pass_seconds[kind] = min_pass_seconds(layout, sizes, self._costs(layout, sizes, self._least))
        return _Entry(self._pass_seconds[kind], choice.simplicity, choice)

    def _nearest_homes(self, choice: Choice) -> Homes | None:
        """Return the nearest possible homes; None if the state cannot fit."""
        layout, sizes, offload = self._fixed_layout(choice), self._sizes_of(choice), self._config.offload
        if not least_state_fits(self._config, layout, sizes, self._profile):
            return None
        return layout.homes if offload.budget is None else nearest_homes(offload, layout, sizes)

    def _next_entry(self, entry: "_Entry") -> "_Entry | None":
        """Return the entry with its next bound, or with the simulated seconds. None if the layout does not fit."""
        if entry.layout is not None:
            return self._simulated(entry, entry.layout)
        if not entry.has_own_bound:
            return self._bounded(entry)
        layout = self._fitting_layout(entry.choice)
        if layout is None:
            return None
        if self._config.offload.budget is None:
            return self._simulated(entry, layout)
        sizes = self._sizes_of(entry.choice)
        bound = min_step_seconds(layout, sizes, self._costs(layout, sizes, self._profile))
        return replace(entry, seconds=max(bound, entry.seconds), layout=layout)

    def _bounded(self, entry: "_Entry") -> "_Entry":
        """Return the entry with the bound for the nearest possible homes."""
        choice, homes = entry.choice, self._nearest[entry.choice.of_state]
        assert homes is not None, "_first_entry leaves out layouts without possible homes"
        sizes = self._sizes_of(choice)
        layout = self._fixed_layout(choice).with_homes(homes)
        bound = min_step_seconds(layout, sizes, self._costs(layout, sizes, self._least))
        return replace(entry, seconds=max(bound, entry.seconds), has_own_bound=True)

    def _fixed_layout(self, choice: Choice) -> Layout:
        layout = fixed_layout(chosen(self._config, choice), self._sizes_of(choice))
        return layout.as_in(self._alike.setdefault((choice.pipeline, choice.is_modular), layout))

    def _fitting_layout(self, choice: Choice) -> Layout | None:
        """Return the layout of a choice; None if it does not fit."""
        # The bytes of a rank do not depend on the number of replicas.
        of_bytes = replace(choice, replicas=1)
        if of_bytes not in self._homes:
            self._homes[of_bytes] = self._fitting_homes(choice)
        homes = self._homes[of_bytes]
        return None if homes is None else self._fixed_layout(choice).with_homes(homes)

    def _fitting_homes(self, choice: Choice) -> Homes | None:
        config, sizes, fixed = self._config, self._sizes_of(choice), self._fixed_layout(choice)
        if not state_fits(config, fixed, sizes, self._profile):
            return None
        kind = _of_activations(choice)
        if kind not in self._peaks:
            self._peaks[kind] = activation_peaks(fixed, sizes)
        peaks = self._peaks[kind]
        if not activations_fit(config, fixed, sizes, peaks, self._profile):
            return None
        layout = fixed.with_homes(choose_homes(config.offload, fixed, sizes, peaks))
        return None if violations(config, layout, sizes, peaks, self._profile) else layout.homes

    def _free_memory(self, choice: Choice) -> int:
        if self._profile.device_bytes is None:
            return 0
        layout, sizes = self._fitting_layout(choice), self._sizes_of(choice)
        assert layout is not None, "only layouts that fit are simulated"
        peaks = self._peaks[_of_activations(choice)]
        most = max(resident_bytes(layout, sizes, rank).device + peak.device for rank, peak in enumerate(peaks))
        device = room(layout, sizes, self._profile, self._config.precision.compute).device
        assert device is not None, "the memory of the device is known"
        return MEMORY_STEPS * (device - most) // self._profile.device_bytes

    def _simulated(self, entry: "_Entry", layout: Layout) -> "_Entry":
        self.counts.simulated += 1
        costs = self._costs(layout, self._sizes_of(entry.choice), self._profile)
        line = timeline(layout, step_plan(layout), costs, STEPS)
        # Where ranks do not wait for each other, the simulated step may have started during the previous step. It may
        # then take less than the bound on the mean.
        return replace(entry, seconds=max(line.seconds, entry.seconds), simulated=True, layout=None)

    def _costs(self, layout: Layout, sizes: Sizes, profile: HardwareProfile) -> MeasuredCosts:
        return MeasuredCosts(profile, layout, sizes, self._config.precision.compute)

    def _sizes_of(self, choice: Choice) -> Sizes:
        cut = (choice.expert_ranks, choice.tensor_ranks)
        if cut not in self._sizes:
            config = chosen(self._config, choice)
            self._sizes[cut] = phase_sizes(config, self._device, self._threads, self._profile.device_bytes)
        micro_batch = self._config.batch.sequences // choice.micro_batches
        return replace(self._sizes[cut], micro_batch=micro_batch)


def _of_activations(choice: Choice) -> Choice:
    """Return the choice without the fields on which activation peaks do not depend."""
    return replace(choice, sharding="None", replicas=1)


def _of_passes(choice: Choice) -> Choice:
    """Return the choice without the fields on which the seconds of passes do not depend."""
    return replace(choice, sharding="None", replicas=1, schedule="Interleaved" if choice.is_modular else "Layered")


def _by_free_memory(equal: list[Found]) -> list[Found]:
    return sorted(equal, key=lambda found: (-found.free_memory, found.choice.simplicity))


def _with_fastest_updates(profile: HardwareProfile, moments: MomentFormat) -> HardwareProfile:
    """Return the profile with updates on devices at least as fast as on hosts."""
    share = ROUNDING_ON_HOST[moments] / ROUNDING_ON_GPU[moments]
    speeds = [
        known.model_copy(
            update={
                "update_on_device_seconds_per_element": min(
                    known.update_on_device_seconds_per_element,
                    known.update_on_host_seconds_per_element * share,
                )
            }
        )
        for known in profile.speeds
    ]
    return profile.model_copy(update={"speeds": speeds})


@dataclass(order=True, frozen=True)
class _Entry:
    seconds: float
    """Seconds of a step: a lower bound, or the simulated time."""
    simplicity: tuple[int, ...]
    choice: Choice = field(compare=False)
    has_own_bound: bool = field(default=False, compare=False)
    """Whether `seconds` counts all resources of this layout; if not, `seconds` is the bound of the passes."""
    layout: Layout | None = field(default=None, compare=False)
    """The layout with its own homes, if `seconds` is the bound for these homes. None before this bound is computed,
    after the simulation, and without a budget."""
    simulated: bool = False
