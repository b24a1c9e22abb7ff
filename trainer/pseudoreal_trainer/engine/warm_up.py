"""Runs each kind of pass once before the first message is awaited.

A kernel's first launch loads it, libraries make their handles and workspaces, the allocator asks the driver for memory:
each of these may wait for all kernels of the device. A kernel that receives a message ends only when another rank has
sent it, and that rank may first need something from this one. So all of it happens while nothing is received.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pseudoreal_trainer.forecast.memory.crossing import Shape
from pseudoreal_trainer.plan.steps import Backward, Forward, RankPlan

if TYPE_CHECKING:
    from pseudoreal_trainer.engine.runner import Batch, Parts


def warm_up(parts: "Parts", batch: "Batch", plan: RankPlan) -> None:
    """Runs the passes on zeros, for each shape that the plan has and that has not been run before. Binds other weights
    to modules and forgets those that were bound."""
    passes = [step for step in plan if isinstance(step, Forward | Backward)]
    shapes = {batch.shape(m) for m in {step.micro_batch for step in passes}} - parts.warm
    positions = _one_of_each_kind(parts, sorted({step.position for step in passes}))
    for shape in sorted(shapes):
        for position in positions:
            _pass(parts, position, shape)
    parts.warm.update(shapes)
    parts.copies.unbind()
    if parts.lanes.are_real:
        torch.cuda.synchronize(parts.grid.device)


def _one_of_each_kind(parts: "Parts", positions: Sequence[int]) -> list[int]:
    return list({parts.modules.of(parts.layout.unit_of(position)): position for position in positions}.values())


def _pass(parts: "Parts", position: int, shape: Shape) -> None:
    """Runs a position's forward and backward pass on zeros of this shape."""
    module, device = parts.modules.of(parts.layout.unit_of(position)), parts.grid.device
    module.bind(torch.zeros(module.numel, dtype=parts.compute, device=device))
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    hidden = torch.zeros((*shape, parts.hidden), dtype=parts.compute, device=device, requires_grad=True)
    if position == 0:
        output, sources = parts.modules.embed(tokens), list[Tensor](module.parameters)
    elif position == parts.layout.head:
        output, sources = parts.modules.loss_sum(hidden, tokens, parts.master), [hidden, *module.parameters]
    else:
        output, sources = parts.modules.block(hidden), [hidden, *module.parameters]
    torch.autograd.grad(output, sources, torch.ones_like(output))
