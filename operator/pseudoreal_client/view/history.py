"""What a job's logs say of its past: losses and checkpoints. Pure.

The logs are those of the pods with rank 0, in the order of the executions; what is read twice counts once.
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
    """Training step -> loss, in the order of the steps."""
    checkpoints: dict[int, CheckpointCost] = field(default_factory=dict)
    """Training step -> what its checkpoint took, in the order of the steps."""

    def read(self, lines: Iterable[str]) -> None:
        for report in map(progress_of, lines):
            if report is not None:
                self._add(report)

    def add_status(self, status: PseudoRealJobStatus) -> None:
        """Losses of the status, for steps of which no log tells."""
        for phase in status.phases:
            if phase.step is not None and phase.loss is not None:
                self._note(phase.step, float(phase.loss))
        progress = status.progress
        if progress is not None and progress.loss is not None:
            self._note(progress.step, float(progress.loss))

    def _add(self, report: ProgressReport) -> None:
        # An execution that goes on from a checkpoint makes the steps behind it anew.
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
    """Removes what lies behind the step `last`."""
    while known and next(reversed(known)) > last:
        known.popitem()
