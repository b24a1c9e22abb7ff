"""Plots of the report as SVG: validation loss against tokens and against seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.method.lives import Life, Point
from benchmarks.method.summary import Pace, points

_Place = Callable[[Life, Point], float]


def losses(groups: Sequence[tuple[str, Sequence[Life]]], pace: Pace, path: Path, top: float) -> None:
    """Draw the curves. `groups` are experiments with their results, one colour each. `top` is the highest
    loss shown."""
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    plt.switch_backend("svg")
    figure, (by_tokens, by_seconds) = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    _panel(by_tokens, groups, lambda _, point: point.tokens / 1000, "thousand tokens", top)
    _panel(by_seconds, groups, lambda life, point: pace.at(life, point.step), "seconds of training", top)
    by_tokens.set_ylabel("validation loss, nats per byte")
    by_seconds.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _panel(axes: Axes, groups: Sequence[tuple[str, Sequence[Life]]], place: _Place, unit: str, top: float) -> None:
    for index, (name, lives) in enumerate(groups):
        axes.plot(*_mean_curve(lives, place), color=f"C{index}", label=name, linewidth=1.5)
        for life in lives:
            curve = points(life)
            axes.plot(
                [place(life, p) for p in curve], [p.loss for p in curve], color=f"C{index}", alpha=0.2, linewidth=0.7
            )
    axes.set(xlabel=unit, ylim=(None, top))
    axes.grid(alpha=0.3)


def _mean_curve(lives: Sequence[Life], place: _Place) -> tuple[list[float], list[float]]:
    """Return the mean curve over the steps that all results have validated."""
    curves = [{point.step: point for point in points(life)} for life in lives]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    at = [mean(place(life, curve[step]) for life, curve in zip(lives, curves, strict=True)) for step in steps]
    return at, [mean(curve[step].loss for curve in curves) for step in steps]
