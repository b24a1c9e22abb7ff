"""A rank in which one chosen call fails: a write, a read, a collective, a copy or an update, from step `STEP` on."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_trainer.checkpoint.tensor_file import TensorWriter
from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradients import GradientAccumulator
from pseudoreal_trainer.engine.state.disk import DiskState
from pseudoreal_trainer.engine.state.memory import MemoryState
from pseudoreal_trainer.engine.state.snapshot import Snapshot
from pseudoreal_trainer.training.saving import Saver

CALLS: dict[str, tuple[Any, str]] = {
    "write of the disk": (os, "pwrite"),
    "read of the disk": (os, "preadv"),
    "all_reduce": (dist, "all_reduce"),
    "reduce_scatter": (dist, "reduce_scatter_tensor"),
    "all_gather": (dist, "all_gather_into_tensor"),
    "all_gather of a save": (dist, "all_gather"),
    "copy into the window": (Copies, "_start_fetch"),
    "addition to a gradient": (GradientAccumulator, "add"),
    "copy of a gradient to memory": (MemoryState, "keep_gradient"),
    "copy of a gradient to the disk": (DiskState, "keep_gradient"),
    "update in memory": (MemoryState, "update"),
    "update on the disk": (DiskState, "update"),
    "copy of a capture": (Snapshot, "_copy"),
    "write of a checkpoint": (TensorWriter, "append"),
    "commit": (Saver, "_commit"),
}
STEP = 3
"""Step in which calls fail; at that time the checkpoint of the previous step is being written."""
SAYS = "this call of the test fails"


class _Calls:
    """Count calls from the start of step `STEP` until the start of the next step, and let one of them fail."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        """Let the call of this name and number fail. Numbers start at 1; 0 lets none fail."""
        self.counts: Counter[str] = Counter()
        self._name, self._number, self._folder, self._lock = name, number, folder, Lock()
        self._begun = self._ended = False

    def watch(self) -> None:
        for name, (owner, attribute) in CALLS.items():
            setattr(owner, attribute, self._watched(name, getattr(owner, attribute)))
        train = Engine.train

        def trains(engine: Engine, batch: Any, training: Any, step: int, *rest: Any) -> Any:
            self._begun, self._ended = step >= STEP, step > STEP
            return train(engine, batch, training, step, *rest)

        Engine.train = trains  # type: ignore[assignment, method-assign]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            if self._begun:
                with self._lock:
                    # Another thread may still make calls of the step after the main thread has gone on to the next
                    # step.
                    self.counts[name] += not self._ended or name == self._name
                    fails = (name, self.counts[name]) == (self._name, self._number)
                if fails:
                    (self._folder / "failed").write_text(str(time.monotonic()))
                    raise OSError(SAYS)
            return call(*arguments, **named)

        return watched


def run(rank: int, port: int, config: Path, folder: Path, name: str, number: int) -> None:
    """Run one of two ranks. Write its outcome, and the counts of calls if it succeeds, into `folder`."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["PSEUDOREAL_OUTCOME_DIRECTORY"] = str(folder)
    calls = _Calls(name, number, folder)
    calls.watch()
    message = program.run_rank(config, program._exit_now)
    (folder / "counts").write_text("\n".join(f"{count} {name}" for name, count in calls.counts.items()))
    program._exit_now(message.exit_code)
