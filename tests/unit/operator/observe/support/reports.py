"""A minimal progress report of a pod."""

from typing import Any

from pseudoreal_api.wire.messages import ProgressReport


def progress(step: int) -> ProgressReport:
    values: dict[str, Any] = dict.fromkeys(("learning_rate", "tokens_per_second", "seconds", "remaining_seconds"), 1.0)
    return ProgressReport(
        phase="pseudo", step=step, total_steps=20, tokens=step * 256, loss=3.0, global_cursor=step * 8, **values
    )
