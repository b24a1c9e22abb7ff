"""Number of sequences in flight during a validation, chosen so that a training step's memory suffices. Pure."""

from bisect import bisect_right
from dataclasses import replace

from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import evaluation_plan, step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.autograd_memory import autograd_memory_by_position
from pseudoreal_trainer.plan.records import Forward, RankPlan, Receive
from pseudoreal_trainer.plan.sizes import Sizes


def sequences_at_once(layout: Layout, sizes: Sizes) -> int:
    """Return the most sequences, each in a pass of its own, whose evaluation takes no more device memory on any rank
    than the activations of a training step. At least 1, at most a data rank's sequences in a step."""
    at_home = replace(layout, homes=(), sharding="None")
    peaks = [activation_peak(at_home, sizes, rank, records).device for rank, records in enumerate(step_plan(at_home))]

    def exceeds(sequences: int) -> bool:
        plan = evaluation_plan(replace(at_home, micro_batches=sequences))
        return any(evaluation_peak(at_home, sizes, records) > peak for records, peak in zip(plan, peaks, strict=True))

    most = sizes.max_tokens(layout.data) // sizes.model.sequence_length * layout.micro_batches
    return max(1, bisect_right(range(1, most + 1), False, key=exceeds))


def evaluation_peak(layout: Layout, sizes: Sizes, records: RankPlan) -> int:
    """Return the peak bytes of a rank's activations in an evaluation plan whose micro-batches are single sequences."""
    tokens = sizes.model.sequence_length
    graphs, boundary = autograd_memory_by_position(sizes, tokens, layout.loss_chunk), sizes.boundary(tokens)
    held = peak = 0
    for record in records:
        match record:
            case Receive():
                held += boundary
            case Forward(position=0):
                held += boundary
                peak = max(peak, held)
            case Forward(position=position):
                is_head = position == layout.head
                # A backward pass includes its forward pass by recomputation, so its peak bounds that of the forward
                # pass.
                bound = graphs[position].head_backward if is_head else graphs[position].block_backward
                peak = max(peak, held + bound)
                # The output replaces the input. Sent tensors live until the end of the plan.
                held -= boundary if is_head else 0
    return peak
