"""A small model that trains on a book, for comparing optimizers by their loss."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.optimizer import Optimizer, ProductFormat
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks

from benchmarks.stacks.ours import layout_of, make_engine
from benchmarks.work import Batch, Work

STEPS, WARM_UP = 300, 30
_BOOK = Path(__file__).parents[1] / "examples" / "text" / "pride-and-prejudice.txt"
_SEQUENCES, _LENGTH = 8, 64


def final_loss(
    optimizer: Optimizer,
    rate: Callable[[int], float],
    seed: int,
    validated: int,
    moments: torch.dtype = torch.float32,
    gradients: torch.dtype = torch.float32,
    *,
    products: ProductFormat = "Compute",
) -> float:
    """Return the validation loss after the last step, in nats per byte.

    `rate`: learning rate of a step, counted from 0. `seed`: seed of the weights and of the samples. `validated`: number
    of sequences of the validation. `products`: format of the operands of products in blocks.
    """
    book = torch.from_numpy(np.frombuffer(_BOOK.read_bytes(), np.uint8).astype(np.int64))
    training, validation = book[: len(book) * 9 // 10], book[len(book) * 9 // 10 :]
    random = torch.Generator().manual_seed(seed)
    batches = _windows(training, torch.randint(len(training) - _LENGTH, (STEPS, _SEQUENCES), generator=random))
    model = Model(
        layers=2,
        hidden_size=64,
        attention=Attention(heads=4),
        sequence_length=_LENGTH,
        feed_forward=FeedForward(size=256),
    )
    work, ranks = Work(model, seed, batches, 1, recompute=False), Ranks(0, 1, torch.device("cpu"))
    layout = replace(layout_of(work, 1, "Host", 2), clipping="Global")
    with TemporaryDirectory() as folder:
        engine = make_engine(
            work,
            ranks,
            layout,
            Path(folder),
            moments=moments,
            optimizer=optimizer,
            gradients=gradients,
            products=products,
        )
        for step, batch in enumerate(batches):
            engine.train(Batch((batch,)), Training(_SEQUENCES * _LENGTH, rate(step), stop=False), step)
        engine.state.wait_for_updates()
        found = _windows(validation, torch.linspace(0, len(validation) - _LENGTH - 1, validated).long())
        loss = sum(engine.evaluate(Batch((found,)), 1).values()) / (validated * _LENGTH)
        engine.close()
    return loss


def _windows(text: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    return text[begins[..., None] + torch.arange(_LENGTH + 1)]
