"""The candidate layouts of a phase on its ranks. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import get_args

from pseudoreal_api.resolved.config import PhaseConfig, ResolvedParallelism
from pseudoreal_api.resolved.layers import MODULAR, has_cross_stage_weights
from pseudoreal_api.resolved.resolve import UnresolvableJob, check_interleaved, divisors
from pseudoreal_api.resolved.sequences import most_context_ranks, obstacle_to_tensor_ranks
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Keep, Schedule, StateSharding

_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_FORWARD_FIRST: tuple[Schedule, ...] = ("Layered", "GPipe")
"""Schedules in which the forward passes of all micro-batches through a layer come before the layer's first backward
pass."""
_SHARDINGS: tuple[StateSharding, ...] = get_args(StateSharding)
_WHOLE: StateSharding = "None"
_KEEPS: tuple[Keep, ...] = get_args(Keep)


StateChoice = tuple[int, bool, StateSharding, int, int]
"""(pipeline ranks, whether layers are assigned to them round-robin, sharding, expert ranks, tensor ranks): the part of
a choice on which the bytes of state depend."""


@dataclass(frozen=True)
class Choice:
    """The fields decided by a search. Everything else is as in the phase."""

    pipeline: int
    micro_batches: int
    schedule: Schedule
    sharding: StateSharding
    keep: Keep
    replicas: int = 1
    expert_ranks: int = 1
    context_ranks: int = 1
    tensor_ranks: int = 1

    @property
    def is_modular(self) -> bool:
        return self.schedule in MODULAR

    @property
    def of_state(self) -> StateChoice:
        return self.pipeline, self.is_modular, self.sharding, self.expert_ranks, self.tensor_ranks

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key; smaller is simpler."""
        order, cut = _SCHEDULES.index(self.schedule), _SHARDINGS.index(self.sharding)
        mesh = (self.context_ranks, self.tensor_ranks, self.pipeline, self.expert_ranks, self.replicas)
        return (*mesh, cut, order, self.micro_batches, _KEEPS.index(self.keep))


def context_choices(config: PhaseConfig) -> list[int]:
    """Return the possible numbers of context ranks, ascending, from the number in the phase."""
    possible = divisors(gcd(config.ranks, most_context_ranks(config.model)))
    return [number for number in possible if number >= config.parallelism.context_ranks]


def tensor_choices(config: PhaseConfig, context: int) -> list[int]:
    """Return the possible numbers of tensor ranks with `context` context ranks, ascending. They are ranks of one pod:
    every layer waits for several exchanges between them."""
    return [
        number
        for number in divisors(gcd(config.ranks, config.processes_per_worker))
        if number == 1
        or obstacle_to_tensor_ranks(
            config.model,
            config.optimizer,
            config.precision,
            number,
            context_ranks=context,
            sequence_chunks=config.activations.sequence_chunks,
            measures=config.measure is not None or config.until.gradient_correlation is not None,
        )
        is None
    ]


def choices(config: PhaseConfig, context: int, tensor: int = 1) -> Iterator[Choice]:
    """Yield every choice allowed by the phase's ranks, layers, experts and batch, with `context` context ranks and
    `tensor` tensor ranks: pipeline ranks divide the ranks, replicas divide the data ranks, expert ranks, and
    context ranks times tensor ranks, divide the ranks of a replica; and each data rank has at least one sequence of
    each micro-batch, or a part of it. With Muon, no state is cut: Muon needs whole matrices."""
    needs_whole, keeps = config.optimizer.algorithm == "Muon", _keeps_of(config)
    of_sequence = context * tensor
    for pipeline in _divisors(config.ranks, config.model.layers):
        data = config.ranks // pipeline
        if data % of_sequence:
            continue
        for micro_batches in _divisors(config.batch.sequences, config.batch.sequences // (data // of_sequence)):
            for schedule in _schedules_of(config, pipeline, micro_batches):
                if needs_whole and has_cross_stage_weights(config.model, config.sharing, pipeline, schedule):
                    continue
                for replicas, sharding in [(1, _WHOLE)] if needs_whole else _shardings(data):
                    if data // replicas % of_sequence:
                        continue
                    for experts in _expert_rank_choices(config, data // replicas):
                        for keep in keeps:
                            of_layers = (pipeline, micro_batches, schedule, sharding, keep)
                            yield Choice(*of_layers, replicas, experts, context, tensor)


def _keeps_of(config: PhaseConfig) -> tuple[Keep, ...]:
    """Return the values of `activations.keep` that the phase allows."""
    if config.activations.home == "Host" or config.activations.sequence_chunks > 1:
        return ("Inputs",)
    return tuple(keep for keep in _KEEPS if keep != "Products" or config.compile.mode == "None")


def chosen(config: PhaseConfig, choice: Choice) -> PhaseConfig:
    """Return the phase with the layout of `choice`."""
    asked = ResolvedParallelism(
        pipeline=choice.pipeline,
        schedule=choice.schedule,
        state_sharding=choice.sharding,
        replicas=choice.replicas,
        expert_ranks=choice.expert_ranks,
        context_ranks=choice.context_ranks,
        tensor_ranks=choice.tensor_ranks,
    )
    return config.model_copy(
        update={
            "parallelism": asked,
            "batch": config.batch.model_copy(update={"micro_batches": choice.micro_batches}),
            "activations": config.activations.model_copy(update={"keep": choice.keep}),
        }
    )


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in divisors(number) if divisor <= most]


def _shardings(data: int) -> Iterator[tuple[int, StateSharding]]:
    """Yield (replicas, sharding). As many replicas as data ranks are omitted: each replica would be unsharded, like the
    first choice."""
    yield 1, _WHOLE
    for replicas in _divisors(data, data - 1):
        yield from ((replicas, sharding) for sharding in _SHARDINGS if sharding != _WHOLE)


def _expert_rank_choices(config: PhaseConfig, of_replica: int) -> list[int]:
    """Return the possible numbers of ranks over which a layer's experts are spread."""
    model = config.model
    if model.experts is None or model.norm.placement != "Pre":
        return [1]
    return [
        ranks
        for ranks in _divisors(of_replica, of_replica)
        if model.experts.count % (ranks * config.offload.expert_groups) == 0
    ]


def _schedules_of(config: PhaseConfig, pipeline: int, micro_batches: int) -> Iterator[Schedule]:
    """Yield the schedules that the phase allows: with groups of experts, only Layered."""
    if config.offload.expert_groups > 1:
        yield "Layered"
        return
    yield from _schedules(config.model, pipeline, micro_batches)


def _schedules(model: Model, pipeline: int, micro_batches: int) -> Iterator[Schedule]:
    """Yield the schedules that differ. With one micro-batch on one pipeline rank, all are Layered; on one pipeline
    rank, Interleaved equals 1F1B. If a loss depends on the routing decisions of the whole step, all forward passes of a
    layer must come before its first backward pass."""
    if pipeline == micro_batches == 1:
        yield "Layered"
        return
    for schedule in _SCHEDULES:
        if model.balances_steps and micro_batches > 1 and schedule not in _FORWARD_FIRST:
            continue
        if schedule != "Interleaved" or _can_interleave(model.layers, pipeline, micro_batches):
            yield schedule


def _can_interleave(layers: int, pipeline: int, micro_batches: int) -> bool:
    try:
        check_interleaved(layers, pipeline, micro_batches)
    except UnresolvableJob:
        return False
    return pipeline > 1
