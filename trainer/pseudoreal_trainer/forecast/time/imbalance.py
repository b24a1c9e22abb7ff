"""How unevenly tokens may go to experts on several ranks, and what that costs. Pure.

Forecasts count as many rows for each rank's experts. How many come depends on the data; here is the most, as if in
every layer and micro-batch the experts of one rank were chosen by as many tokens as can be.
"""

from collections import Counter

from pseudoreal_trainer.forecast.memory.sizes import Sizes
from pseudoreal_trainer.forecast.time.costs import MeasuredCosts
from pseudoreal_trainer.forecast.time.hardware import HardwareProfile, Precision
from pseudoreal_trainer.forecast.time.predict import STEPS
from pseudoreal_trainer.forecast.time.timeline import timeline
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Plan


def most_rows(sizes: Sizes, expert_ranks: int) -> float:
    """Most rows that the experts of one rank may get, as a multiple of the mean over the ranks; at least 1."""
    experts = sizes.experts
    own = experts // expert_ranks
    if sizes.model.top_k is not None:
        # A token goes to several experts, and to each once.
        return min(sizes.choices, own) * expert_ranks / sizes.choices
    first_experts = range(0, experts, own)
    most = max(_rows_of_sequence(sizes, range(first, first + own)) for first in first_experts)
    return max(1.0, most * expert_ranks / (sizes.choices * sizes.model.sequence_length))


def _rows_of_sequence(sizes: Sizes, own: range) -> int:
    """Most rows of a sequence for these experts: a prototype has one for each token, an expert accepts its capacity.
    Where documents are masked that counts in each, and a sequence may have many."""
    length = sizes.model.sequence_length
    capacity = length if sizes.masks_documents else sizes.model.expert_capacity
    of_prototypes = Counter(expert * sizes.choices // sizes.experts for expert in own)
    return sum(min(length, capacity * number) for number in of_prototypes.values())


def seconds_at_most(layout: Layout, sizes: Sizes, plan: Plan, profile: HardwareProfile, compute: Precision) -> float:
    """Seconds of a step in which the busiest rank gets the most rows. Raises ValueError when the profile lacks what the
    phase needs."""
    costs = MeasuredCosts(profile, layout, sizes, compute, imbalance=most_rows(sizes, layout.expert_ranks))
    return timeline(layout, plan, costs, STEPS).seconds
