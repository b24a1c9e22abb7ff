"""Run one process: `python -m benchmarks.rank STACK CASE RESULT`, in the environment of a torchrun rank.

CASE is a Case as JSON; the first rank writes the steps to RESULT.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.cases import MODELS, Case
from benchmarks.results import Step
from benchmarks.stacks.registry import STACKS, TENSOR_PARALLEL
from benchmarks.work import THREADS_PER_RANK, Work, noisy_sequences

SEED = 7
Steps = TypeAdapter(list[Step])


@record  # torchrun shows the traceback of the rank that failed first
def main(stack: str, case: Case, result: Path) -> None:
    torch.set_num_threads(THREADS_PER_RANK)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = (STACKS | TENSOR_PARALLEL)[stack](work(case), rank, world)
    steps = []
    for step in measured(losses, world):
        steps.append(step)
        if rank == 0:
            print(f"step {len(steps)}: {step.seconds:.2f}s, loss {step.loss:.4f}", flush=True)
    if rank == 0:
        result.write_bytes(Steps.dump_json(steps))
    dist.destroy_process_group()


def work(case: Case) -> Work:
    model = MODELS[case.model]
    steps = model.effort.warm_up + model.effort.timed
    batches = noisy_sequences(steps, case.sequences, model.spec.sequence_length + 1, SEED)
    return Work(model.spec, SEED, batches, case.micro_batches, case.recompute)


def measured(losses: Iterator[Tensor], world: int) -> Iterator[Step]:
    """Yield the timed steps. A step ends once all ranks have its loss; the next one starts there."""
    start = time.perf_counter()
    for loss in losses:
        mean = loss.clone()
        dist.all_reduce(mean)
        now = time.perf_counter()
        yield Step(seconds=now - start, loss=mean.item() / world)
        start = time.perf_counter()


if __name__ == "__main__":
    main(sys.argv[1], Case.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
