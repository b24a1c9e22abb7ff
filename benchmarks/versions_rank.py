"""Run one process of `versions`: `python -m benchmarks.versions_rank CASE RESULT`, under torchrun.

The engine is the first one on PYTHONPATH. Earlier engines can be compared back to the commit that added
`model/initialization.py` to the trainer; older engines have other names.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.ranks.ranks import Ranks

from benchmarks.cases import MODELS
from benchmarks.stacks.ours import layout_of, make_engine, train_step
from benchmarks.versions_results import VersionCase, VersionSteps
from benchmarks.work import THREADS_PER_RANK, Work, noisy_sequences

SEED, RANKS = 7, 2


def main(case: VersionCase, result: Path) -> None:
    torch.set_num_threads(THREADS_PER_RANK)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, sequences = MODELS[case.model], max(16, RANKS * case.micro_batches)
    steps = model.effort.warm_up + model.effort.timed
    batches = noisy_sequences(steps, sequences, model.spec.sequence_length + 1, SEED)
    work = Work(model.spec, SEED, batches, case.micro_batches, recompute=False)
    found = VersionSteps(warm_up=model.effort.warm_up)
    ranks = Ranks(rank, RANKS, torch.device("cpu"))
    with TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        engine = _engine(case, work, ranks, Path(folder))
        for step in range(steps):
            dist.barrier()
            begin, waited = time.perf_counter(), ranks.heartbeat.stalled_seconds
            loss = train_step(engine, work, step)
            dist.barrier()
            found.seconds.append(time.perf_counter() - begin)
            found.waited.append(ranks.heartbeat.stalled_seconds - waited)
            found.losses.append(loss)
        engine.state.wait_for_updates()
        engine.close()
    if rank == 0:
        result.write_text(found.model_dump_json())
    dist.destroy_process_group()


def _engine(case: VersionCase, work: Work, ranks: Ranks, folder: Path) -> Engine:
    clipping: Literal["Global", "None"] = "Global" if case.mixed else "None"
    layout = replace(layout_of(work, ranks.world, case.home, 2), clipping=clipping)
    return make_engine(work, ranks, layout, folder, torch.bfloat16 if case.mixed else torch.float32)


if __name__ == "__main__":
    main(VersionCase.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
