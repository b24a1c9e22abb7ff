"""Losses and checkpoints of a job from its logs. Pure.

The logs are read from the pods with rank 0, in the order of the executions. Lines read twice count once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import CheckpointCost, ProgressReport
from pseudoreal_operator.observe.reading import progress_of


@dataclass
class History:
    losses: dict[int, float] = field(default_factory=dict)
    """Training step -> loss, in step order."""
    checkpoints: dict[int, CheckpointCost] = field(default_factory=dict)
    """Training step -> cost of its checkpoint, in step order."""

    def read(self, lines: Iterable[str]) -> None:
        for report in map(progress_of, lines):
            if report is not None:
                self._add(report)

    def add_status(self, status: PseudoRealJobStatus) -> None:
        """Add losses from the status for steps missing in the logs."""
        for phase in status.phases:
            if phase.step is not None and phase.loss is not None:
                self._note(phase.step, float(phase.loss))
        progress = status.progress
        if progress is not None and progress.loss is not None:
            self._note(progress.step, float(progress.loss))

    def _add(self, report: ProgressReport) -> None:
        # An execution that resumes from a checkpoint trains the steps after it again: drop the later entries.
        _cut(self.losses, report.step)
        _cut(self.checkpoints, report.step)
        if report.loss is not None and isfinite(report.loss):
            self.losses[report.step] = report.loss
        if report.checkpoint is not None:
            self.checkpoints[report.checkpoint.step] = report.checkpoint

    def _note(self, step: int, loss: float) -> None:
        if isfinite(loss) and step not in self.losses:
            self.losses = dict(sorted({**self.losses, step: loss}.items()))


def _cut(known: dict[int, Any], last: int) -> None:
    """Remove the entries after the step `last`."""
    while known and next(reversed(known)) > last:
        known.popitem()
