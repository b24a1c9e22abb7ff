"""The layout of a phase with `layout: Auto`: the fastest that fits. Does not import torch."""

from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.layout import ChosenLayout
from pydantic import TypeAdapter

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.search.search import Search
from pseudoreal_trainer.estimate.search.space import Choice, chosen
from pseudoreal_trainer.estimate.time.assumed import assumed_profile
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, read_profile
from pseudoreal_trainer.plan.sizes import Device

_CHOICE = TypeAdapter(Choice)


def is_auto(config: PhaseConfig) -> bool:
    return config.parallelism.layout == "Auto"


def profile_of(config: PhaseConfig) -> HardwareProfile:
    """Return the profile that the job names, else the profile of an assumed machine. Raises ValueError if the named
    file is not a profile."""
    named = config.parallelism.hardware
    return read_profile(Path(named)) if named else assumed_profile("accelerator" if config.gpus else "cpu")


def device_of(config: PhaseConfig, profile: HardwareProfile) -> Device:
    return "accelerator" if config.gpus or profile.overlaps else "cpu"


def choose(config: PhaseConfig, profile: HardwareProfile, threads: int) -> ChosenLayout:
    """Return the first layout of `Search.fastest`. `threads`: number of threads per rank. Raises InvalidJobError if
    none fits, and ValueError if the profile lacks a figure that the phase needs."""
    device = device_of(config, profile)
    found = next(Search(config, device, profile, threads).fastest(), None)
    if found is None:
        raise InvalidJobError(
            f"spec.phases[{config.phase}].parallelism.layout Auto: no layout of {config.ranks} ranks fits the machine"
            f" that the profile {profile.name} describes; take more ranks, let units move (offload.budget,"
            " offload.home), or name the profile of other machines in parallelism.hardware"
        )
    choice = found.choice
    report = plan_phase(chosen(config, choice), device, profile, threads).report
    return ChosenLayout(
        pipeline=choice.pipeline,
        replicas=choice.replicas,
        expert_ranks=choice.expert_ranks,
        context_ranks=choice.context_ranks,
        tensor_ranks=choice.tensor_ranks,
        schedule=choice.schedule,
        state_sharding=choice.sharding,
        micro_batches=choice.micro_batches,
        keep=choice.keep,
        hardware=profile.name[:256],
        step_time=f"{found.seconds:.4g}",
        bottleneck=(report.bottleneck or "")[:512],
    )


def laid_out(config: PhaseConfig, layout: ChosenLayout) -> PhaseConfig:
    """Return the phase with a layout chosen earlier. Raises ValueError if a later release chose a layout unknown to
    this one."""
    fields = layout.model_dump(include=set(Choice.__dataclass_fields__))
    return chosen(config, _CHOICE.validate_python(fields | {"sharding": layout.state_sharding}))
