"""Seconds of a token in a phase, on the machine of a profile, and whether the phase fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Home

from pseudoreal_trainer.cgroups import threads_of
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.search.auto import device_of, is_auto, profile_of
from pseudoreal_trainer.estimate.search.search import Search
from pseudoreal_trainer.estimate.search.space import chosen
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile

_FURTHER: dict[Home, tuple[Home, ...]] = {"Device": ("Host", "Disk"), "Host": ("Disk",), "Disk": ()}


@dataclass(frozen=True)
class PhaseCost:
    """A phase on a machine. If the phase does not fit, its seconds are those that it would have with enough memory, or
    None."""

    config: PhaseConfig
    """The phase with its layout, and with the homes in which it is fastest."""
    machine: str
    """Name of the profile."""
    moved: bool
    """True if the homes are other ones than the job's."""
    step_seconds: float | None
    bottleneck: str
    peak_device_bytes: int | None
    reasons: tuple[str, ...]
    """Why the phase does not fit; empty if it fits."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch.sequences * self.config.model.sequence_length

    @property
    def seconds_per_token(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds / self.tokens_per_step


class Costs:
    """Costs of phases, each computed once: the same phase is part of several candidates."""

    def __init__(self, profile: HardwareProfile | None) -> None:
        """`profile`: the machine; None: the profile that the phase names, or an assumed one."""
        self._profile = profile
        self._known: dict[tuple[str, str, bool], PhaseCost] = {}

    def of(self, config: PhaseConfig) -> PhaseCost:
        """Return the cost of a phase: with the job's homes or on the device alone, whichever is faster; if neither
        fits, with the state on the host, or else on disk. Raises ValueError if the profile lacks a figure."""
        key = (config.model.model_dump_json(), config.sharing.model_dump_json(), config.measure is not None)
        if key not in self._known:
            self._known[key] = self._fastest(config)
        return self._known[key]

    def _fastest(self, config: PhaseConfig) -> PhaseCost:
        profile = self._profile or profile_of(config)
        own = _planned(config, profile, moved=False)
        others = [_planned(other, profile, moved=True) for other in _on_device(config, profile)]
        fitting = [cost for cost in (own, *others) if cost.fits]
        if fitting:
            return min(fitting, key=lambda cost: (cost.step_seconds, cost.moved))
        further = (_planned(other, profile, moved=True) for other in _further_homes(config))
        return next((cost for cost in further if cost.fits), own)


def _on_device(config: PhaseConfig, profile: HardwareProfile) -> Iterator[PhaseConfig]:
    """Yield the phase with its whole state on the device, if the job has homes elsewhere and the profile knows how much
    memory the device has. A budget moves no more than it must, so it stays."""
    offload = config.offload
    is_elsewhere = offload.home != "Device" or bool(offload.homes)
    if is_elsewhere and offload.budget is None and profile.device_bytes is not None:
        yield _with_home(config, "Device")


def _further_homes(config: PhaseConfig) -> Iterator[PhaseConfig]:
    """Yield the phase with its state further away than in the job; a budget has tried all homes."""
    if config.offload.budget is None:
        yield from (_with_home(config, home) for home in _FURTHER[config.offload.home])


def _with_home(config: PhaseConfig, home: Home) -> PhaseConfig:
    return config.model_copy(update={"offload": config.offload.model_copy(update={"home": home, "homes": []})})


def _planned(config: PhaseConfig, profile: HardwareProfile, *, moved: bool) -> PhaseCost:
    device, threads = device_of(config, profile), threads_of(config.processes_per_worker)
    if is_auto(config):
        found = next(Search(config, device, profile, threads).fastest(), None)
        if found is None:
            reason = f"no layout of {config.ranks} ranks fits the machine of the profile {profile.name}"
            return PhaseCost(config, profile.name, moved, None, "", None, (reason,))
        config = chosen(config, found.choice)
    planned = plan_phase(config, device, profile, threads)
    report = planned.report
    return PhaseCost(
        config,
        profile.name,
        moved,
        planned.timeline.seconds,
        report.bottleneck or "",
        report.peak_device_bytes,
        tuple(report.reasons),
    )
