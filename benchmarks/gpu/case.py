"""Run one case in a process of its own: `python -m benchmarks.gpu.case REQUEST`.

A failure affects only this case; points measured earlier are already in the result's file.
"""

import os
import re
import sys
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path

import torch
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pydantic import BaseModel
from torch import Tensor

from benchmarks.gpu.budget import fits
from benchmarks.gpu.cases import TIMED, Case, Point, suite, warm_up
from benchmarks.gpu.machine import first_device
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.results import Forecast, Measured, Record
from benchmarks.gpu.stacks import Trainer, trainer_of
from benchmarks.work import noisy_sequences
from tests.support.gpu_timeline import record

_SEED = 7
_PROFILED = 1


class Request(BaseModel, frozen=True):
    case: Case
    is_tiny: bool
    device: str
    seconds: float
    """Time limit of the case; a point that would exceed it is left out."""
    folder: Path
    """Folder of the home disk."""
    profile: Path | None
    """Profile of the machine; None means without predictions."""
    result: Path


def main(request: Request) -> None:
    end = time.monotonic() + request.seconds
    found = Record(case=request.case, left_out=request.case.points)
    try:
        runner = _Runner(request)
        for number in range(len(request.case.points)):
            if not runner.has_time(number, end - time.monotonic()):
                break
            found = _with(found, runner.measure(number))
            _write(found, request.result)
        runner.trainer.close()
    except Exception as error:
        _write(found.model_copy(update={"problem": f"{type(error).__name__}: {_first_line(error)}"}), request.result)
        traceback.print_exc()
        # The threads of a failed trainer may wait for each other; exit at once and leave the time to the next case.
        os._exit(1)
    _write(found, request.result)


def _write(found: Record, file: Path) -> None:
    """Write the record atomically: a process that is killed leaves the previous record or the new one."""
    new = file.with_suffix(".new")
    new.write_text(found.model_dump_json())
    new.replace(file)


def _profile(file: Path) -> HardwareProfile:
    return HardwareProfile.model_validate_json(file.read_bytes())


class _Runner:
    def __init__(self, request: Request) -> None:
        self._case, self._device = request.case, first_device(request.device)
        self._model = suite(tiny=request.is_tiny).models[self._case.model]
        self._folder = request.folder
        self._profile = None if request.profile is None else _profile(request.profile)
        self.trainer: Trainer = trainer_of(self._case, self._model, self._device, request.folder)
        self._last = 0.0
        """Seconds of a step at the previous point."""

    def has_time(self, number: int, left: float) -> bool:
        points = self._case.points
        growth = points[number].tokens / points[max(0, number - 1)].tokens
        return left > 0 and fits(left, self._last, growth, _steps(self._case, number))

    def measure(self, number: int) -> Measured:
        """Measure the case's point with this index."""
        point, warm = self._case.points[number], warm_up(self._case, number)
        batches = _batches(point, _steps(self._case, number), self._model.sequence_length).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        ends, losses = [time.perf_counter()], []
        for batch in batches[:-_PROFILED]:
            losses.append(self.trainer.train(batch, point.micro_batches))
            ends.append(time.perf_counter())
        seconds = [end - begin for begin, end in pairwise(ends)][warm:]
        self._last = max(seconds)
        hidden = self._hidden_share(batches[-1], point.micro_batches)
        return Measured(
            point=point,
            seconds=tuple(seconds),
            losses=tuple(losses),
            hidden_share=hidden,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0,
            pinned_bytes=_pinned_by_torch() + self.trainer.pinned_bytes(),
            host_peak_bytes=_resident_bytes(),
            forecast=self._forecast(point),
        )

    def _hidden_share(self, batch: Tensor, micro_batches: int) -> float | None:
        def step() -> None:
            self.trainer.train(batch, micro_batches)
            self.trainer.settle()

        self.trainer.settle()
        if self._device.type != "cuda":
            return None
        with tempfile.TemporaryDirectory() as folder:
            return record(step, Path(folder, "trace.json")).hidden_share

    def _forecast(self, point: Point) -> Forecast | None:
        if self._profile is None or not isinstance(self.trainer, Ours):
            return None
        return self.trainer.forecast(point.tokens, self._profile)


def _steps(case: Case, number: int) -> int:
    return warm_up(case, number) + TIMED + _PROFILED


def _batches(point: Point, steps: int, length: int) -> Tensor:
    """Return the batches, [steps, sequences, T + 1]; the same for all stacks."""
    return noisy_sequences(steps, point.tokens // length, length + 1, _SEED + point.tokens)


def _with(found: Record, measured: Measured) -> Record:
    return found.model_copy(update={"measured": (*found.measured, measured), "left_out": found.left_out[1:]})


def _pinned_by_torch() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def _resident_bytes() -> int:
    """Return the peak resident bytes of this program; getrusage would include the parent's peak."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


if __name__ == "__main__":
    main(Request.model_validate_json(sys.argv[1]))
