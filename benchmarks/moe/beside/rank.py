"""Run one process: `python -m benchmarks.moe.beside.rank STACK CASE RESULT`, in the environment of a torchrun
rank.

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

from benchmarks.moe.beside.cases import LENGTH, SEQUENCES, TIMED, WARM_UP, Case
from benchmarks.moe.beside.registry import STACKS
from benchmarks.moe.jobs import SEED
from benchmarks.moe.results import Step
from benchmarks.work import THREADS_PER_RANK, noisy_sequences


@record  # torchrun shows the traceback of the rank that failed first
def main(stack: str, case: Case, result: Path) -> None:
    torch.set_num_threads(THREADS_PER_RANK)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = noisy_sequences(WARM_UP + TIMED, SEQUENCES, LENGTH + 1, SEED)
    steps = []
    for step in measured(STACKS[stack](case, batches, rank, world), world):
        steps.append(step)
        if rank == 0:
            print(f"step {len(steps)}: {step.seconds:.3f}s, loss {step.loss:.6f}", flush=True)
    if rank == 0:
        result.write_bytes(TypeAdapter(list[Step]).dump_json(steps))
    dist.destroy_process_group()


def measured(losses: Iterator[Tensor], world: int) -> Iterator[Step]:
    """Yield the timed steps. A step ends once all ranks have its loss; the next one starts there."""
    begin, used = time.perf_counter(), time.process_time()
    for loss in losses:
        sums = torch.stack([loss.double(), torch.tensor(time.process_time() - used, dtype=torch.float64)])
        dist.all_reduce(sums)
        mean, processor = (sums / world).tolist()
        yield Step(seconds=time.perf_counter() - begin, processor=processor, loss=mean)
        begin, used = time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main(sys.argv[1], Case.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
