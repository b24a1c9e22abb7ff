"""The steps of a job as columns, from the lines of metrics.jsonl. Pure."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.wire.messages import CheckpointCost, ProgressReport, Sample
from pydantic import ValidationError

from pseudoreal_trainer.report.downsample import Values

_FIELDS = (
    *("tokens", "loss", "validation_loss", "gradient_norm", "learning_rate", "tokens_per_second"),
    *("teraflops_per_second", "mfu", "device_bytes", "host_bytes", "expert_load_max", "expert_load_mean"),
    *("idle_experts", "dropped_tokens", "router_entropy", "seconds"),
)
"""Fields of a line that become columns of the same name."""
WAITS = ("data", "reductions", "updates")
"""Causes of waits; each has a column, `wait_CAUSE`, with seconds of the step."""
TRAINED_SECONDS = "trained_seconds"
"""Column: seconds of training from the job's start to the end of the step, over all processes. Lines that were written
again after a fault count once."""
_VALIDATION_SET = "validation "
"""Start of the names of columns with the losses of single validation sets."""
_MOST_PHASES, _MOST_SETS, _MOST_SAVES, _MOST_SAMPLES = 100, 12, 5000, 20
"""Bounds of what a file may name: phases, validation sets, saved checkpoints; newest samples that are kept."""
_MOST_STEP = 2**53
"""Steps from here on are not exact in a page's numbers."""


@dataclass(frozen=True)
class GeneratedText:
    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Steps:
    """Steps of a job, in ascending order, each once."""

    step: NDArray[np.int64]
    phase: NDArray[np.int64]
    """Index in `phases` of each step."""
    phases: tuple[str, ...]
    columns: Mapping[str, Values]
    process_starts: NDArray[np.intp]
    """Indices of the steps that were the first of a process, so the steps before which training had stopped."""
    saves: Sequence[CheckpointCost]
    samples: Sequence[GeneratedText]
    """Newest generated texts, oldest first."""
    unreadable: int
    """Number of lines that make no sense."""

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> Values:
        return self.columns.get(name, np.full(len(self), nan))

    def validation_sets(self) -> dict[str, Values]:
        """Return name -> losses, for the validation sets that have names."""
        begin = len(_VALIDATION_SET)
        return {name[begin:]: values for name, values in self.columns.items() if name.startswith(_VALIDATION_SET)}

    def has(self, name: str) -> bool:
        """Return whether some step has a value in the column."""
        return bool(np.isfinite(self.column(name)).any())


def read_steps(lines: Iterable[bytes]) -> Steps:
    """Return the steps in these lines. Lines that make no sense are counted, and left out."""
    collector = StepCollector()
    for line in lines:
        collector.add(line)
    return collector.steps()


class StepCollector:
    """Takes lines of metrics in the order in which they were written; at any time, `steps` are those so far."""

    def __init__(self) -> None:
        self._phases: dict[str, int] = {}
        self._step, self._phase, self._begins = array("q"), array("q"), array("b")
        self._columns = {name: array("d") for name in (*_FIELDS, *(f"wait_{cause}" for cause in WAITS))}
        self._trained = array("d")
        self._sets: dict[str, dict[int, float]] = {}
        """Name of a validation set -> index of a line -> loss."""
        self._saves: dict[int, CheckpointCost] = {}
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=_MOST_SAMPLES)
        self._before: ProgressReport | None = None
        self._unreadable = 0

    def add(self, line: bytes) -> None:
        try:
            report = ProgressReport.model_validate_json(line)
        except ValidationError:
            self._unreadable += 1
            return
        self.add_report(report)

    def add_report(self, report: ProgressReport) -> None:
        is_known = report.phase in self._phases or len(self._phases) < _MOST_PHASES
        if not (0 <= report.step < _MOST_STEP and is_known):
            self._unreadable += 1
            return
        self._add(report)

    def _add(self, report: ProgressReport) -> None:
        before, row = self._before, len(self._step)
        seconds = _number(report.seconds)
        is_new_process = before is None or report.phase != before.phase or not seconds >= _number(before.seconds)
        self._step.append(report.step)
        self._phase.append(self._phases.setdefault(report.phase, len(self._phases)))
        self._begins.append(is_new_process)
        for name in _FIELDS:
            self._columns[name].append(_number(getattr(report, name)))
        for cause in WAITS:
            waited = _number(report.waits.get(cause))
            earlier = 0.0 if is_new_process or before is None else _number(before.waits.get(cause))
            self._columns[f"wait_{cause}"].append(max(0.0, waited - earlier))
        earlier = 0.0 if is_new_process or before is None else _number(before.seconds)
        self._trained.append(max(0.0, seconds - earlier))
        for name, loss in (report.validation_losses or {}).items():
            if name in self._sets or len(self._sets) < _MOST_SETS:
                self._sets.setdefault(name, {})[row] = _number(loss)
        if report.checkpoint is not None and len(self._saves) < _MOST_SAVES:
            self._saves[report.checkpoint.step] = report.checkpoint
        self._samples.extend((report.step, sample) for sample in (report.samples or [])[:_MOST_SAMPLES])
        self._before = report

    def steps(self) -> Steps:
        step = np.array(self._step, dtype=np.int64)
        order = _last_of_each(step)
        columns = {name: np.array(values, dtype=np.float64)[order] for name, values in self._columns.items()}
        columns[TRAINED_SECONDS] = np.cumsum(np.nan_to_num(np.array(self._trained, dtype=np.float64)[order]))
        # With one set, its losses are those of the column validation_loss.
        for name, losses in self._sets.items() if len(self._sets) > 1 else ():
            values = np.full(len(step), nan)
            values[list(losses)] = list(losses.values())
            columns[f"{_VALIDATION_SET}{name}"] = values[order]
        begins = np.array(self._begins, dtype=bool)[order]
        return Steps(
            step=step[order],
            phase=np.array(self._phase, dtype=np.int64)[order],
            phases=tuple(self._phases),
            columns=columns,
            process_starts=np.flatnonzero(begins),
            saves=[self._saves[number] for number in sorted(self._saves)],
            samples=[GeneratedText(number, sample.prompt, sample.text) for number, sample in self._samples],
            unreadable=self._unreadable,
        )


def _last_of_each(step: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the index of the last line of each step, in the order of the steps: a replaced rank 0 on an unreachable
    node may have written lines of its own."""
    order = np.argsort(step, kind="stable")
    is_last = np.append(np.diff(step[order]) != 0, True)[: len(order)]
    found: NDArray[np.intp] = order[is_last]
    return found


def _number(value: float | None) -> float:
    """Return `value`, or NaN where there is none, it is not finite, or no float can hold it."""
    try:
        number = nan if value is None else float(value)
    except OverflowError:
        return nan
    return number if isfinite(number) else nan
