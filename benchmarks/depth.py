"""Time the steps of ever deeper models at a fixed window: `python -m benchmarks.depth`.

Streamed layers share a few device slots: time must grow in proportion to the layers, and the number of slots must stay
the same.
"""

import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pydantic import BaseModel, TypeAdapter

from benchmarks import machine
from benchmarks.quiet import quiet_machine
from benchmarks.results import RESULTS
from benchmarks.stacks.ours import layout_of, make_engine, train_step
from benchmarks.work import Work, noisy_sequences

DEPTH = RESULTS / "depth.json"
LAYERS = (4, 8, 16, 32, 64)
WINDOW = 2
_WARM_UP, _TIMED, _SEQUENCES = 2, 5, 8


class Depth(BaseModel, frozen=True):
    layers: int
    seconds: float
    """Median seconds of a step."""
    window_bytes: int


Depths = TypeAdapter(list[Depth])


def main() -> None:
    torch.set_num_threads(1)
    depths = []
    with quiet_machine():
        for layers in LAYERS:
            with progress.step(f"{layers} layers at a window of {WINDOW}"):
                depths.append(_measured(layers))
    DEPTH.parent.mkdir(exist_ok=True)
    DEPTH.write_bytes(Depths.dump_json(depths, indent=1))
    machine.stamp(DEPTH)


def _measured(layers: int) -> Depth:
    spec = Model(
        layers=layers,
        hidden_size=128,
        attention=Attention(heads=4),
        sequence_length=64,
        feed_forward=FeedForward(size=512),
    )
    batches = noisy_sequences(_WARM_UP + _TIMED, _SEQUENCES, spec.sequence_length + 1, seed=7)
    work = Work(spec, 7, batches, micro_batches=4, recompute=True)
    engine = make_engine(work, Ranks(0, 1, torch.device("cpu")), layout_of(work, 1, "Host", WINDOW), Path())
    ends = [time.perf_counter()]
    for step in range(len(batches)):
        train_step(engine, work, step)
        ends.append(time.perf_counter())
    seconds = [end - begin for begin, end in pairwise(ends)][_WARM_UP:]
    measured = Depth(layers=layers, seconds=median(seconds), window_bytes=engine.state.memory_report().window)
    engine.close()
    return measured


def section() -> str:
    """Return the section as Markdown, from the newest results."""
    depths = Depths.validate_json(DEPTH.read_bytes())
    rows = "\n".join(
        f"| {d.layers} | {1000 * d.seconds:.0f} | {1000 * d.seconds / d.layers:.2f} | {d.window_bytes / 2**20:.2f} |"
        for d in depths
    )
    return f"""## Depth

One rank trains models that differ only in their number of layers. The hidden size is 128. A step has 4 micro-batches,
and a micro-batch has 2 sequences of 64 bytes. The state is on the host, the window has {WINDOW} slots, and blocks are
recomputed in the backward pass. The table shows that the time of a step grows in proportion to the number of layers.
The window, which holds working copies of the weights of layers, takes the same memory with any number of layers (the
column *slots*).

| layers | ms per step | ms per step and layer | slots, MiB |
| ---: | ---: | ---: | ---: |
{rows}"""


if __name__ == "__main__":
    main()
