"""Pictures of docs/method.md, as SVG."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.method.analysis import RATIOS, Comparison, Kind, Trial, kind_of
from benchmarks.method.arms import ARMS, Study
from benchmarks.method.intervals import Estimate
from benchmarks.method.marks import Mark
from benchmarks.method.trend import Trend

_COLOURS: dict[Kind, tuple[str, ...]] = {
    "unshared": ("black",),
    "delinked": ("#1f77b4", "#17becf", "#08306b", "#2ca02c", "#9467bd"),
    "shared throughout": ("#7f7f7f", "#bcbd22"),
    "grown": ("#d62728", "#ff7f0e"),
    "upcycled": ("#e377c2",),
    "small": ("#8c564b",),
}
_TICKS = (1, 2, 3, 5, 10, 20)


def draw_decision(comparisons: Sequence[Comparison], marks: Sequence[Mark], path: Path) -> None:
    """Draw the speed-up in seconds against the cost ratio, a panel for each study and a line for each arm."""
    figure, panels = _figure(path, 1, len(comparisons), (6.6, 7.2))
    for axes, comparison in zip(panels[0], comparisons, strict=True):
        for trial in comparison.trials:
            _draw_speed_up(axes, trial)
        _draw_marks(axes, [mark for mark in marks if mark.study == comparison.study])
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
        low, high = axes.get_ylim()
        ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20) if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="cost of a real step ÷ cost of a pseudo step (that only computes)", xlim=(1, 20))
        axes.set_title(f"{comparison.study}, {comparison.parameters:,} parameters without the embedding")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8, frameon=False)
    panels[0][0].set_ylabel("speed-up in seconds to the loss of unshared training")
    _save(figure, path)


def _draw_speed_up(axes: Axes, trial: Trial) -> None:
    found = [estimate for ratio in RATIOS if (estimate := trial.speed_up_in_seconds(ratio)) is not None]
    means, colour = [one.mean for one in found], _colour(trial.study, trial.arm.name)
    notes = ["at most" if any(one.at_most for one in found) else "at least"] if _has_bound(found) else []
    if found[0].low is None:
        notes.append("one seed")
    ends_above = any(one.ends_above for one in found)
    remarks = f" ({', '.join(notes)})" if notes else ""
    label = f"{trial.arm.name}{'†' if ends_above else ''}{remarks}"
    line, width = "--" if ends_above or _has_bound(found) else "-", 2.2 if trial.arm.is_primary else 1.2
    axes.plot(RATIOS, means, color=colour, linestyle=line, linewidth=width, label=label)
    if found[0].low is not None:
        lows = [max(one.low or 0.0, 1e-2) for one in found]
        axes.fill_between(RATIOS, lows, [one.high or 0.0 for one in found], color=colour, alpha=0.12, linewidth=0)


def _has_bound(found: Sequence[Estimate]) -> bool:
    return any(one.at_most or one.at_least for one in found)


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.ratio >= RATIOS[0]:
            axes.axvline(mark.ratio, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
            axes.annotate(
                f"{mark.name} ({mark.origin}, {mark.ratio:.2g})",
                (mark.ratio, 0.99),
                xycoords=axes.get_xaxis_transform(),
                xytext=(3, 0),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            )


def draw_curves(trials: Sequence[Trial], path: Path) -> None:
    """Draw loss against tokens, a row for each study and a panel for each width."""
    studies = [*dict.fromkeys(trial.study for trial in trials)]
    widths = sorted({trial.width for trial in trials})
    figure, panels = _figure(path, len(studies), len(widths), (4.4, 4.6))
    for study, row in zip(studies, panels, strict=True):
        for width, axes in zip(widths, row, strict=True):
            own = [trial for trial in trials if (trial.study, trial.width) == (study, width)]
            if own:
                _draw_curves(axes, own)
            else:
                axes.set_axis_off()
        row[0].set_ylabel("validation loss, nats per token")
        handles = {label: line for axes in row for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        beside = (1.02, 0.5)
        row[-1].legend(
            handles.values(), handles.keys(), loc="center left", bbox_to_anchor=beside, frameon=False, fontsize=8
        )
    figure.subplots_adjust(hspace=0.35)
    _save(figure, path)


def _draw_curves(axes: Axes, trials: Sequence[Trial]) -> None:
    """Draw the curves of one study and width."""
    for trial in trials:
        curve, colour = trial.mean_curve, _colour(trial.study, trial.arm.name)
        axes.plot(curve.tokens, curve.losses, color=colour, marker="o", markersize=3, label=trial.arm.name)
    axes.set_xscale("log")
    ticks = sorted({tokens for trial in trials for tokens in trial.mean_curve.tokens})
    axes.set_xticks(ticks, [f"{tokens / 1e6:.2g} M" for tokens in ticks])
    axes.minorticks_off()
    axes.set(xlabel="tokens", title=f"{trials[0].study}, {trials[0].parameters:,} parameters")
    axes.grid(alpha=0.3)


def draw_trends(trends: dict[Study, dict[str, Trend]], path: Path) -> None:
    """Draw the paired differences by size, a panel for each study, with the lines through them."""
    figure, panels = _figure(path, 1, len(trends), (6.0, 5.0))
    for axes, (study, arms) in zip(panels[0], trends.items(), strict=True):
        for index, (name, trend) in enumerate(arms.items()):
            colour = _colour(study, name)
            # Side by side, so that arms do not hide each other.
            beside = 1.015 ** (index - len(arms) // 2)
            for sample in trend.samples:
                at = beside * sample.parameters
                axes.plot([at] * len(sample.differences), sample.differences, ".", color=colour, alpha=0.35)
                axes.plot(at, sample.mean, "o", color=colour)
            ends = [trend.samples[0].parameters, trend.samples[-1].parameters]
            axes.plot([beside * end for end in ends], [trend.at(end) for end in ends], color=colour, label=name)
        axes.axhline(0, color="black", linewidth=1)
        axes.set_xscale("log")
        ticks = sorted({sample.parameters for trend in arms.values() for sample in trend.samples})
        axes.set_xticks(ticks, [f"{tick / 1000:.0f} k" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="parameters without the embedding", title=study)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8, frameon=False)
    panels[0][0].set_ylabel("loss minus that of unshared training, nats")
    _save(figure, path)


def _colour(study: Study, name: str) -> str:
    arm = next(arm for arm in ARMS[study] if arm.name == name)
    alike = [one.name for one in ARMS[study] if kind_of(one) == kind_of(arm)]
    colours = _COLOURS[kind_of(arm)]
    return colours[alike.index(name) % len(colours)]


def _figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[list[Axes]]]:
    # Equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    plt.switch_backend("svg")
    figure, panels = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False)
    return figure, [[*row] for row in panels]


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
