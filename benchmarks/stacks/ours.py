"""This project's engine: layered order, fully sharded state, in each home."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pseudoreal_api.spec.optimizer import Clipping, Optimizer, ProductFormat
from pseudoreal_api.spec.phase import Home, Sharing, StateSharding
from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.model.initialization import initial_weights
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor

from benchmarks.work import BETAS, LEARNING_RATE, WEIGHT_DECAY, Batch, Stack, Work


def at(home: Home, window: int = 2, sharding: StateSharding = "Full", *, cuts_matrices: bool = False) -> Stack:
    """Return the stack with this home of the state. `cuts_matrices`: all ranks are tensor ranks."""

    def train(work: Work, rank: int, world: int) -> Iterator[Tensor]:
        with TemporaryDirectory() as folder:
            layout = replace(layout_of(work, world, home, window), sharding=sharding)
            if cuts_matrices:
                layout = replace(layout, tensor_ranks=world, vocabulary=work.model.vocabulary_size)
            engine = make_engine(work, Ranks(rank, world, work.batches.device), layout, Path(folder))
            for step in range(len(work.batches)):
                # All ranks know the whole batch's loss, and the caller's mean over the ranks leaves it unchanged.
                yield torch.tensor(train_step(engine, work, step))
            engine.close()

    return train


def train_step(engine: Engine, work: Work, step: int) -> float:
    """Train one step; return its loss in nats per token."""
    groups, sequences = engine.groups, work.batches[step]
    batch = Batch(work.micro_batches_of(sequences, groups.sequence_group, groups.layout.mesh.sequence_groups))
    tokens = sequences[:, 1:].numel()
    return engine.train(batch, Training(tokens, LEARNING_RATE, stop=False), step).loss_sum / tokens


def layout_of(work: Work, ranks: int, home: Home, window: int) -> Layout:
    layers = work.model.layers
    return Layout(
        layer_blocks=tuple(range(layers)),
        pipeline=1,
        data=ranks,
        micro_batches=work.micro_batches,
        sharding="Full",
        homes=(home,) * (layers + 2),
        window=window,
        keep="Inputs" if work.recompute else "All",
        clipping="None",
    )


def make_engine(
    work: Work,
    ranks: Ranks,
    layout: Layout,
    folder: Path,
    compute: torch.dtype = torch.float32,
    moments: torch.dtype = torch.float32,
    optimizer: Optimizer | None = None,
    gradients: torch.dtype = torch.float32,
    *,
    products: ProductFormat = "Compute",
) -> Engine:
    """Return an engine with one block per layer, like the other stacks, and with their optimizer if none is given."""
    layers = work.model.layers
    units = units_of(work.model, Sharing(blocks=layers))
    clipping = Clipping(mode=layout.clipping)
    usual = Optimizer(weight_decay=str(WEIGHT_DECAY), beta1=str(BETAS[0]), beta2=str(BETAS[1]), clipping=clipping)
    blueprint = Blueprint(
        model=work.model,
        optimizer=optimizer or usual,
        units=units,
        master=torch.float32,
        compute=compute,
        moments=moments,
        gradients=gradients,
        compiled=False,
        offload_directory=folder,
        seed=work.seed,
        products=products,
    )
    engine = Engine(blueprint, create_process_groups(layout, ranks), Trace(ranks.rank))
    for index, unit in enumerate(engine.units):
        weights = initial_weights(unit, index, work.model, work.seed, torch.float32)
        if engine.state.has(index):
            engine.state.put(index, UnitState.fresh(weights, engine.state.shard_range(index)))
    return engine
