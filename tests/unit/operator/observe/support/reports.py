"""A minimal progress report of a pod; pods of jobs in tests."""

from typing import Any

from pseudoreal_api.wire.messages import ProgressReport

PODS = {"pseudo": 10_000, "real": 10_000}
"""Phase name -> maximum number of pods, as in `ReportStore.follow`."""


def progress(step: int) -> ProgressReport:
    values: dict[str, Any] = dict.fromkeys(("learning_rate", "tokens_per_second", "seconds", "remaining_seconds"), 1.0)
    return ProgressReport(
        phase="pseudo", step=step, total_steps=20, tokens=step * 256, loss=3.0, global_cursor=step * 8, **values
    )
