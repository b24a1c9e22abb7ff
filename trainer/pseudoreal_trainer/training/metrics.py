"""Progress reports: a line in metrics.jsonl for every step, and progress lines in the log."""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import PROGRESS_EVENT, CheckpointCost, ProgressReport, Sample

from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.runtime.heartbeat import Heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.storage.path import ObjectPath, storage_path
from pseudoreal_trainer.training.kept_metrics import METRICS_FILE, KeptMetrics
from pseudoreal_trainer.training.schedule import phase_rate
from pseudoreal_trainer.training.sinks.background import finish
from pseudoreal_trainer.training.sinks.opening import open_sinks
from pseudoreal_trainer.training.sinks.sink import figures_of, texts_of

if TYPE_CHECKING:  # both import torch, which is slow to load for a command that only reads the file
    from pseudoreal_trainer.training.gauges import Gauges
    from pseudoreal_trainer.training.progress import Progress

_WINDOW = 20
"""Number of recent steps in the average of the step time."""
_LOG_SECONDS = 1.0
_BLOCK_BYTES, _MOST_LINE_BYTES = 1 << 20, 1 << 26
"""Bytes read at a time in the search for lines; maximal bytes of a line written by this program."""
_STEP = re.compile(rb'\{"phase": ?"[-a-z0-9]+", ?"step": ?([0-9]{1,18}),')

log = structlog.get_logger()


def forget_after(path: Path, step: int) -> None:
    """Truncate the file after the lines up to `step`: a resumed execution writes the later lines again.

    A line cut short by a crash is removed too. Steps grow from line to line, so only the removed part is read, from the
    end. One truncate call cuts the file: after a crash the file has either all its lines or exactly the kept ones.
    """
    with path.open("ab+") as file:
        end = next((end for line, end in _lines_from_end(file) if _is_kept(line, step)), 0)
        file.truncate(end)
        # A crash can have cut off only the line break of the last kept line.
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.write(b"\n")


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its line break and the position after the line, last line first.

    A line longer than `_MOST_LINE_BYTES` is yielded as empty bytes: this program cannot have written it.
    """
    end = start = file.seek(0, os.SEEK_END)
    while start > 0:
        first = max(0, start - _BLOCK_BYTES)
        block = os.pread(file.fileno(), start - first, first)
        at = len(block)
        # A line break is also the start of the next line, except at the end of the file.
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            begin = first + at + 1
            if begin < end:
                yield block[at + 1 : end - first] if end <= start else _read(file, begin, end), end
                end = begin
        start = first
    if end > 0:
        yield _read(file, 0, end), end


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    return os.pread(file.fileno(), end - begin, begin) if end - begin <= _MOST_LINE_BYTES else b""


def _is_kept(line: bytes, step: int) -> bool:
    found = _STEP.match(line)
    if found is not None and int(found[1]) > step:
        return False  # from the pattern alone: after a restart from scratch a million lines may go, too many to parse
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


class Meter:
    """Timer of training steps; validation and checkpoints are outside its context."""

    def __init__(self, heartbeat: Heartbeat, waited_for_data: Callable[[], float]) -> None:
        """`waited_for_data` returns the total seconds of waits for samples."""
        self._heartbeat, self._waited_for_data = heartbeat, waited_for_data
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds of the newest step during which reductions and updates blocked the main thread."""
        self.data_seconds = 0.0
        """Seconds of the newest step spent waiting for samples."""
        self.waits = dict.fromkeys(self._waits(), 0.0)
        """Seconds waited in all steps, by cause: data, reductions or updates."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def __enter__(self) -> Self:
        self._begin, self._before = time.perf_counter(), self._waits()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        duration = time.perf_counter() - self._begin
        self.seconds += duration
        self._recent.append(duration)
        waits = {name: seconds - self._before[name] for name, seconds in self._waits().items()}
        self.waits = {name: seconds + waits[name] for name, seconds in self.waits.items()}
        self.data_seconds = waits["data"]
        self.waited = waits["reductions"] + waits["updates"]

    def _waits(self) -> dict[str, float]:
        """Return the total seconds waited so far by cause, including waits during validation and checkpoints."""
        reductions, updates = self._heartbeat.reductions, self._heartbeat.updates
        return {
            "data": self._waited_for_data(),
            "reductions": reductions.stalled_seconds,
            "updates": updates.stalled_seconds,
        }

    @property
    def seconds_per_step(self) -> float:
        return sum(self._recent) / len(self._recent)


class Reporter:
    """Writer of metrics.jsonl (every step) and of progress lines in the log (at most one a second, plus every
    validation and important step).

    Exists on the first rank only. Each line is also passed to the sinks.
    """

    def __init__(
        self, config: PhaseConfig, meter: Meter, gauges: "Gauges", first_step: int, pod: PodFolder | None = None
    ) -> None:
        """`pod` is the folder for reports to the pod's supervisor; None: the reports are only logged."""
        self._config, self._meter, self._gauges, self._pod = config, meter, gauges, pod
        self._path = Path(config.work_directory) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        forget_after(self._path, first_step)
        self._file = self._path.open("a", buffering=1)
        folder = storage_path(config.storage)
        self._kept = KeptMetrics(folder, first_step) if isinstance(folder, ObjectPath) else None
        self._sinks = open_sinks(config, first_step + 1)
        self._logged = -_LOG_SECONDS
        self._saved: CheckpointCost | None = None
        self._correlations: list[float] | None = None
        self._samples: list[Sample] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._file.close()
        # A failing rank exits at once, without flushing the sinks: the steps since its last checkpoint are trained
        # again.
        if kind is None:
            finish(self._sinks)

    def keep(self, step: int) -> None:
        """Persist the lines up to `step` outside the pod. Call before the checkpoint of `step` is written."""
        if self._kept is not None:
            self._kept.keep(step)

    def saved(self, manifest: Manifest, cost: CheckpointCost) -> None:
        """Record the cost of a committed checkpoint for the next line, and tell the pod's supervisor of the
        checkpoint."""
        self._saved = cost
        if self._pod is not None:
            self._pod.leave_checkpoint(manifest.name, manifest.step)

    def checked(self, correlations: Sequence[float]) -> None:
        """Record the cosines between the gradients of neighbouring layers for the next line."""
        self._correlations = list(correlations)

    def wrote(self, samples: Sequence[Sample]) -> None:
        """Record the generated samples for the next line."""
        self._samples = list(samples)

    def step(self, progress: "Progress", *, validated: bool, important: bool) -> None:
        """Report a finished step. `validated`: the validation loss was measured after exactly this step."""
        report, line = self._report(progress), self._line(progress, validated=validated)
        # Many programs treat U+2028 and similar characters as line breaks; escaping keeps each line in one piece.
        text = line.model_dump_json(ensure_ascii=True)
        self._file.write(text + "\n")
        if self._kept is not None:
            self._kept.add(text)
        for sink in self._sinks:
            sink.log(progress.step, figures_of(line), texts_of(line))
        now = time.monotonic()
        if important or validated or now - self._logged >= _LOG_SECONDS:
            self._logged = now
            log.info(PROGRESS_EVENT, **report.model_dump())
            if self._pod is not None:
                self._pod.leave_progress(report)

    def _line(self, progress: "Progress", *, validated: bool) -> ProgressReport:
        """Return the line of the newest step, with everything recorded since the previous line.

        Validation losses are included only if they were measured after this step.
        """
        known: dict[str, Any] = {
            "checkpoint": self._saved,
            "gradient_correlations": self._correlations,
            "samples": self._samples,
        }
        self._saved = self._correlations = self._samples = None
        if not validated:
            return self._report(progress, validation_loss=None, **known)
        sets = {name: loss for name, loss in progress.validation_losses.items() if name}
        bits = {name or "text": each for name, each in progress.bits_per_byte.items()}
        return self._report(progress, validation_losses=sets or None, bits_per_byte=bits or None, **known)

    def _report(self, progress: "Progress", **known: Any) -> ProgressReport:
        """Return the report of the newest step; `known` adds or overrides fields."""
        config, gauges, pace = self._config, self._gauges, self._meter.seconds_per_step
        values = {
            "phase": config.phase,
            "step": progress.step,
            "total_steps": config.total_steps,
            "tokens": progress.tokens,
            "loss": progress.loss,
            "z_loss": progress.z_loss,
            "auxiliary_loss": progress.auxiliary_loss,
            "expert_load_max": progress.load and progress.load.largest,
            "expert_load_mean": progress.load and progress.load.mean,
            "idle_experts": progress.load and progress.load.idle,
            "dropped_tokens": progress.load and progress.load.dropped,
            "router_entropy": progress.load and progress.load.entropy,
            "validation_loss": progress.validation_loss,
            "learning_rate": phase_rate(config, progress.step, progress.begin),
            "tokens_per_second": config.batch.sequences * config.model.sequence_length / pace,
            "step_seconds": pace,
            "seconds": self._meter.seconds,
            "remaining_seconds": (config.phase_steps - progress.step) * pace,
            "global_cursor": progress.cursor,
            "skipped_steps": progress.skipped.steps,
            "data_seconds": self._meter.data_seconds,
            "waited_seconds": self._meter.waited,
            "waits": self._meter.waits,
            "gradient_norm": progress.gradient_norm,
            "teraflops_per_second": gauges.teraflops_per_second(pace, progress.counted),
            "mfu": gauges.utilisation(pace, progress.counted),
            "device_bytes": gauges.device_bytes(),
            "host_bytes": gauges.host_bytes(),
        }
        return ProgressReport.model_validate(values | known)
