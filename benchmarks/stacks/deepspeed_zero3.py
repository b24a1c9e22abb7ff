"""DeepSpeed ZeRO-3 with its own AdamW and default settings, except for the offload."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.stacks.plain import plain_model
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, cross_entropy

_TO_HOST = {"device": "cpu", "pin_memory": False}
OFFLOAD = {"offload_optimizer": _TO_HOST, "offload_param": _TO_HOST}


def on_device(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    return _train(work, rank, world, {})


def offloaded(work: Work, rank: int, world: int) -> Iterator[Tensor]:
    return _train(work, rank, world, OFFLOAD)


def _train(work: Work, rank: int, world: int, offload: dict[str, Any]) -> Iterator[Tensor]:
    engine = make_engine(work, world, offload)
    for batch in work.batches:
        yield train_step(engine, work, work.micro_batches_of(batch, rank, world))


def make_engine(work: Work, world: int, offload: dict[str, Any]) -> Any:
    # Imported here, because the import changes torch for the other stacks too.
    import deepspeed

    model = plain_model(work)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=_config(work, world, offload),
        dist_init_required=False,
    )
    return engine


def train_step(engine: Any, work: Work, parts: Sequence[Tensor]) -> Tensor:
    """Train one step; return the mean loss over this rank's micro-batches."""
    total = torch.zeros(())
    for tokens in parts:
        loss = cross_entropy(engine(tokens[:, :-1]), tokens)
        engine.backward(loss)  # divides by the number of micro-batches
        engine.step()  # updates with the last one
        total += loss.detach() / work.micro_batches
    return total


def _config(work: Work, world: int, offload: dict[str, Any]) -> dict[str, Any]:
    adamw = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": work.batches.shape[1] // world // work.micro_batches,
        "gradient_accumulation_steps": work.micro_batches,
        "zero_optimization": {"stage": 3, **offload},
        "optimizer": {"type": "AdamW", "params": adamw},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "steps_per_print": 10**9,
    }
