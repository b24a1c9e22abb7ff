"""The fastest layouts of a phase, best first. Pure.

Layouts wait in the order of a bound of their seconds; one that reaches the front is simulated, and waits again with
its true seconds. So the first that reaches the front simulated is the fastest of all, and most are never simulated.
Where a budget moves units, the first bound is of homes than which none is nearer, and a layout that reaches the front
waits once more with the bound of its own homes, whose choice takes a plan of the step.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Home

from pseudoreal_trainer.forecast.memory.from_config import fixed_layout, phase_sizes
from pseudoreal_trainer.forecast.memory.homes import Peaks, activation_peaks, choose_homes, nearest_homes
from pseudoreal_trainer.forecast.memory.sizes import Device, Sizes
from pseudoreal_trainer.forecast.search.bound import least_seconds
from pseudoreal_trainer.forecast.search.fit import activations_fit, least_state_fits, state_fits
from pseudoreal_trainer.forecast.search.space import Choice, StateChoice, choices, chosen
from pseudoreal_trainer.forecast.shortfalls import shortfalls
from pseudoreal_trainer.forecast.time.costs import MeasuredCosts
from pseudoreal_trainer.forecast.time.hardware import HardwareProfile
from pseudoreal_trainer.forecast.time.predict import STEPS
from pseudoreal_trainer.forecast.time.timeline import timeline
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan

Homes = tuple[Home, ...]
"""Home of each unit."""


@dataclass(frozen=True)
class Found:
    """A layout that fits, and what its step takes."""

    choice: Choice
    seconds: float


@dataclass
class Counts:
    """What became of the layouts of a search."""

    layouts: int = 0
    too_large: int = 0
    simulated: int = 0


class Search:
    """The search among the layouts of one phase."""

    def __init__(self, config: PhaseConfig, device: Device, profile: HardwareProfile, threads: int) -> None:
        self._config, self._profile = config, profile
        self._least = profile if config.offload.budget is None else _with_fastest_updates(profile)
        """The machine by which bounds are found: a budget may move a unit to where its update is faster."""
        self._device, self._threads = device, threads
        self._sizes: dict[int, Sizes] = {}
        """What a rank has of the units, by the number of expert ranks."""
        self._peaks: dict[Choice, Peaks] = {}
        """Activations of the layouts that differ in nothing but their sharding: planning a step takes the longest."""
        self._alike: dict[tuple[int, bool], Layout] = {}
        """A layout for each way in which layers may be on pipeline ranks."""
        self._nearest: dict[StateChoice, Homes | None] = {}
        self._homes: dict[Choice, Homes | None] = {}
        """Homes in layouts that differ in nothing but their replicas; None where these do not fit."""
        self.counts = Counts()

    def fastest(self) -> Iterator[Found]:
        """Layouts that fit, the fastest first; of those that take equally long, the simplest. Raises ValueError when
        the profile lacks what the phase needs."""
        waiting = [entry for choice in choices(self._config) if (entry := self._begun(choice)) is not None]
        heapq.heapify(waiting)
        while waiting:
            entry = heapq.heappop(waiting)
            if entry.simulated:
                yield Found(entry.choice, entry.seconds)
            elif (further := self._further(entry)) is not None:
                heapq.heappush(waiting, further)
            else:
                self.counts.too_large += 1

    def _begun(self, choice: Choice) -> "_Entry | None":
        """A choice with a first bound; None where it cannot fit."""
        self.counts.layouts += 1
        state = choice.of_state
        if state not in self._nearest:
            self._nearest[state] = self._nearest_homes(choice)
        homes = self._nearest[state]
        if homes is None:
            self.counts.too_large += 1
            return None
        sizes = self._sizes_of(choice)
        layout = self._fixed_layout(choice).with_homes(homes)
        bound = least_seconds(layout, sizes, self._costs(layout, sizes, self._least))
        return _Entry(bound, choice.simplicity, choice)

    def _nearest_homes(self, choice: Choice) -> Homes | None:
        """Homes than which none is nearer; None where the state cannot fit."""
        layout, sizes, offload = self._fixed_layout(choice), self._sizes_of(choice), self._config.offload
        if not least_state_fits(self._config, layout, sizes, self._profile):
            return None
        return layout.homes if offload.budget is None else nearest_homes(offload, layout, sizes)

    def _further(self, entry: "_Entry") -> "_Entry | None":
        """The entry with what was not looked at before; None where it does not fit."""
        if entry.layout is not None:
            return self._simulated(entry, entry.layout)
        layout = self._fitting(entry.choice)
        if layout is None:
            return None
        if self._config.offload.budget is None:
            return self._simulated(entry, layout)
        sizes = self._sizes_of(entry.choice)
        bound = least_seconds(layout, sizes, self._costs(layout, sizes, self._profile))
        return replace(entry, seconds=max(bound, entry.seconds), layout=layout)

    def _fixed_layout(self, choice: Choice) -> Layout:
        layout = fixed_layout(chosen(self._config, choice), self._sizes_of(choice))
        return layout.as_in(self._alike.setdefault((choice.pipeline, choice.is_modular), layout))

    def _fitting(self, choice: Choice) -> Layout | None:
        """The layout of a choice; None where it does not fit."""
        # Bytes are the same with any number of replicas.
        of_bytes = replace(choice, replicas=1)
        if of_bytes not in self._homes:
            self._homes[of_bytes] = self._fitting_homes(choice)
        homes = self._homes[of_bytes]
        return None if homes is None else self._fixed_layout(choice).with_homes(homes)

    def _fitting_homes(self, choice: Choice) -> Homes | None:
        config, sizes, fixed = self._config, self._sizes_of(choice), self._fixed_layout(choice)
        if not state_fits(config, fixed, sizes, self._profile):
            return None
        kind = replace(choice, sharding="None", replicas=1)
        if kind not in self._peaks:
            self._peaks[kind] = activation_peaks(fixed, sizes)
        peaks = self._peaks[kind]
        if not activations_fit(config, fixed, sizes, peaks, self._profile):
            return None
        layout = fixed.with_homes(choose_homes(config.offload, fixed, sizes, peaks))
        return None if shortfalls(config, layout, sizes, peaks, self._profile) else layout.homes

    def _simulated(self, entry: "_Entry", layout: Layout) -> "_Entry":
        self.counts.simulated += 1
        costs = self._costs(layout, self._sizes_of(entry.choice), self._profile)
        line = timeline(layout, step_plan(layout), costs, STEPS)
        # Where ranks do not wait for each other, one of few steps may have been begun in the step before.
        return replace(entry, seconds=max(line.seconds, entry.seconds), simulated=True, layout=None)

    def _costs(self, layout: Layout, sizes: Sizes, profile: HardwareProfile) -> MeasuredCosts:
        return MeasuredCosts(profile, layout, sizes, self._config.precision.compute)

    def _sizes_of(self, choice: Choice) -> Sizes:
        if choice.expert_ranks not in self._sizes:
            config = chosen(self._config, choice)
            self._sizes[choice.expert_ranks] = phase_sizes(config, self._device, self._threads)
        micro_batch = self._config.batch.sequences // choice.micro_batches
        return replace(self._sizes[choice.expert_ranks], micro_batch=micro_batch)


def _with_fastest_updates(profile: HardwareProfile) -> HardwareProfile:
    """The machine, on whose devices updates are no slower than on its hosts."""
    speeds = [
        known.model_copy(
            update={
                "update_on_device_seconds_per_element": min(
                    known.update_on_device_seconds_per_element, known.update_on_host_seconds_per_element
                )
            }
        )
        for known in profile.speeds
    ]
    return profile.model_copy(update={"speeds": speeds})


@dataclass(order=True, frozen=True)
class _Entry:
    seconds: float
    """Seconds of a step: a bound from below, or what the simulation says."""
    simplicity: tuple[int, ...]
    choice: Choice = field(compare=False)
    layout: Layout | None = field(default=None, compare=False)
    """With its homes, where a budget has moved units and the bound is of these."""
    simulated: bool = False
