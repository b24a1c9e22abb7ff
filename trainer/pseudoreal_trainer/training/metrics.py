"""Progress reports of the first rank, with speed and memory use.

Each step adds a line to metrics.jsonl. The log gets at most one line a second, apart from validations and important
steps.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import PROGRESS_EVENT, CheckpointCost, ProgressReport, Sample

from pseudoreal_trainer.accelerator.adapters import adapter_of, kind_of
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_sizes
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.utilisation import peak_operations, step_operations
from pseudoreal_trainer.portable import peak_resident_bytes
from pseudoreal_trainer.runtime.heartbeat import Heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.storage.path import ObjectPath, storage_path
from pseudoreal_trainer.training.metrics_file import METRICS_FILE, PersistedMetrics, truncate_after
from pseudoreal_trainer.training.progress import Progress
from pseudoreal_trainer.training.schedule import phase_rate
from pseudoreal_trainer.training.sinks import figures_of, finish_sinks, open_sinks, texts_of


@dataclass(frozen=True)
class Gauges:
    """Computes the speed and memory figures of a phase's progress reports."""

    sizes: Sizes
    tokens: int
    """Number of tokens of one step, over all ranks."""
    ranks: int
    peak: float | None
    """Peak floating-point operations per second of the device in the compute type; None if unknown."""
    device: torch.device

    def operations(self, counted: Counts | None = None) -> float:
        """Return the floating-point operations of a training step per rank.

        `counted`: document counts of the step; None: attention spans whole sequences.
        """
        pairs = None if counted is None else counted.twice_the_pairs
        return step_operations(self.sizes, self.tokens, pairs) / self.ranks

    def teraflops_per_second(self, seconds: float, counted: Counts | None = None) -> float:
        """Return a rank's teraflops per second at `seconds` per step."""
        return self.operations(counted) / seconds / 1e12

    def utilisation(self, seconds: float, counted: Counts | None = None) -> float | None:
        """Return the achieved share of `peak` (MFU); None if `peak` is unknown."""
        return None if self.peak is None else self.operations(counted) / seconds / self.peak

    def device_bytes(self) -> int | None:
        return None if self.device.type == "cpu" else torch.accelerator.max_memory_allocated(self.device)

    def host_bytes(self) -> int:
        return peak_resident_bytes()


def phase_gauges(config: PhaseConfig, ranks: Ranks) -> Gauges:
    tokens = config.batch.sequences * config.model.sequence_length
    knows_peak = ranks.device.type != "cpu" and config.precision.compute == "bfloat16"
    peak = peak_operations(adapter_of(ranks.device).name) if knows_peak else None
    return Gauges(phase_sizes(config, kind_of(ranks.device)), tokens, config.ranks, peak, ranks.device)


_WINDOW = 20
"""Number of newest steps over which the step time is averaged."""
_LOG_SECONDS = 1.0

log = structlog.get_logger()


class Meter:
    """Timer of training steps and their waits. A context manager for one step; validation and checkpoints are outside
    the context."""

    def __init__(self, heartbeat: Heartbeat, waited_for_data: Callable[[], float]) -> None:
        """`waited_for_data` returns the total seconds of waits for samples."""
        self._heartbeat, self._waited_for_data = heartbeat, waited_for_data
        self.seconds = 0.0
        """Seconds of all steps of this process, without validation and checkpoints."""
        self.waited = 0.0
        """Seconds for which the main thread waited for reductions and updates in the newest step."""
        self.data_seconds = 0.0
        """Seconds of the newest step spent waiting for samples."""
        self.waits = dict.fromkeys(self._waits(), 0.0)
        """Cause (data, reductions, updates) -> seconds waited in all steps of this process."""
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
        """Return cause -> total seconds waited so far, including waits during validation and checkpoints."""
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
        self, config: PhaseConfig, meter: Meter, gauges: Gauges, first_step: int, pod: PodFolder | None = None
    ) -> None:
        """`first_step`: number of steps done at the start of this execution; lines of later steps are removed. `pod`:
        folder for reports to the pod's supervisor; None: the reports are only logged."""
        self._config, self._meter, self._gauges, self._pod = config, meter, gauges, pod
        self._path = Path(config.work_directory) / METRICS_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(self._path, first_step)
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        folder = storage_path(config.storage)
        self._persisted = PersistedMetrics(folder, first_step) if isinstance(folder, ObjectPath) else None
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
            finish_sinks(self._sinks)

    def persist(self, step: int) -> None:
        """Persist the lines up to `step` outside the pod. Call before the checkpoint of `step` is written."""
        if self._persisted is not None:
            self._persisted.persist(step)

    def record_checkpoint(self, manifest: Manifest, cost: CheckpointCost) -> None:
        """Record the cost of a committed checkpoint for the next line, and report the checkpoint to the pod's
        supervisor."""
        self._saved = cost
        if self._pod is not None:
            self._pod.write_checkpoint(manifest.name, manifest.step)

    def record_correlations(self, correlations: Sequence[float]) -> None:
        """Record the cosines between the gradients of neighbouring layers for the next line."""
        self._correlations = list(correlations)

    def record_samples(self, samples: Sequence[Sample]) -> None:
        """Record the generated samples for the next line."""
        self._samples = list(samples)

    def report_step(self, progress: Progress, *, validated: bool, important: bool) -> None:
        """Report a finished step. `validated`: the validation loss was measured after exactly this step."""
        report, line = self._report(progress), self._line(progress, validated=validated)
        # Many programs treat U+2028 and similar characters as line breaks; escaping keeps each line in one piece.
        text = line.model_dump_json(ensure_ascii=True)
        self._file.write(text + "\n")
        if self._persisted is not None:
            self._persisted.add(text)
        for sink in self._sinks:
            sink.log(progress.step, figures_of(line), texts_of(line))
        now = time.monotonic()
        if important or validated or now - self._logged >= _LOG_SECONDS:
            self._logged = now
            log.info(PROGRESS_EVENT, **report.model_dump())
            if self._pod is not None:
                self._pod.write_progress(report)

    def _line(self, progress: Progress, *, validated: bool) -> ProgressReport:
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

    def _report(self, progress: Progress, **known: Any) -> ProgressReport:
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
