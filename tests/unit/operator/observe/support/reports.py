"""Parts of reports of pods, and pods of jobs in tests."""

from typing import Any

from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import ProgressReport

PODS = {"pseudo": 10_000, "real": 10_000}
"""Phase name -> maximum number of pods, as in `ReportStore.follow`."""

LAYOUT = ChosenLayout(
    pipeline=2,
    replicas=1,
    expert_ranks=1,
    schedule="Layered",
    state_sharding="None",
    micro_batches=4,
    keep="Inputs",
    hardware="made up",
    step_time="0.25",
    bottleneck="the forward and backward passes of pipeline rank 0 take 91% of the step",
)


def progress(step: int) -> ProgressReport:
    values: dict[str, Any] = dict.fromkeys(("learning_rate", "tokens_per_second", "seconds", "remaining_seconds"), 1.0)
    return ProgressReport(
        phase="pseudo", step=step, total_steps=20, tokens=step * 256, loss=3.0, global_cursor=step * 8, **values
    )
