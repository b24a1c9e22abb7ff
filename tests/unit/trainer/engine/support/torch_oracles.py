"""The same training with torch's own pipeline schedules and with fully_shard, on two ranks, without the engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.model.rotary import rotary
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support.cases import RATE, STEPS, Case
from tests.unit.trainer.engine.support.reference import batch_of, part_of

WORLD, SEED = 2, 3


@dataclass
class Trained:
    """Result of one rank's training."""

    losses: list[float] = field(default_factory=list)
    """Loss of each step, over all ranks together."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    first_moments: dict[str, Tensor] = field(default_factory=dict)


def train_all(trainings: list[tuple[str, Case]], folder: Path) -> list[Trained]:
    """Run trainings (name in ORACLES, case) on both ranks. Return the joined result of each."""
    run_ranks(_rank, WORLD, trainings, folder)
    ranks = [torch.load(folder / f"oracle-{rank}.pt", weights_only=False) for rank in range(WORLD)]
    return [_joined(parts) for parts in zip(*ranks, strict=True)]


def _joined(parts: Iterable[Trained]) -> Trained:
    whole = Trained()
    for part in parts:
        whole.losses = part.losses
        whole.weights |= part.weights
        whole.first_moments |= part.first_moments
    return whole


def _rank(rank: int, trainings: list[tuple[str, Case]], folder: Path) -> None:
    torch.save([ORACLES[name](rank, case) for name, case in trainings], folder / f"oracle-{rank}.pt")


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first layer and the head after the last."""

    def __init__(self, model: Transformer, layers: range) -> None:
        super().__init__()
        self.spec = model.spec
        self.embedding = model.embedding if layers.start == 0 else None
        self.blocks = nn.ModuleList(model.blocks[model.layer_blocks[layer]] for layer in layers)
        assert model.head is not None
        self.head = nn.Sequential(model.norm, model.head) if layers.stop == len(model.layer_blocks) else None

    def forward(self, source: Tensor) -> Tensor:
        """Return features or logits, [B, T, 256], for tokens [B, T] or features [B, T, H]."""
        hidden = source if self.embedding is None else self.embedding(source)
        rotation = rotary(self.spec, hidden.shape[1], hidden)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        return hidden if self.head is None else self.head(hidden)


def looped_bfs(rank: int, case: Case) -> Trained:
    """Train breadth-first, with layers placed round-robin on the ranks."""
    return _pipeline(rank, case, [range(layer, layer + 1) for layer in range(case.layers)])


def one_f_one_b(rank: int, case: Case) -> Trained:
    """Train depth-first, with half of the layers on each rank."""
    half = case.layers // WORLD
    return _pipeline(rank, case, [range(half * stage, half * (stage + 1)) for stage in range(WORLD)])


def _pipeline(rank: int, case: Case, stages: list[range]) -> Trained:
    model = build_model(case.model, case.sharing, SEED, torch.float64)
    mine = {index: Stage(model, stages[index]) for index in range(rank, len(stages), WORLD)}
    parameters = {id(parameter) for stage in mine.values() for parameter in stage.parameters()}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in parameters}
    wrapped = [PipelineStage(stage, index, len(stages), torch.device("cpu")) for index, stage in mine.items()]
    tokens = batch_of(case, 0)[:, :, 1:].numel()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens

    # The gradients of micro-batches are summed: the loss is divided by all tokens already.
    schedule: ScheduleLoopedBFS | Schedule1F1B
    if len(wrapped) > 1:
        schedule = ScheduleLoopedBFS([*wrapped], case.micro_batches, loss_fn=loss, scale_grads=False)
    else:
        schedule = Schedule1F1B(wrapped[0], case.micro_batches, loss_fn=loss, scale_grads=False)
    return _steps(named, lambda step: _scheduled(schedule, batch_of(case, step), is_last=len(stages) - 1 in mine))


def _scheduled(schedule: ScheduleLoopedBFS | Schedule1F1B, batch: Tensor, *, is_last: bool) -> Tensor:
    """Return this rank's part of the loss, a scalar."""
    windows, losses = batch.flatten(0, 1), list[Tensor]()
    inputs = (windows[:, :-1],) if dist.get_rank() == 0 else ()
    if is_last:
        schedule.step(*inputs, target=windows[:, 1:], losses=losses)
    else:
        schedule.step(*inputs)
    return torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=torch.float64)


def sharded(rank: int, case: Case) -> Trained:
    """Train with fully_shard, block by block."""
    model = build_model(case.model, case.sharing, SEED, torch.float64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def gradients(step: int) -> Tensor:
        batch = batch_of(case, step)
        total = torch.zeros((), dtype=torch.float64)
        for windows in part_of(batch, rank, WORLD):
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
            loss = loss / batch[:, :, 1:].numel()
            # fully_shard averages gradients over the ranks, and the gradient here is their sum.
            (loss * WORLD).backward()
            total += loss.detach()
        return total

    return _steps(dict(model.named_parameters()), gradients)


def _steps(named: dict[str, nn.Parameter], gradients: Callable[[int], Tensor]) -> Trained:
    optimizer = adamw(named.values(), Case().optimizer, RATE, fused=False)
    trained = Trained()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = gradients(step)
        optimizer.step()
        dist.all_reduce(loss)
        trained.losses.append(float(loss))
    for name, parameter in named.items():
        trained.weights[name] = _whole(parameter.detach())
        trained.first_moments[name] = _whole(optimizer.state[parameter]["exp_avg"])
    return trained


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


ORACLES: dict[str, Callable[[int, Case], Trained]] = {
    "ScheduleLoopedBFS": looped_bfs,
    "Schedule1F1B": one_f_one_b,
    "fully_shard": sharded,
}
