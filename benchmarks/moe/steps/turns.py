"""Engines of several jobs alternating in one process: `python -m benchmarks.moe.steps.turns ASKED RESULT`.

Other load on the machine affects all engines alike.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_dev.machine import shell
from pseudoreal_trainer.engine.engine import Engine
from pydantic import BaseModel, TypeAdapter
from torch import Tensor

from benchmarks.moe.engines import engine_of, train_step
from benchmarks.moe.jobs import SEED
from benchmarks.moe.results import LOG, Taken, Turn
from benchmarks.results import SCRATCH
from benchmarks.work import noisy_sequences

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}


class Asked(BaseModel, frozen=True):
    """Jobs to measure, and the number of turns and steps."""

    jobs: dict[str, dict[str, Any]]
    """Job by label."""
    turns: int
    """Timed turns, after one untimed turn."""
    steps: int
    """Steps of a turn."""


def take(asked: Asked) -> list[Taken]:
    """Measure in a process of its own. Raises CommandFailed with the end of the log."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        program = ["-m", "benchmarks.moe.steps.turns", asked.model_dump_json(), str(file)]
        shell.run([sys.executable, *program], LOG, environment=ENVIRONMENT)
        return TypeAdapter(list[Taken]).validate_json(file.read_bytes())


@dataclass
class _Runner:
    """An engine that advances through the batches."""

    engine: Engine
    batches: Tensor
    """[steps, sequences, T + 1]."""
    turns: list[Turn] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    dropped: float = 0.0

    def turn(self, steps: int) -> None:
        begin = (time.perf_counter(), time.thread_time(), time.process_time())
        for _ in range(steps):
            self._step()
        self.engine.state.wait_for_updates()
        wall, passes, whole = (
            (now - then) / steps
            for now, then in zip((time.perf_counter(), time.thread_time(), time.process_time()), begin, strict=True)
        )
        self.turns.append(Turn(seconds=wall, passes=passes, others=whole - passes))

    def _step(self) -> None:
        sequences = self.batches[len(self.losses)]
        agreed = train_step(self.engine, sequences, len(self.losses))
        self.losses.append(agreed.loss_sum / sequences[:, 1:].numel())
        self.dropped = agreed.load.dropped if agreed.load else 0.0


def main(asked: Asked, result: Path) -> None:
    torch.set_num_threads(1)
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="moe-") as folder, ExitStack() as engines:
        runners = dict[str, _Runner]()
        for label, body in asked.jobs.items():
            own = Path(folder, str(len(runners)))
            job = PseudoRealJob.from_object(body)
            batch, length = job.spec.phases[0].batch, job.spec.model.sequence_length
            batches = noisy_sequences((asked.turns + 1) * asked.steps, batch.sequences, length + 1, SEED)
            runners[label] = _Runner(engines.enter_context(engine_of(job, own)), batches)
        for _ in range(asked.turns + 1):
            for runner in runners.values():
                runner.turn(asked.steps)
        found = [
            Taken(label=label, turns=each.turns[1:], losses=each.losses, dropped=each.dropped)
            for label, each in runners.items()
        ]
    result.write_bytes(TypeAdapter(list[Taken]).dump_json(found))


if __name__ == "__main__":
    main(Asked.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
