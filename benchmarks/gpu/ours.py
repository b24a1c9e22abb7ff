"""This project's engine on one GPU: bfloat16 with float32 master weights, all units in one home."""

from math import sqrt
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Clipping, Optimizer
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.estimate.time.predict import predict
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.homes import activation_peaks
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import Kind, Unit, units_of
from torch import Tensor

from benchmarks.gpu.cases import Case
from benchmarks.gpu.results import Forecast
from benchmarks.work import BETAS, LEARNING_RATE, WEIGHT_DECAY, Batch

NORM = "100"
"""Larger than the norm of nearly every step, so that few steps are clipped, as in a training after its first steps."""
_SEED = 7


class Ours:
    """Trains the case's model step by step with this project's engine."""

    def __init__(self, case: Case, model: Model, device: torch.device, folder: Path) -> None:
        self.layout, self.model, self._device = layout_of(case, model), model, device
        self.units = units_of(model, Sharing(blocks=model.layers))
        clipping = Clipping(mode=case.clipping, norm=NORM, updates=case.updates)
        blueprint = Blueprint(
            model=model,
            optimizer=Optimizer(
                weight_decay=str(WEIGHT_DECAY), beta1=str(BETAS[0]), beta2=str(BETAS[1]), clipping=clipping
            ),
            units=self.units,
            master=torch.float32,
            compute=torch.bfloat16,
            moments=torch.float32,
            gradients=torch.float32,
            compiled=case.is_compiled,
            offload_directory=folder,
            seed=0,
        )
        self.engine = Engine(blueprint, create_process_groups(self.layout, Ranks(0, 1, device)), Trace(0))
        self._fill()
        self._step = 0

    def train(self, batch: Tensor, micro_batches: int) -> float:
        """Train on [sequences, T + 1] and return the batch's mean loss in nats per token. Updates may still run
        afterwards."""
        assert micro_batches == self.layout.micro_batches, (
            "all batches of a case have the number of micro-batches for which the engine's plan was made"
        )
        tokens = batch[:, 1:].numel()
        parts = Batch(batch.chunk(micro_batches))
        self._step += 1
        return self.engine.train(parts, Training(tokens, LEARNING_RATE, stop=False), self._step).loss_sum / tokens

    def settle(self) -> None:
        self.engine.state.wait_for_updates()

    def pinned_bytes(self) -> int:
        return self.engine.state.memory_report().pinned

    def close(self) -> None:
        self.engine.close()

    def forecast(self, tokens: int, profile: HardwareProfile) -> Forecast:
        sequences = tokens // self.layout.micro_batches // self.model.sequence_length
        sizes = Sizes(self.model, self.units, 2, 4, sequences, device=kind_of(self._device))
        state = resident_bytes(self.layout, sizes, 0)
        return Forecast(
            seconds=predict(self.layout, sizes, profile, "bfloat16").timeline.seconds,
            device_bytes=state.device + activation_peaks(self.layout, sizes)[0].device,
            host_bytes=state.host,
        )

    def _fill(self) -> None:
        # One zero tensor serves as the moments of all units, because fresh memory costs more than the copies.
        zeros = torch.zeros(max(len(self.engine.state.shard_range(unit)) for unit in range(len(self.units))))
        for index, unit in enumerate(self.units):
            weights = torch.cat([tensor.flatten() for tensor in drawn(unit, index, self.model.layers, self._device)])
            extent = self.engine.state.shard_range(index)
            mine = torch.zeros(len(extent))
            mine[: len(weights)].copy_(weights)
            moments = zeros[: len(extent)]
            vectors: dict[Kind, torch.Tensor] = {"weights": mine, "first_moment": moments, "second_moment": moments}
            self.engine.state.put(index, UnitState(vectors, 0))


def layout_of(case: Case, model: Model) -> Layout:
    return Layout(
        layer_blocks=tuple(range(model.layers)),
        pipeline=1,
        data=1,
        micro_batches=case.points[0].micro_batches,
        homes=(case.home,) * (model.layers + 2),
        clipping=case.clipping,
        speculates=case.updates == "Speculative",
    )


def drawn(unit: Unit, index: int, layers: int, device: torch.device) -> list[Tensor]:
    """Return a unit's initial weights in float32, drawn on the device: the CPU would take minutes for billions."""
    generator = torch.Generator(device).manual_seed(_SEED + index)
    found = []
    for parameter in unit.parameters:
        tensor = torch.empty(parameter.shape, device=device)
        if tensor.ndim == 1:
            found.append(tensor.fill_(1.0))
            continue
        is_residual = parameter.name.endswith((".output.weight", ".down.weight"))
        std = 0.02 / sqrt(2 * layers) if is_residual else 0.02
        found.append(tensor.normal_(std=std, generator=generator))
    return found
