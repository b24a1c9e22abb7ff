"""Overhead of the engine itself, from a step of a model so small that the step is mostly overhead."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor

from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.measure.passes import Cell, measure_cell
from pseudoreal_trainer.measure.timing import seconds_of
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.records import Backward, Forward
from pseudoreal_trainer.plan.units import units_of

_LAYERS, _MICRO_BATCHES = 4, 8


@dataclass(frozen=True)
class _Batch:
    """A batch that repeats one micro-batch."""

    windows: Tensor
    """Token ids, int64, [B, T + 1]."""

    def shape(self, micro_batch: int) -> tuple[int, int]:  # noqa: ARG002
        return self.windows.shape[0], self.windows.shape[1] - 1

    def tokens(self, micro_batch: int) -> Tensor:  # noqa: ARG002
        return self.windows


def pass_seconds(device: torch.device) -> float:
    """Return the engine's overhead per pass in seconds: the time of a step without the computation of the blocks,
    divided by the number of passes."""
    cell = Cell("float32", hidden=32, tokens=8)
    spec = cell.sizes.model
    layout = Layout(tuple(range(_LAYERS)), pipeline=1, data=1, micro_batches=_MICRO_BATCHES)
    windows = torch.randint(256, (1, spec.sequence_length + 1), device=device)
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        engine = _engine(spec, layout, device, Path(folder))
        training = Training(cell.tokens * _MICRO_BATCHES, 1e-3, stop=False)
        step = seconds_of(lambda: engine.train(_Batch(windows), training, 1), device)
        engine.close()
    speed, flops = measure_cell(cell, device), cell.flops
    forward = 2 * flops - cell.sizes.unread_product_flops(cell.tokens, 0)  # the second time by recomputation
    blocks = forward / speed.block_forward_flops_per_second + 2 * flops / speed.block_backward_flops_per_second
    passes = sum(isinstance(record, Forward | Backward) for record in step_plan(layout)[0])
    return max(0.0, step - _LAYERS * _MICRO_BATCHES * blocks) / passes


def _engine(spec: Model, layout: Layout, device: torch.device, folder: Path) -> Engine:
    model = Model(
        layers=_LAYERS,
        hidden_size=spec.hidden_size,
        attention=spec.attention,
        sequence_length=spec.sequence_length,
        feed_forward=spec.feed_forward,
    )
    blueprint = Blueprint(
        model=model,
        optimizer=Optimizer(),
        units=units_of(model, Sharing(blocks=_LAYERS)),
        master=torch.float32,
        compute=torch.float32,
        moments=torch.float32,
        gradients=torch.float32,
        seed=0,
        compiled=False,
        offload_directory=folder,
    )
    return Engine(blueprint, create_process_groups(layout, Ranks(0, 1, device)), Trace(0))
