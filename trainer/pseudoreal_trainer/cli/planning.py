"""Plans of a job's phases, as `pseudoreal plan` and the Python client make them."""

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_trainer.cgroups import threads_of
from pseudoreal_trainer.cli.fastest_layouts import FastestLayouts, fastest_layouts
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import PlannedPhase, plan_phase
from pseudoreal_trainer.estimate.search.auto import device_of, is_auto, profile_of
from pseudoreal_trainer.estimate.search.space import chosen
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.plan.sizes import Device

Phase = tuple[PhaseConfig, Device]
"""A phase to plan, and its training device."""

_SHOWN = 3
"""Number of layouts found for a phase with layout Auto. The phase would be trained with the first of them."""


def phases_to_plan(job: PseudoRealJob, profile: HardwareProfile | None) -> list[Phase]:
    configs = [
        phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
        for index in range(len(job.spec.phases))
    ]
    has_accelerators = profile is not None and profile.overlaps
    return [(config, "accelerator" if config.gpus or has_accelerators else "cpu") for config in configs]


def search_auto_layouts(phases: list[Phase], profile: HardwareProfile | None) -> list[FastestLayouts]:
    """Return the best layouts of each phase with layout Auto. Their step times are predicted from `profile`; if None,
    from the job's profile."""
    found = []
    for phase in (phase for phase, _ in phases if is_auto(phase)):
        machine = profile or profile_of(phase)
        threads = threads_of(phase.processes_per_worker)
        found.append(fastest_layouts(phase, device_of(phase, machine), machine, threads, _SHOWN))
    return found


def with_auto_layouts(phases: list[Phase], searched: list[FastestLayouts]) -> list[Phase]:
    """Return the phases with every layout Auto replaced by the best layout found, as they would be trained. Raises
    InvalidJobError if none was found."""
    without = [layouts.phase for layouts in searched if not layouts.found]
    if without:
        raise InvalidJobError(
            f"spec.phases[{without[0]}]: no layout is within the budget and the machine; take more ranks, or let units"
            " move (offload.budget, offload.home)"
        )
    best = {layouts.phase: layouts.found[0][0].choice for layouts in searched}
    return [(chosen(phase, best[phase.phase]) if is_auto(phase) else phase, device) for phase, device in phases]


def plan_job(job: PseudoRealJob, profile: HardwareProfile | None) -> list[PlannedPhase]:
    """Plan all phases. Raises ValueError if a phase with layout Auto has none, or the profile lacks a speed."""
    phases = phases_to_plan(job, profile)
    phases = with_auto_layouts(phases, search_auto_layouts(phases, profile))
    return [plan_phase(phase, device, profile, threads_of(phase.processes_per_worker)) for phase, device in phases]
