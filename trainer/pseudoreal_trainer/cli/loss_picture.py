"""Picture of the losses of a job, drawn with matplotlib."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
"""Progress at a step, from the log or the metrics of a job: `phase`, `step`, `loss`, `validation_loss`."""


def can_draw() -> bool:
    """Return whether matplotlib is installed; the image of a training pod lacks it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_losses(reports: Sequence[Report], path: Path, title: str, unit: str, baseline: float | None = None) -> None:
    """Plot the loss against the step, with one colour per phase. `unit`: the word for the job's unit of text, byte or
    token. `baseline`: loss of the order-2 model."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(9, 5))
    for phase in dict.fromkeys(report["phase"] for report in reports):
        own = [report for report in reports if report["phase"] == phase]
        line = axes.plot([r["step"] for r in own], [r["loss"] for r in own], alpha=0.45, label=f"{phase}: training")
        measured = _measurements(own)
        axes.plot(
            [r["step"] for r in measured],
            [r["validation_loss"] for r in measured],
            marker="o",
            color=line[0].get_color(),
            label=f"{phase}: validation",
        )
    if baseline is not None:
        axes.axhline(baseline, color="grey", linestyle="--", label="order-2 byte model")
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _measurements(reports: Sequence[Report]) -> list[Report]:
    """Return the reports with a new validation loss; the other reports repeat the previous one."""
    before = [None, *(report.get("validation_loss") for report in reports)]
    return [r for r, last in zip(reports, before, strict=False) if r.get("validation_loss") not in (None, last)]
