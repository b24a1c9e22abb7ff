"""Curves of one or several jobs, with few enough points to be drawn at once, and tables of the same curves. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pseudoreal_trainer.report.downsample import Bucket, Indices, Values, buckets, kept_points
from pseudoreal_trainer.report.job import Job
from pseudoreal_trainer.report.steps import TRAINED_SECONDS, WAITS
from pseudoreal_trainer.report.text import shown

_MOST_POINTS, _FEWEST_POINTS = 4000, 400
"""Most points of one chart, and fewest of one of its lines."""
_MOST_ROWS = 30
"""Most rows of a line's table."""
DASHES = 4
"""Number of kinds of lines."""
_MOST_MARKS = 60
"""Most borders and restarts that are marked in a chart."""

Number = int | float | None


@dataclass(frozen=True)
class Row:
    """Row of a chart's table: a curve in a range of steps."""

    line: str
    first: int
    last: int
    mean: str
    lowest: str
    highest: str


@dataclass(frozen=True)
class Line:
    label: str
    colour: int
    dash: int
    """Kind of line: 0 is whole, the others are broken in different ways."""
    points: bool
    """Whether each point is marked: the curve has few."""
    x: dict[str, list[Number]]
    """Axis (step, tokens, seconds) -> the place of each point."""
    y: list[Number]
    rows: list[Row] = field(repr=False)
    summary: str


@dataclass(frozen=True)
class Mark:
    """Vertical line at a border between phases, or at a restart."""

    x: dict[str, Number]
    text: str
    kind: str
    """phase, delink, growth or restart."""
    colour: int


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    unit: str
    """number, seconds, bytes or share."""
    about: str
    lines: list[Line]
    marks: list[Mark]

    @property
    def summary(self) -> str:
        return " ".join(line.summary for line in self.lines)


@dataclass(frozen=True)
class _Curve:
    """Column of a job that becomes a line."""

    label: str
    values: Values
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class _Plan:
    """Chart without data yet: title, unit, explanation, and the curves of a job."""

    id: str
    title: str
    unit: str
    about: str
    columns: Sequence[tuple[str, str]]
    """(column, label) of each curve."""


_PLANS = (
    _Plan("gradient-norm", "Gradient norm", "number", "L2 norm of the whole gradient before clipping.",
          [("gradient_norm", "gradient norm")]),
    _Plan("learning-rate", "Learning rate", "number", "Learning rate of the step, before multipliers.",
          [("learning_rate", "learning rate")]),
    _Plan("speed", "Tokens a second", "number", "Over all ranks, in the mean over the newest steps.",
          [("tokens_per_second", "tokens a second")]),
    _Plan("mfu", "MFU", "share", "Operations of the model as a share of the device's bfloat16 peak.", [("mfu", "MFU")]),
    _Plan("rate", "Operations a second", "number", "10^12 operations of the model a second and rank.",
          [("teraflops_per_second", "TFLOP/s of a rank")]),
    _Plan("waits", "Waits of a step", "seconds",
          "Seconds of a step in which rank 0 stood still: for samples (data), for gradients among ranks (reductions),"
          " for the optimizer in the memory where a unit has its home (updates).",
          [(f"wait_{cause}", cause) for cause in WAITS]),
    _Plan("expert-load", "Balance of experts", "number",
          "Tokens of the expert with the most, as a multiple of the mean of its layer; 1 is balance.",
          [("expert_load_max", "worst layer"), ("expert_load_mean", "mean over the layers")]),
    _Plan("expert-shares", "Idle experts and refused tokens", "share",
          "Share of the experts that no token chose, and of the choices that full experts refused.",
          [("idle_experts", "idle experts"), ("dropped_tokens", "refused choices")]),
    _Plan("router-entropy", "Entropy of the routers", "number", "In nats; 0 where one expert has everything.",
          [("router_entropy", "entropy")]),
)  # fmt: skip


def charts_of(jobs: Sequence[Job]) -> list[Chart]:
    """Return the charts for which some job has figures."""
    charts = [_loss(jobs), *(_chart(plan, jobs) for plan in _PLANS), _memory(jobs)]
    return [chart for chart in charts if chart.lines]


def _loss(jobs: Sequence[Job]) -> Chart:
    plan = _Plan("loss", "Loss", "number", "In nats per token; dots are validation losses.", [])
    return _drawn(plan, jobs, [list(_losses(job)) for job in jobs])


def _losses(job: Job) -> Iterator[_Curve]:
    yield _Curve("training", job.steps.column("loss"))
    yield _Curve("validation", job.steps.column("validation_loss"), points=True)
    for name, values in job.steps.validation_sets().items():
        yield _Curve(f"validation, {shown(name, 80)}", values, points=True)


def _memory(jobs: Sequence[Job]) -> Chart:
    about = (
        "Most memory that rank 0 has taken so far, and what pseudoreal plan predicts for it. The prediction counts"
        " tensors and their buffers; Python, torch, CUDA and kernels come on top."
    )
    return _drawn(_Plan("memory", "Memory", "bytes", about, []), jobs, [list(_memory_curves(job)) for job in jobs])


def _memory_curves(job: Job) -> Iterator[_Curve]:
    steps = job.steps
    yield _Curve("GPU, measured", steps.column("device_bytes"))
    if job.on_gpu:
        yield _Curve("GPU, predicted", _by_phase(job, {name: each.device for name, each in job.predicted.items()}),
                     dashed=True)  # fmt: skip
    yield _Curve("host, measured", steps.column("host_bytes"))
    host = {name: each.host + (0 if job.on_gpu else each.device) for name, each in job.predicted.items()}
    yield _Curve("host, predicted", _by_phase(job, host), dashed=True)


def _by_phase(job: Job, figures: dict[str, int]) -> Values:
    """Return a figure of each step's phase."""
    by_index = np.array([float(figures.get(name, np.nan)) for name in job.steps.phases], dtype=np.float64)
    return by_index[job.steps.phase] if len(job.steps) else np.empty(0)


def _chart(plan: _Plan, jobs: Sequence[Job]) -> Chart:
    curves = [[_Curve(label, job.steps.column(column)) for column, label in plan.columns] for job in jobs]
    return _drawn(plan, jobs, curves)


def _drawn(plan: _Plan, jobs: Sequence[Job], curves: Sequence[Sequence[_Curve]]) -> Chart:
    found = [
        (number, job, place, curve)
        for number, (job, own) in enumerate(zip(jobs, curves, strict=True))
        for place, curve in enumerate(curve for curve in own if np.isfinite(curve.values).any())
    ]
    most = max(_FEWEST_POINTS, _MOST_POINTS // max(1, len(found)))
    lines = []
    for number, job, place, curve in found:
        label = curve.label if len(jobs) == 1 else f"{shown(job.label, 80)}: {curve.label}"
        # One job: a colour for each curve. Several: a colour for each job, the same in all charts, and other dashes.
        colour, dash = (place, int(curve.dashed)) if len(jobs) == 1 else (number, place % DASHES)
        lines.append(_line(job, curve, label, (colour, dash), plan.unit, most))
    marks = [mark for number, job in enumerate(jobs) for mark in _marks(job, number, named=len(jobs) > 1)]
    return Chart(plan.id, plan.title, plan.unit, plan.about, lines, marks[:_MOST_MARKS])


def _line(job: Job, curve: _Curve, label: str, look: tuple[int, int], unit: str, most: int) -> Line:
    kept = kept_points(curve.values, most)
    rows = [_row(job, label, bucket, unit) for bucket in buckets(curve.values, _MOST_ROWS)]
    return Line(
        label=label,
        colour=look[0],
        dash=look[1],
        points=curve.points and len(kept) <= _FEWEST_POINTS,
        x=_places(job, kept),
        y=[_rounded(value) for value in curve.values[kept]],
        rows=rows,
        summary=_summary(job, curve, label, unit),
    )


def _row(job: Job, label: str, found: Bucket, unit: str) -> Row:
    step = job.steps.step
    texts = (readable(value, unit) for value in (found.mean, found.lowest, found.highest))
    return Row(label, int(step[found.first]), int(step[found.last]), *texts)


def _summary(job: Job, curve: _Curve, label: str, unit: str) -> str:
    points = np.flatnonzero(np.isfinite(curve.values))
    first, last = points[0], points[-1]
    lowest, highest = points[curve.values[points].argmin()], points[curve.values[points].argmax()]

    def at(index: int) -> str:
        return f"{readable(float(curve.values[index]), unit)} at step {int(job.steps.step[index]):,}"

    return f"{label}: from {at(first)} to {at(last)}, lowest {at(lowest)}, highest {at(highest)}."


def _places(job: Job, kept: Indices) -> dict[str, list[Number]]:
    steps = job.steps
    return {
        "step": [int(step) for step in steps.step[kept]],
        "tokens": [None if np.isnan(count) else int(count) for count in steps.column("tokens")[kept]],
        "seconds": [_rounded(second) for second in steps.column(TRAINED_SECONDS)[kept]],
    }


def _marks(job: Job, number: int, *, named: bool) -> Iterator[Mark]:
    of = f"{shown(job.label, 80)}: " if named else ""
    for border in job.transitions:
        yield Mark(_place(job, border.step), f"{of}{shown(border.text, 200)}", border.kind, number)
    for restart in job.restarts:
        yield Mark(_place(job, restart.step), f"{of}restart at step {restart.step:,}", "restart", number)


def _place(job: Job, step: int) -> dict[str, Number]:
    """Return the place of the end of a step on each axis; before the first step, 0."""
    # Trained steps are few; a restart may name any.
    index = int(np.searchsorted(job.steps.step, min(step, 2**53), side="right")) - 1
    if index < 0:
        return {"step": step, "tokens": 0, "seconds": 0}
    places = _places(job, np.array([index]))
    return {axis: found[0] for axis, found in places.items()} | {"step": step}


def _rounded(value: float) -> Number:
    """Return the value with the digits that a picture can show, so that a page stays small; None for NaN."""
    return None if np.isnan(value) else float(f"{value:.6g}")


def readable(value: float, unit: str) -> str:
    """Return a figure for people, with its unit."""
    if unit == "bytes":
        power = next((power for power in range(6) if abs(value) < 1024 ** (power + 1)), 5)
        return f"{value / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"
    if unit == "share":
        return f"{100 * value:.3g}%"
    text = f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.4g}"
    return f"{text} s" if unit == "seconds" else text
