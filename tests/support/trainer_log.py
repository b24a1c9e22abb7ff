"""Log lines of the trainer, as the pod of rank 0 writes them."""

import json

from pseudoreal_api.wire.messages import CheckpointCost, ProgressReport


def line(step: int, loss: float | None, checkpoint: int | None = None) -> str:
    """Return a progress line of a trainer's log."""
    cost = (
        CheckpointCost(step=checkpoint, bytes=2**31, seconds=3, bytes_per_second=1, stall_seconds=0)
        if checkpoint
        else None
    )
    report = ProgressReport(
        phase="real",
        step=step,
        total_steps=20,
        tokens=step * 256,
        loss=loss,
        learning_rate=1e-3,
        tokens_per_second=12.8,
        seconds=1,
        remaining_seconds=1,
        global_cursor=step,
        checkpoint=cost,
    )
    return json.dumps({"event": "progress", **report.model_dump()})
