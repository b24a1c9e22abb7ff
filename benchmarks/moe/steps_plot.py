"""The plot of step times against the number of experts, as SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from benchmarks.moe.results import Taken, ratio
from benchmarks.moe.steps import growth as curves


def growth(found: Mapping[str, Sequence[Taken]], path: Path) -> None:
    """Draw step times relative to the fewest experts (left), and processor seconds (right)."""
    # Equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    plt.switch_backend("svg")
    figure, (times, parts) = plt.subplots(1, 2, figsize=(11, 4.5))
    for index, (name, taken) in enumerate(found.items()):
        colour, counts = f"C{index}", [int(each.label) for each in taken]
        times.plot(counts, [ratio(each, taken[0]) for each in taken], color=colour, marker="o", label=name)
        parts.plot(counts, [each.passes for each in taken], color=colour, marker="o")
        parts.plot(counts, [each.others for each in taken], color=colour, marker="o", linestyle=":")
    times.axhline(curves.MOST, color="grey", linewidth=0.8)
    times.set(title="time of a step, over that with 16 experts", ylim=(0, None))
    parts.set(title="processor seconds: passes (lines), all else (dots)", yscale="log")
    for axes in (times, parts):
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves.COUNTS, [f"{count:,}" for count in curves.COUNTS])
        axes.set_xlabel("experts of a layer")
        axes.grid(alpha=0.3)
    times.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
