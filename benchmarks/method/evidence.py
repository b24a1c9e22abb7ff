"""The measured comparisons as data of the trainer, from which it gives advice."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.method.analysis import Trial
from benchmarks.method.arms import Stage
from benchmarks.method.intervals import Estimate

EVIDENCE = Path("trainer/pseudoreal_trainer/estimate/evidence.json")


def write_evidence(trials: Sequence[Trial], path: Path = EVIDENCE) -> None:
    path.write_text(json.dumps(evidence(trials), indent=1) + "\n")


def evidence(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return each trial that has pairs with unshared training; low and high are null with one seed."""
    found = []
    for trial in trials:
        speed_up, difference = trial.speed_up(), trial.difference()
        if trial.kind != "unshared" and speed_up is not None and difference is not None:
            found.append(
                {
                    "study": trial.study,
                    "width": trial.width,
                    "parameters": trial.parameters,
                    "tokens": max(curve.full for curve in trial.curves.values()),
                    "arm": trial.arm.name,
                    "stages": [_stage(stage) for stage in trial.arm.stages],
                    "seeds": speed_up.seeds,
                    "speedUpInTokens": _estimate(speed_up),
                    "lossDifference": _estimate(difference),
                    "relativeRate": trial.relative_rate,
                }
            )
    return {"trials": found}


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "until": stage.until,
        "layers": stage.layers,
        "blocks": stage.blocks,
        "sharesExperts": stage.shares_experts,
        "experts": stage.experts,
    }


def _estimate(found: Estimate) -> dict[str, float | None]:
    values = {"mean": found.mean, "low": found.low, "high": found.high}
    return {name: None if value is None else round(value, 5) for name, value in values.items()}
