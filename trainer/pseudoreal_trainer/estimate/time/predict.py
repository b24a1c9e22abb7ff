"""Step time, idle share and bottleneck of a phase on given hardware; step time at the worst load imbalance. Pure."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import ceil

from pseudoreal_trainer.estimate.time.costs import Load, MeasuredCosts
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Precision
from pseudoreal_trainer.estimate.time.timeline import Timeline, timeline
from pseudoreal_trainer.plan.effects import Resource
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.records import Fetch, Pass, Plan, Read, Reduce, Update
from pseudoreal_trainer.plan.sizes import Sizes

STEPS = 3
"""Number of simulated steps: updates overlap the next step, so a single step is not representative."""
_BUSY = 0.5
"""Minimum busy share of a bottleneck. If no stream reaches this share, the step has no bottleneck stream, and most of
the time is lost in waiting."""

_WORDS: dict[str, str] = {
    Resource.COMPUTE: "the forward and backward passes",
    Resource.REDUCTION: "the ends of reductions",
    Resource.UPDATE: "the updates",
    Resource.COPY_IN: "the copies from host to device",
    Resource.COPY_OUT: "the copies from device to host",
    Resource.COLLECTIVE: "the collectives between data ranks",
    Resource.EXPERTS: "the exchanges of tokens with experts",
    Resource.DISK: "the reads from disk",
}


@dataclass(frozen=True)
class Prediction:
    timeline: Timeline
    idle_share: float
    bottleneck: str
    tokens_to_hide: dict[Load, int]
    """Load whose size is independent of the number of tokens -> tokens per step, over all ranks, above which compute
    takes longer than the load."""


def predict(layout: Layout, sizes: Sizes, profile: HardwareProfile, compute: Precision) -> Prediction:
    """Return the prediction for a phase. Raises ValueError if the profile lacks a figure that the phase needs."""
    costs = MeasuredCosts(profile, layout, sizes, compute)
    plan = step_plan(layout)
    line = timeline(layout, plan, costs, STEPS)
    idle = idle_share(line, layout.pipeline)
    tokens = _tokens_to_hide(layout, sizes, plan, costs)
    return Prediction(line, idle, _bottleneck(layout, line, idle), tokens)


def idle_share(line: Timeline, ranks: int) -> float:
    """Return the share of the step in which a pipeline rank's main thread is idle; the mean over the ranks."""
    busy = busy_seconds(line)
    return (
        1 - sum(busy[rank, Resource.COMPUTE] for rank in range(ranks)) / (ranks * line.seconds) if line.seconds else 0.0
    )


def busy_seconds(line: Timeline) -> defaultdict[tuple[int, str], float]:
    """Return (rank, stream) -> seconds in which the stream is busy within the step."""
    found: defaultdict[tuple[int, str], float] = defaultdict(float)
    for task, span in zip(line.tasks, line.spans, strict=True):
        if task.record is not None:
            found[task.stream] += max(0.0, min(span.end, line.seconds) - max(span.begin, 0.0))
    return found


def _bottleneck(layout: Layout, line: Timeline, idle: float) -> str:
    busy = busy_seconds(line)
    (rank, stream), seconds = max(busy.items(), key=lambda item: item[1])
    share = seconds / line.seconds
    what = f"{_WORDS.get(stream, 'the messages')} of pipeline rank {rank} take {share:.0%} of the step"
    if share >= _BUSY:
        return what
    return (
        f"waiting: no part is busy for half of the step, {what}, and pipeline ranks wait {idle:.0%} of it for each"
        f" other and for copies; larger micro-batches, more than {layout.micro_batches} of them, or a larger"
        f" offload.window than {layout.window} may help"
    )


def _tokens_to_hide(layout: Layout, sizes: Sizes, plan: Plan, costs: MeasuredCosts) -> dict[Load, int]:
    tokens = sizes.micro_batch * sizes.model.sequence_length * layout.micro_batches
    worst: dict[Load, float] = {}
    for records in plan:
        compute = sum(costs.seconds(record, Resource.COMPUTE) for record in records if isinstance(record, Pass))
        once: defaultdict[Load, float] = defaultdict(float)
        for record in records:
            if isinstance(record, Read | Fetch | Reduce | Update):
                for load, seconds in costs.loads(record).items():
                    once[load] += seconds
        worst |= {load: max(worst.get(load, 0.0), seconds / compute) for load, seconds in once.items() if seconds > 0}
    return {load: ceil(tokens * ratio) for load, ratio in worst.items()}


# Worst-case load imbalance of expert-parallel experts. Predictions assume equally many routed tokens for the experts of
# each rank, but the number depends on the data. In the worst case the experts of one rank are chosen by as many tokens
# as possible, in every layer and micro-batch.


def max_imbalance(sizes: Sizes, expert_ranks: int) -> float:
    """Return the maximum number of routed tokens that the experts of one rank can get, as a multiple of the mean over
    the ranks; at least 1."""
    experts = sizes.experts
    own = experts // expert_ranks
    if sizes.model.top_k is not None:
        # A token goes to several experts, at most once to each.
        return min(sizes.choices, own) * expert_ranks / sizes.choices
    first_experts = range(0, experts, own)
    most = max(_rows_of_sequence(sizes, range(first, first + own)) for first in first_experts)
    return max(1.0, most * expert_ranks / (sizes.choices * sizes.model.sequence_length))


def _rows_of_sequence(sizes: Sizes, own: range) -> int:
    """Return the maximum number of routed tokens of a sequence for these experts. A prototype routes each token once,
    and an expert accepts at most its capacity. With masked documents the capacity applies per document, and a sequence
    may have many."""
    length = sizes.model.sequence_length
    capacity = length if sizes.masks_documents else sizes.model.expert_capacity
    of_prototypes = Counter(expert * sizes.choices // sizes.experts for expert in own)
    return sum(min(length, capacity * number) for number in of_prototypes.values())


def seconds_at_max_imbalance(
    layout: Layout, sizes: Sizes, plan: Plan, profile: HardwareProfile, compute: Precision
) -> float:
    """Return the seconds of a step in which the busiest rank gets the most routed tokens. Raises ValueError if the
    profile lacks a figure that the phase needs."""
    costs = MeasuredCosts(profile, layout, sizes, compute, imbalance=max_imbalance(sizes, layout.expert_ranks))
    return timeline(layout, plan, costs, STEPS).seconds
