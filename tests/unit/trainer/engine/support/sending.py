"""Two ranks that send each other messages of the largest model and batch that the spec allows."""

from pathlib import Path

import torch
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Flow, Receive, Send

CPU = torch.device("cpu")
LAYERS, MICRO_BATCHES = 10_000, 1_000_000
"""Most layers and micro-batches that the spec allows."""
POSITIONS = LAYERS + 2
SAME = [(1, 0), (7121, 107_352)]
"""Positions and micro-batches of two messages with the same tag."""
SENT = [(3, 0), (3, MICRO_BATCHES - 1), (LAYERS, 70_000), *SAME]


def exchange(rank: int, folder: Path) -> None:
    """Exchange messages as one of two ranks; the second rank writes the received values to `folder`."""
    layout = Layout(layer_blocks=tuple(range(LAYERS)), pipeline=2, data=1, micro_batches=MICRO_BATCHES)
    messages = Messages(ProcessGroups(layout, Ranks(rank, 2, CPU)), torch.float32, Trace(rank))
    for number, (position, micro_batch) in enumerate(SENT):
        if rank == 0:
            messages.send(Send(Flow.ACTIVATION, position, micro_batch, 1), torch.full((2,), float(number)))
        else:
            messages.receive(Receive(Flow.ACTIVATION, position, micro_batch, 0), (2,))
    if rank == 1:
        found = [float(messages.take((Flow.ACTIVATION, position, m))[0]) for position, m in SENT]
        (folder / "found").write_text(str(found))
    messages.finish()
