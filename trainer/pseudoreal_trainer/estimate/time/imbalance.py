"""Worst-case load imbalance of expert-parallel experts, and its cost. Pure.

Estimates assume equally many routed tokens for the experts of each rank. The real number depends on the data. This
module computes the maximum: in every layer and micro-batch, the experts of one rank are chosen by as many tokens as
possible.
"""

from collections import Counter

from pseudoreal_trainer.estimate.time.costs import MeasuredCosts
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, Precision
from pseudoreal_trainer.estimate.time.predict import STEPS
from pseudoreal_trainer.estimate.time.timeline import timeline
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Plan
from pseudoreal_trainer.plan.sizes import Sizes


def most_rows(sizes: Sizes, expert_ranks: int) -> float:
    """Return the most routed tokens that the experts of one rank can get, as a multiple of the mean over the ranks; at
    least 1."""
    experts = sizes.experts
    own = experts // expert_ranks
    if sizes.model.top_k is not None:
        # A token goes to several experts, at most once to each.
        return min(sizes.choices, own) * expert_ranks / sizes.choices
    first_experts = range(0, experts, own)
    most = max(_rows_of_sequence(sizes, range(first, first + own)) for first in first_experts)
    return max(1.0, most * expert_ranks / (sizes.choices * sizes.model.sequence_length))


def _rows_of_sequence(sizes: Sizes, own: range) -> int:
    """Return the most routed tokens of a sequence for these experts: a prototype routes each token once, and an expert
    accepts at most its capacity. With masked documents the capacity applies per document, and a sequence may have
    many."""
    length = sizes.model.sequence_length
    capacity = length if sizes.masks_documents else sizes.model.expert_capacity
    of_prototypes = Counter(expert * sizes.choices // sizes.experts for expert in own)
    return sum(min(length, capacity * number) for number in of_prototypes.values())


def seconds_at_max_imbalance(
    layout: Layout, sizes: Sizes, plan: Plan, profile: HardwareProfile, compute: Precision
) -> float:
    """Return the seconds of a step in which the busiest rank gets the most routed tokens. Raises ValueError if the
    profile lacks a figure that the phase needs."""
    costs = MeasuredCosts(profile, layout, sizes, compute, imbalance=most_rows(sizes, layout.expert_ranks))
    return timeline(layout, plan, costs, STEPS).seconds
