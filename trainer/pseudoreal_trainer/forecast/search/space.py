"""The layouts that a phase may have on its ranks. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from pseudoreal_api.resolved.config import PhaseConfig, ResolvedParallelism
from pseudoreal_api.resolved.resolve import UnresolvableJob, check_interleaved
from pseudoreal_api.spec.phase import Keep, Schedule, StateSharding

_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_SHARDINGS: tuple[StateSharding, ...] = get_args(StateSharding)


@dataclass(frozen=True)
class Choice:
    """What a search decides. Everything else stays as the phase says."""

    pipeline: int
    micro_batches: int
    schedule: Schedule
    sharding: StateSharding
    keep: Keep

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Less is simpler: of layouts that take equally long, the least is chosen."""
        order, cut = _SCHEDULES.index(self.schedule), _SHARDINGS.index(self.sharding)
        return (self.pipeline, cut, order, self.micro_batches, int(self.keep == "All"))


def choices(config: PhaseConfig) -> Iterator[Choice]:
    """Every choice that the phase's ranks, layers and batch allow: pipeline ranks divide the ranks, and each data rank
    has a sequence of each micro-batch."""
    keeps: tuple[Keep, ...] = ("Inputs",) if config.activations.home == "Host" else ("Inputs", "All")
    for pipeline in _divisors(config.ranks, config.model.layers):
        data = config.ranks // pipeline
        for micro_batches in _divisors(config.batch.sequences, config.batch.sequences // data):
            for schedule in _schedules_of(config, pipeline, micro_batches):
                for sharding in _SHARDINGS if data > 1 else _SHARDINGS[:1]:
                    yield from (Choice(pipeline, micro_batches, schedule, sharding, keep) for keep in keeps)


def chosen(config: PhaseConfig, choice: Choice) -> PhaseConfig:
    """The phase, laid out by `choice`."""
    asked = ResolvedParallelism(pipeline=choice.pipeline, schedule=choice.schedule, state_sharding=choice.sharding)
    return config.model_copy(
        update={
            "parallelism": asked,
            "batch": config.batch.model_copy(update={"micro_batches": choice.micro_batches}),
            "activations": config.activations.model_copy(update={"keep": choice.keep}),
        }
    )


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _schedules_of(config: PhaseConfig, pipeline: int, micro_batches: int) -> Iterator[Schedule]:
    """The schedules that the phase allows: where experts come and go in groups, Layered alone."""
    if config.offload.expert_groups > 1:
        yield "Layered"
        return
    yield from _schedules(config.model.layers, pipeline, micro_batches)


def _schedules(layers: int, pipeline: int, micro_batches: int) -> Iterator[Schedule]:
    """The schedules that differ: one micro-batch passes in one way; on one pipeline rank, Interleaved is 1F1B."""
    if pipeline == micro_batches == 1:
        yield "Layered"
        return
    for schedule in _SCHEDULES:
        if schedule != "Interleaved" or _can_interleave(layers, pipeline, micro_batches):
            yield schedule


def _can_interleave(layers: int, pipeline: int, micro_batches: int) -> bool:
    try:
        check_interleaved(layers, pipeline, micro_batches)
    except UnresolvableJob:
        return False
    return pipeline > 1
